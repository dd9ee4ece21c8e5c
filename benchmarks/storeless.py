"""Runs `lanekeeper` with a store that grants every claim and stores nothing. The difference to a normal run is the cost
of the store.

python -m benchmarks.storeless serve
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self
from unittest.mock import patch

from consumers.state.base import AllowanceTaken, Completion, Fingerprint, Granted, Held, Identity, Pause, Period
from consumers.state.groups import StoredGroup


class Forgetful:
    """A store that grants every claim and stores nothing."""

    trouble = None
    is_full = False

    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> Granted:
        return Granted(token=1)

    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion:
        return completion

    async def release(self, held: Held, **_: Any) -> None:
        return None

    async def ended_groups(self) -> Sequence[StoredGroup]:
        return ()

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Any]:
        return {}

    async def hold(self, name: str, owner: str, *, for_s: float) -> bool:
        return False

    async def take(self, name: str, amount: float, *, limit: float, period: Period) -> AllowanceTaken:
        return AllowanceTaken(granted=True, used=amount)

    async def pauses(self) -> Sequence[Pause]:
        return ()

    async def probe(self) -> None:
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


if __name__ == "__main__":
    from service.cli.main import main
    from service.worker import assembly

    with patch.object(assembly, "open_store", lambda *_, **__: Forgetful()):
        main()
