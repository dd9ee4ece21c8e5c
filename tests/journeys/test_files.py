"""Requests that name files of Anthropic's Files API: they are answered where the file lies, and nowhere else."""

from collections.abc import Mapping
from typing import Any

import anthropic
import pytest
from typing_extensions import override

from service.gateway.access import hash_of
from service.simulated import messages
from service.simulated.app import SimulatedOptions
from service.simulated.faults import Fault
from tests.journeys.test_gateway import post
from tests.service.gateway.test_files import ids, text
from tests.service.gateway.test_lookups import sdk
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.gate import gate
from tests.support.requester import requester
from tests.support.serving import serving

KEYS = {hash_of("crm"): {"tenant": "crm"}, hash_of("shop"): {"tenant": "shop"}}
DOWN = SimulatedOptions(faults={"unavailable": 1.0})
CRM, SHOP = {"x_api_key": "crm"}, {"x_api_key": "shop"}


def naming(*files: str, prompt: str = "What does it say?") -> dict[str, Any]:
    blocks = [{"type": "document", "source": {"type": "file", "file_id": id}} for id in files]
    said = [{"role": "user", "content": [*blocks, {"type": "text", "text": prompt}]}]
    return {"model": "claude-sonnet-5-5", "max_tokens": 50, "messages": said}


def of_tenant(vhost: Vhost, tenant: str) -> dict[str, Any]:
    return {"user_id": vhost.user, "headers": {"x-lane-tenant": tenant}}


async def test_a_request_is_answered_where_its_file_lies_and_fails_over_nowhere(vhost: Vhost) -> None:
    async with FaultyAPI() as spare:
        providers = {"spare": {"api_key": "sk-spare", "base_url": spare.base_url}}
        lanes = {"batch": {"providers": ["spare", "anthropic"]}, "normal": {"max_attempts": 2}}
        given: dict[str, Any] = {"providers": providers, "lanes": lanes, "speakers": (vhost.user,)}
        async with (
            serving(vhost, **given) as worker,
            gate(worker, keys=KEYS) as url,
            requester(vhost) as app,
            sdk(url, "crm") as crm,
        ):
            here = (await crm.files.upload(file=text())).id
            there = (await crm.files.upload(file=text(), extra_headers={"x-lane-name": "batch"})).id
            assert (worker.api.files.ids, spare.files.ids) == ([here], [there])

            status, headers, _ = await post(url, naming(there), **CRM)
            assert (status, headers["x-lane-provider"]) == (200, "spare")
            reply = await app.ask(naming(there), **of_tenant(vhost, "crm"))
            assert (reply.status, reply.headers["x-lane-provider"]) == ("ok", "spare")
            status, _, found = await post(url, naming(here, there), **CRM)
            assert (status, "lie at different providers" in found["error"]["message"]) == (400, True)

            worker.api.configure(DOWN)
            assert (await post(url, naming(prompt="without files"), **CRM))[1]["x-lane-provider"] == "spare"
            before = len(spare.calls)
            assert (await post(url, naming(here), **CRM, x_lane_deadline_ms="3000"))[0] in (502, 503, 504)
            assert len(spare.calls) == before


async def test_files_of_others_are_not_there_and_unknown_ones_are_the_providers_to_judge(vhost: Vhost) -> None:
    async with (
        serving(vhost, speakers=(vhost.user,)) as worker,
        gate(worker, keys=KEYS) as url,
        requester(vhost) as app,
        sdk(url, "crm") as crm,
    ):
        id = (await crm.files.upload(file=text())).id
        assert (await post(url, naming(id), **CRM))[0] == 200
        assert (await app.ask(naming(id), **of_tenant(vhost, "crm"))).status == "ok"
        calls = len(worker.api.calls)

        wanted = {"type": "not_found_error", "message": f"File not found: {id}"}
        status, _, found = await post(url, naming(id), **SHOP)
        assert (status, found["error"]) == (404, wanted)
        assert found["request_id"]
        reply = await app.ask(naming(id), **of_tenant(vhost, "shop"))
        assert (reply.status, reply.code, reply.json["provider_status"]) == ("error", "provider_rejected", 404)
        escaped = b'{"messages":[{"role":"user","content":[{"type":"document","source":{"type":"file",'
        escaped += b'"\\u0066ile_id":"%b"}}]}]}' % id.encode()
        assert (await app.ask(escaped, **of_tenant(vhost, "shop"))).json["provider_status"] == 404
        assert len(worker.api.calls) == calls, "the provider, which would have it, was not asked"

        status, _, found = await post(url, naming("file_nobodys"), **SHOP)
        assert (status, found["error"]["message"]) == (404, "File not found: file_nobodys")
        assert len(worker.api.calls) > calls
        made_by_hand = worker.api.files.make("by an operator.txt", b"x").id
        assert (await post(url, naming(made_by_hand), **SHOP))[0] == 200


class WithATool(FaultyAPI):
    """Its code execution makes a file for each answer, of which the model also writes, and of somebody else's."""

    @override
    def output(self, asked: messages.Asked, fault: Fault | None) -> messages.Output:
        file = self.files.make("report.csv", asked.prompt.encode(), media_type="text/csv")
        result: Mapping[str, Any] = {
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": {
                "type": "bash_code_execution_result",
                "content": [{"type": "bash_code_execution_output", "file_id": file.id}],
            },
        }
        written = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"file_id": asked.prompt}}
        output = super().output(asked, fault)
        return messages.Output(blocks=(dict(result), written), stop_reason=output.stop_reason, tokens=output.tokens)


async def test_a_file_that_a_tool_made_for_an_answer_is_its_tenants_and_what_the_model_writes_gives_none(
    vhost: Vhost,
) -> None:
    async with WithATool() as api:
        secret = api.files.make("secret.txt", b"of an operator").id
        async with (
            serving(vhost, base_url=api.base_url, speakers=(vhost.user,)) as worker,
            gate(worker, keys=KEYS) as url,
            requester(vhost) as app,
            sdk(url, "crm") as crm,
            sdk(url, "shop") as shop,
        ):
            _, _, first = await post(url, naming(prompt=secret), **CRM)
            second = (await app.ask(naming(prompt="by AMQP"), **of_tenant(vhost, "crm"))).json
            made = [each["content"][0]["content"]["content"][0]["file_id"] for each in (first, second)]
            assert await (await crm.files.download(made[1])).read() == b"by AMQP"
            assert sorted(await ids(crm)) == sorted(made)
            assert await ids(shop) == []
            for id in (secret, *made):
                with pytest.raises(anthropic.NotFoundError):
                    await shop.files.download(id)
            with pytest.raises(anthropic.NotFoundError):
                await crm.files.download(secret)
            assert (await crm.files.delete(made[0])).id == made[0]
