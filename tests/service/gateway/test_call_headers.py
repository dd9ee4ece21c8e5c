"""Headers of a call: those that may be there once, which one of two keys counts, and what a refusal suggests."""

from collections.abc import Iterable

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from service.config.gateway_section import GatewayKey
from service.gateway.access import Access, hash_of
from service.gateway.problems import ApiError
from tests.service.gateway.test_calls_refused import Opened, body

KEYS = {
    hash_of("lane-crm"): GatewayKey(tenant="crm"),
    hash_of("lane-web"): GatewayKey(tenant="web"),
}
AN_ID = ("idempotency-key", "k-1")


async def refusal(made: Opened, headers: Iterable[tuple[str, str]], path: str = "/v1/messages") -> tuple[int, str]:
    """The status and text of a call's answer."""
    url = f"http://127.0.0.1:{made.server.port}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body(), headers=CIMultiDict(headers)) as got,
    ):
        return got.status, await got.text()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/requests"])
@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("Idempotency-Key", "k-1", "k-2"),
        ("x-lane-name", "batch", "normal"),
        ("x-lane-deadline-ms", "1000", "2000"),
    ],
)
async def test_a_header_with_two_values_is_refused_by_its_name(path: str, name: str, one: str, other: str) -> None:
    made = Opened()
    async with made.server:
        status, said = await refusal(made, [(name, one), (name, other)], path)

    assert status == 400
    assert f"header {name}: there are 2 different values" in said


async def test_a_header_that_is_repeated_with_the_same_value_counts_once() -> None:
    made = Opened()
    async with made.server:
        said = [("x-lane-deadline-ms", "never")] * 2
        assert "x-lane-deadline-ms: found 'never', allowed" in (await refusal(made, said))[1]


def caller(*headers: tuple[str, str]) -> str | None:
    """The tenant whose key the call has. Raises ApiError."""
    call = make_mocked_request("POST", "/v1/messages", CIMultiDict(headers))
    return Access(KEYS, local=None).caller(call).tenant


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_two_different_keys_in_one_header_are_refused(name: str) -> None:
    scheme = "Bearer " if name == "authorization" else ""
    with pytest.raises(ApiError) as refused:
        caller((name, f"{scheme}lane-crm"), (name, f"{scheme}lane-web"))

    assert refused.value.status == 400
    assert refused.value.message == f"header {name}: there are 2 different values; send one"


@pytest.mark.parametrize(
    ("authorization", "tenant"),
    [("Bearer lane-web", "web"), ("bearer lane-web", "web"), ("Basic lane-web", "crm"), ("Bearer ", "crm")],
)
def test_a_bearer_key_goes_before_x_api_key(authorization: str, tenant: str) -> None:
    assert caller(("x-api-key", "lane-crm"), ("authorization", authorization)) == tenant


def test_a_wrong_bearer_key_is_refused_whatever_x_api_key_is() -> None:
    with pytest.raises(ApiError, match="invalid"):
        caller(("authorization", "Bearer wrong"), ("x-api-key", "lane-crm"))


async def test_a_lane_that_does_not_exist_is_refused_by_those_that_the_caller_may_name() -> None:
    made = Opened()
    async with made.server:
        status, said = await refusal(made, [("x-lane-name", "urgent")])

    assert status == 400
    assert "found 'urgent', allowed is one of critical, normal, batch" in said
    assert "key" not in said


@pytest.mark.parametrize("name", ["x-lane-zzzz", "x-lane-tenent", "x-lane-stresm"])
async def test_an_unknown_header_is_refused_with_headers_that_a_call_may_have(name: str) -> None:
    made = Opened()
    async with made.server:
        status, said = await refusal(made, [(name, "x"), AN_ID])

    assert status == 400
    assert f"unknown header '{name}'" in said
    assert not [
        each for each in ("x-lane-body", "x-lane-tenant", "x-lane-stream") if f"{each}," in said or f"{each}?" in said
    ]
    assert name != "x-lane-zzzz" or "known: x-lane-at, x-lane-deadline-ms, x-lane-delay-ms, x-lane-name" in said
