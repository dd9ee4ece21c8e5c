"""Health: `/healthz`, and `/readyz` with reasons; other paths are not in this version."""

import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from service.gateway.server import CannotListen, Server


class Readiness:
    def __init__(self) -> None:
        self.troubles: dict[str, str | None] = {"consume connection": None}

    def __call__(self) -> dict[str, str | None]:
        return self.troubles


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
async def health(readiness: Readiness) -> AsyncIterator[Server]:
    async with Server(readiness, host="127.0.0.1", port=0) as health:
        yield health


async def ask(health: Server, path: str, method: str = "GET") -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.request(method, health.url + path) as response:
        return response.status, await response.json(content_type=None)


async def test_healthz_is_ok_whatever_the_problems(health: Server, readiness: Readiness) -> None:
    readiness.troubles["consume connection"] = "lost"

    assert await ask(health, "/healthz") == (200, {"alive": True})


async def test_readyz_is_ok_without_problems(health: Server) -> None:
    assert await ask(health, "/readyz") == (200, {"ready": True, "reasons": {}})


async def test_readyz_fails_and_names_the_problem(health: Server, readiness: Readiness) -> None:
    readiness.troubles = {"consume connection": None, "queue lane.batch": "no such queue"}

    assert await ask(health, "/readyz") == (503, {"ready": False, "reasons": {"queue lane.batch": "no such queue"}})


async def test_readiness_is_checked_again_for_each_request(health: Server, readiness: Readiness) -> None:
    readiness.troubles["consume connection"] = "lost"
    assert (await ask(health, "/readyz"))[0] == 503
    readiness.troubles["consume connection"] = None
    assert (await ask(health, "/readyz"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/requests"), ("GET", "/v1/lanes"), ("GET", "/metrics"), ("GET", "/")]
)
async def test_paths_of_later_versions_are_refused_with_that_reason(health: Server, method: str, path: str) -> None:
    status, document = await ask(health, path, method)

    assert status == 404
    assert document["detail"] == f"{path} is not available in this version"


async def test_unknown_paths_are_not_found(health: Server) -> None:
    assert (await ask(health, "/admin"))[1]["detail"] == "/admin is not a path of Lanekeeper's"


async def test_port_0_chooses_a_free_port_for_each_process(readiness: Readiness) -> None:
    async with (
        Server(readiness, host="127.0.0.1", port=0) as one,
        Server(readiness, host="127.0.0.1", port=0) as other,
    ):
        assert one.port != other.port != 0


async def test_an_address_in_use_is_reported_with_the_setting_to_change(readiness: Readiness) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(CannotListen, match=rf"127\.0\.0\.1:{port}: something else .* LANEKEEPER_GATEWAY__PORT"):
            async with Server(readiness, host="127.0.0.1", port=port):
                pass


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
async def test_an_address_of_another_machine_is_reported(readiness: Readiness, host: str) -> None:
    with pytest.raises(CannotListen, match="LANEKEEPER_GATEWAY__HOST"):
        async with Server(readiness, host=host, port=0):
            pass


async def test_the_port_is_free_again_after_a_stop(readiness: Readiness) -> None:
    async with Server(readiness, host="127.0.0.1", port=0) as first:
        port = first.port
    async with Server(readiness, host="127.0.0.1", port=port) as second:
        assert second.port == port
