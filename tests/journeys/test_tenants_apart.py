"""Two users with the same request ids: neither can read or affect the other's requests (threat T5)."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from aiormq.exceptions import ChannelPreconditionFailed
from yarl import URL

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until


@contextmanager
def user_of(vhost: Vhost) -> Iterator[str]:
    """The URL of another user with all permissions, removed afterwards."""
    name, password = f"other-{secrets.token_hex(4)}", secrets.token_hex(8)
    vhost.api("PUT", f"users/{name}", {"password": password, "tags": ""})
    try:
        every = {"configure": ".*", "write": ".*", "read": ".*"}
        vhost.api("PUT", f"permissions/{vhost.quoted}/{name}", every)
        yield str(URL(vhost.amqp_url).with_user(name).with_password(password))
    finally:
        vhost.api("DELETE", f"users/{name}")


async def test_another_tenants_id_reveals_neither_answer_nor_state_nor_a_conflict(vhost: Vhost) -> None:
    with user_of(vhost) as url:
        name = URL(url).user
        async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as mine, requester(url) as theirs:
            first = await mine.ask({"prompt": "secret one"}, message_id="t-1", user_id=vhost.user)
            same = await theirs.ask({"prompt": "secret one"}, message_id="t-1", user_id=name)
            running = await mine.publish({"prompt": "slow [[held]]"}, message_id="t-2", user_id=vhost.user)
            await until(lambda: worker.calls("slow"))

            assert first.text == same.text == "echo: secret one"
            assert "x-lane-replayed" not in same.headers, "it was answered for itself, not from the other's store"
            assert len(worker.calls("secret one")) == 2
            other = await theirs.ask({"prompt": "another body"}, message_id="t-2", user_id=name)
            assert other.text == "echo: another body", "no conflict tells that the other's id is taken"
            for id in ("t-1", "t-2"):
                found = await theirs.control({"result": id, "tenant": vhost.user}, key="result", user_id=name)
                assert (found.control, "may not speak" in found.json["detail"]) == ("error", True)
                stopped = await theirs.control({"cancel": id, "tenant": vhost.user}, key="cancel", user_id=name)
                assert stopped.control == "error"
            asked = await theirs.control({"cancel": "t-2"}, key="cancel", user_id=name)
            assert asked.json["outcome"] == "ended", "its own of that id"
            assert not mine.finals(running)
            stopped = await mine.control({"cancel": "t-2"}, key="cancel", user_id=vhost.user)
            assert stopped.json["outcome"] == "told"
            assert (await mine.final(running)).code == "cancelled"


async def test_a_user_cannot_pretend_to_be_another(vhost: Vhost) -> None:
    """With another `user_id` the broker closes the channel; a header is ignored."""
    with user_of(vhost) as url:
        async with serving(vhost.amqp_url), requester(vhost.amqp_url) as mine, requester(url) as theirs:
            name = URL(url).user
            await mine.ask({"prompt": "mine"}, message_id="t-3", user_id=vhost.user)
            forged = {"x-lane-tenant": vhost.user, "x-lane-user-id": vhost.user}
            reply = await theirs.ask({"prompt": "mine"}, message_id="t-3", user_id=name, headers=forged)
            assert "x-lane-replayed" not in reply.headers
            async with requester(url) as liar:
                with pytest.raises(ChannelPreconditionFailed, match="user_id"):
                    await liar.publish({"prompt": "mine"}, message_id="t-3", user_id=vhost.user)
