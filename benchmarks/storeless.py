"""Runs `lanekeeper` with a store that grants every claim and stores no outcome. The difference to a normal run is the
cost of the store.

python -m benchmarks.storeless serve
"""

from collections.abc import Mapping, Sequence
from unittest.mock import patch

from typing_extensions import override

from consumers.state.base import Completion, Fingerprint, Granted, Held, Identity, Stop
from consumers.state.sqlite import store


class Forgetful(store.SqliteStore):
    """A store that grants every claim, and stores neither claims nor outcomes."""

    @override
    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> Granted:
        return Granted(token=1)

    @override
    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion:
        return completion

    @override
    async def release(
        self, held: Held, *, attempts: int = 0, due_ms: int | None = None, is_survived: bool = True, step: str = ""
    ) -> None:
        pass

    @override
    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Stop]:
        return {}


if __name__ == "__main__":
    from service.cli.main import main

    with patch.object(store, "SqliteStore", Forgetful):
        main()
