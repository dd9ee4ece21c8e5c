"""Keys: how they are made, kept and read; what a setting of them may be."""

import asyncio
import json
import time
import tomllib

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict
from structlog.testing import capture_logs

from lanekeeper.telemetry import signals
from service.cli import main
from service.config.settings import GatewayKey, GatewaySettings, OperatorRight
from service.gateway.access import Access, hash_of, is_loopback, lane_of, require_operator
from service.gateway.problems import ApiError
from tests.support.settings import load
from tests.support.waiting import until
from topology.lanes import DEFAULT_LANES

HASH = hash_of("lane-a")


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::1%lo", True),
        ("127.0.0.1%2eevil.example", False),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_what_is_this_machine(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer


@pytest.mark.slow
@pytest.mark.parametrize("tenant", ["", " crm", "a\nb", "*"])
def test_no_key_is_made_for_a_tenant_that_the_settings_refuse(tenant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["key", "new", tenant]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "TENANT" in printed.err) == ("", True)


def test_a_new_key_is_printed_once_and_its_hash_is_what_the_settings_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["key", "new", "crm", "--lane", "normal", "--lane", "batch", "--model", "claude-x", "--operator", "look"]
    assert main.run(line) == 0
    told = capsys.readouterr().out
    key = told.split("this once: ")[1].split()[0]

    keys = tomllib.loads(told[told.index("[gateway.keys.") :])["gateway"]["keys"]
    assert key not in json.dumps(keys)
    settings = load(env={"LANEKEEPER_GATEWAY__KEYS": json.dumps(keys), "LANEKEEPER_SPEAKERS": "guest"})
    found = settings.gateway.keys[hash_of(key)]
    assert (found.tenant, found.lanes, found.models) == ("crm", ("normal", "batch"), ("claude-x",))
    assert found.operator == "look"

    assert main.run([*line, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"key", "keys"}


@pytest.mark.parametrize(("expires_in_s", "is_valid"), [(None, True), (60, True), (-1, False)])
def test_a_key_is_valid_until_it_expires(expires_in_s: float | None, is_valid: bool) -> None:
    key = GatewayKey(tenant="crm", expires_at=None if expires_in_s is None else time.time() + expires_in_s)
    access = Access({HASH: key}, local=None)
    call = make_mocked_request("GET", "/v1/models", headers={"x-api-key": "lane-a"})
    if is_valid:
        assert access.caller(call) is key
    else:
        with pytest.raises(ApiError, match="has expired"):
            access.caller(call)


@pytest.mark.parametrize(
    ("right", "acts", "may"),
    [("no", False, False), ("look", False, True), ("look", True, False), ("act", False, True), ("act", True, True)],
)
def test_an_operator_may_look_or_also_act(right: OperatorRight, acts: bool, may: bool) -> None:
    key = GatewayKey(tenant="crm", operator=right)
    if may:
        require_operator(key, acts=acts)
        return
    with capture_logs() as logs, pytest.raises(ApiError, match=f"operator {right}") as refused:
        require_operator(key, acts=acts)
    assert refused.value.status == 403
    (line,) = logs
    assert (line["event"], line["tenant"], line["found"]) == (signals.OPERATOR_REFUSED, "crm", right)


async def test_what_a_key_follows_ends_when_the_key_is_revoked_changed_or_expired() -> None:
    own, same = (GatewayKey(tenant="crm", lanes=("normal",)) for _ in range(2))
    expires_at = time.time() + 0.05
    soon = GatewayKey(tenant="shop", expires_at=expires_at)
    hashes = [hash_of(name) for name in ("own", "same", "soon")]
    access = Access(dict(zip(hashes, (own, same, soon), strict=True)), local=None)

    async def follow(key: GatewayKey) -> None:
        async with access.while_valid(key):
            await asyncio.sleep(3600)

    following = [asyncio.create_task(follow(key)) for key in (own, same, soon)]
    await until(lambda: time.time() > expires_at)
    access.use({hashes[1]: GatewayKey(tenant="crm", lanes=("normal",)), hashes[2]: soon})
    await until(lambda: following[0].done() and following[2].done())

    assert not following[1].done()
    for task in (following[0], following[2]):
        with pytest.raises(ApiError, match="revoked"):
            task.result()
    access.use({hashes[1]: GatewayKey(tenant="crm", lanes=("batch",))})
    with pytest.raises(ApiError):
        await asyncio.wait_for(following[1], 30)


KEYS = {hash_of("lane-crm"): GatewayKey(tenant="crm"), hash_of("lane-web"): GatewayKey(tenant="web")}


def caller(*headers: tuple[str, str]) -> str | None:
    """The tenant whose key the call has. Raises ApiError."""
    call = make_mocked_request("POST", "/v1/messages", CIMultiDict(headers))
    return Access(KEYS, local=None).caller(call).tenant


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_two_different_keys_in_one_header_are_refused(name: str) -> None:
    scheme = "Bearer " if name == "authorization" else ""
    with pytest.raises(ApiError, match=f"header {name}: there are 2 different values") as refused:
        caller((name, f"{scheme}lane-crm"), (name, f"{scheme}lane-web"))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("authorization", "tenant"),
    [("Bearer lane-web", "web"), ("bearer lane-web", "web"), ("Basic lane-web", "crm"), ("Bearer ", "crm")],
)
def test_a_bearer_key_goes_before_x_api_key(authorization: str, tenant: str) -> None:
    assert caller(("x-api-key", "lane-crm"), ("authorization", authorization)) == tenant


def test_a_wrong_bearer_key_is_refused_whatever_x_api_key_is() -> None:
    with pytest.raises(ApiError, match="invalid"):
        caller(("authorization", "Bearer wrong"), ("x-api-key", "lane-crm"))


@pytest.mark.parametrize(
    ("key", "lane"),
    [({"tenant": "t"}, "normal"), ({"tenant": "t", "lanes": "batch,normal"}, "batch"), (None, "normal")],
)
def test_without_a_named_lane_it_is_the_keys_first_or_else_normal(key: dict[str, str] | None, lane: str) -> None:
    lanes = {lane.name: lane for lane in DEFAULT_LANES}
    keys = {} if key is None else GatewaySettings(keys={"0" * 64: key}).keys  # type: ignore[dict-item]
    assert lane_of(next(iter(keys.values()), GatewayKey(tenant=None)), None, lanes).name == lane
