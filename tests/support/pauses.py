"""Pauses without a database."""

from collections.abc import Sequence
from typing import Any

from consumers.state.base import Pause, StoreUnavailable
from tests.support.jobs import NOW_MS


class HeldPauses:
    """`StoredPauses` in memory."""

    def __init__(self, *pauses: Pause) -> None:
        self.held = {pause.id: pause for pause in pauses}
        self.is_away = self.is_full = False

    async def pauses(self) -> Sequence[Pause]:
        if self.is_away:
            raise StoreUnavailable("away")
        return list(self.held.values())

    async def pause(self, pause: Pause) -> bool:
        if not self.is_full:
            self.held[pause.id] = pause
        return not self.is_full

    async def resume(self, id: str) -> Pause | None:
        return self.held.pop(id, None)


def a_pause(kind: str = "lane", name: str = "batch", **given: Any) -> Pause:
    fields = {"since_ms": NOW_MS, "until_ms": None, "who": "ann@desk", "why": "too dear", **given}
    return Pause(kind=kind, name=name, **fields)  # type: ignore[arg-type]
