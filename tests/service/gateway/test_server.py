"""Health: `/healthz`, and `/readyz` with reasons; other paths are not in this version."""

import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from service.gateway.server import CannotListen, Handler, Server


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


class Broken:
    """A route with a fault in it."""

    largest_body = 1_000_000

    def handlers(self) -> dict[tuple[str, str], Handler]:
        return {
            ("POST", "/v1/messages"): self._fail,
            ("GET", "/v1/later"): self._fail,
            ("GET", "/v1/begun"): self._begun,
        }

    async def drained(self) -> None: ...

    async def aclose(self) -> None: ...

    async def _fail(self, request: web.Request) -> web.StreamResponse:
        await request.text()
        raise KeyError("a fault")

    async def _begun(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half of ")
        raise KeyError("a fault")


@pytest.fixture
async def broken(readiness: Readiness) -> AsyncIterator[Server]:
    async with Server(readiness, host="127.0.0.1", port=0, routes=Broken()) as server:
        yield server


async def test_a_fault_of_ours_is_an_error_of_anthropics_on_its_paths_and_logged_once(broken: Server) -> None:
    with capture_logs() as logs:
        async with aiohttp.ClientSession() as session, session.post(f"{broken.url}/v1/messages", data="secret") as got:
            said = await got.json()

    assert (got.status, said["type"], said["error"]["type"]) == (500, "error", "api_error")
    assert got.headers["request-id"] == said["request_id"]
    assert [(each["event"], each["where"], each["request"]) for each in logs] == [
        ("handler.failed", "gateway /v1/messages", said["request_id"])
    ]
    assert "secret" not in str(logs)


async def test_a_fault_of_ours_is_a_problem_document_elsewhere(broken: Server) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{broken.url}/v1/later") as got:
        said = await got.json()

    assert (got.status, got.content_type) == (500, "application/problem+json")
    assert (said["status"], said["title"]) == (500, "Internal Server Error")


async def test_an_answer_that_has_begun_breaks_off_by_a_fault_and_does_not_look_whole(broken: Server) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            async with session.get(f"{broken.url}/v1/begun") as got:
                await got.read()


async def test_another_method_is_answered_with_those_that_are_allowed(broken: Server) -> None:
    async with aiohttp.ClientSession() as session, session.delete(f"{broken.url}/v1/messages") as got:
        assert (got.status, got.headers["allow"]) == (405, "POST")
        assert (await got.json())["error"]["type"] == "invalid_request_error"
    async with aiohttp.ClientSession() as session, session.put(f"{broken.url}/healthz") as got:
        assert (got.status, got.headers["allow"]) == (405, "GET, HEAD")
        assert (await got.json())["status"] == 405
