"""A gateway asks a worker whether they have one store, and says so in the log where they have not."""

from pathlib import Path

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs
from typing_extensions import override

from consumers.state.base import Identity
from lanekeeper import Client, Final
from lanekeeper.errors import NoReply, NotEnded
from service.config.gateway_section import GatewayKey
from service.config.settings import Settings
from service.gateway.same_store import SameStore
from tests.support.gate import opened
from tests.support.waiting import until

CALLER = GatewayKey(tenant="crm")


class Worker(Client):
    """Answers as a worker that has this store; None: no worker is there."""

    def __init__(self, settings: Settings | None) -> None:
        super().__init__("amqp://a:b@127.0.0.1:1/")
        self._settings = settings
        self.asked: list[str] = []
        self.has_answered = False

    @override
    async def result(self, id: str, *, tenant: str | None = None, wait_s: float = 0) -> Final:
        self.asked.append(id)
        try:
            if self._settings is None:
                raise NoReply("no worker answered")
            async with opened(self._settings) as store:
                found = await store.find(Identity(tenant or "", id))
            raise NotEnded(id, "unknown" if found is None else "waiting")
        finally:
            self.has_answered = True


def settings(file: Path) -> Settings:
    return Settings(amqp_url=SecretStr("amqp://a:b@127.0.0.1:1/"), store_url=SecretStr(f"sqlite:///{file}"))


@pytest.mark.parametrize(("workers", "is_logged"), [("one", False), ("two", True), (None, False)])
async def test_another_store_is_logged(workers: str | None, is_logged: bool, tmp_path: Path) -> None:
    worker = Worker(None if workers is None else settings(tmp_path / workers))
    with capture_logs() as logs:
        async with opened(settings(tmp_path / "one")) as store:
            same = SameStore(worker, store)
            for _ in range(9):
                same.ask_soon(CALLER)
            await until(lambda: worker.has_answered)
            if is_logged:
                await until(lambda: "gateway.other_store" in [each["event"] for each in logs])

            async def is_forgotten() -> bool:
                return await store.find(Identity("crm", worker.asked[0])) is None

            await until(is_forgotten)
            await same.aclose()

    assert ("gateway.other_store" in [each["event"] for each in logs]) == is_logged
    assert len(worker.asked) == 1
