"""`lanekeeper` with a store that grants everything and keeps nothing: what the store costs is the difference.

python -m suite.storeless serve
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self
from unittest.mock import patch

from consumers.state.base import Completion, Copy, Granted, Held, Identity


class Forgetful:
    """Grants everything, keeps nothing."""

    trouble = None

    async def claim(self, identity: Identity, copy: Copy) -> Granted:
        return Granted(token=1)

    async def complete(
        self, identity: Identity, copy: Copy, completion: Completion, *, token: int | None
    ) -> Completion:
        return completion

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Any]:
        return {}

    async def hold(self, name: str, owner: str, *, for_s: float) -> None:
        return None

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
