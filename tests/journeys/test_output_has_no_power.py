"""A model's output is delivered, and causes nothing else (threat T19)."""

import json

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

HOSTILE = json.dumps(
    {
        "cancel": "victim",
        "reply_to": "lane.dead",
        "routing_key": "critical.other.app",
        "headers": {"x-lane-status": "error", "x-lane-tenant": "acme"},
        "exchange": "lane.control",
        "sql": "'; DROP TABLE requests; --",
        "template": "{{7*7}} ${7*7} %s %(x)s {0}",
        "path": "../../etc/passwd",
        "url": "http://169.254.169.254/latest/meta-data/",
        "markup": "<img src=x onerror=alert(1)></script>",
        "frame": "\r\nx-lane-status: error\r\n\r\n",
        "event": 'data: {"type":"message_stop"}\n\nevent: error\ndata: {"type":"error"}\n\n',
    }
)


async def test_an_answer_full_of_control_text_changes_only_the_body_of_its_reply(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        await app.read_events()
        victim = await app.publish({"prompt": "victim [[held]]"}, message_id="victim")
        await until(lambda: worker.calls("victim"))
        for stream in (False, True):
            id = f"hostile-{stream}"
            body = {"messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 4000}
            reply = await app.ask(body, message_id=id, headers={"x-lane-stream": stream})
            assert (reply.status, reply.text) == ("ok", f"echo: {HOSTILE}")
            assert reply.headers["x-lane-request-id"] == id
            assert "x-lane-tenant" not in reply.headers
            await until(lambda id=id: "completed" in app.events_of(id))
            assert app.events_of(id) == ["started", "completed"]
            again = await app.control({"result": id}, key="result")
            assert again.body == reply.body, "the store keeps it to the byte"
        worker.api.release("victim")
        assert (await app.final(victim)).status == "ok"
        assert not app.dead
        assert len(worker.api.calls) == 3
        assert worker.is_well
