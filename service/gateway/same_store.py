"""Checks that the workers use the gateway's store. If they use another store, the status of submitted requests stays
`queued` for ever.

To find out, the gateway stores a test request as submitted without publishing it, and asks a worker for its result. A
worker with the same store answers that the request waits; a worker with another store answers that it is unknown.
"""

import asyncio
import uuid
from contextlib import suppress
from typing import Final

from consumers.background import Background
from consumers.job import now_ms
from consumers.state.following import QUEUED, FollowedStore, NewEntry, Submission
from lanekeeper import Client
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.errors import NotEnded
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.logs import logger
from service.config.gateway_section import GatewayKey
from service.gateway.requests import identity_of

ASK_EVERY_S: Final = 60.0
"""The shortest time, in seconds, between two checks whether the workers use the same store as this gateway."""
KEPT_MS: Final = 60_000
"""For how many ms the store keeps the test request that `SameStore` writes, if `SameStore` does not remove it."""
log = logger()


class SameStore:
    """Checks, at most once a minute, whether the workers use the same store as this gateway, and logs an error if they
    do not."""

    def __init__(self, client: Client, store: FollowedStore) -> None:
        self._client = client
        self._store = store
        self._background = Background()
        self._asked_at_s = -ASK_EVERY_S

    def ask_soon(self, caller: GatewayKey) -> None:
        """Start a check of the store in the background, with a test request of this caller's tenant, unless a check was
        started within the last minute."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_at_s >= ASK_EVERY_S:
            self._asked_at_s = now_s
            self._background.begin(self._ask(caller), name="same store")

    async def aclose(self) -> None:
        await self._background.finish(within_s=0)

    async def _ask(self, caller: GatewayKey) -> None:
        with suppress(LanekeeperError):  # no worker answers, or the store cannot be reached: the check has no result
            if await self._is_another(caller):
                log.error(signals.OTHER_STORE, setting="LANEKEEPER_STORE_URL")

    async def _is_another(self, caller: GatewayKey) -> bool:
        id = uuid.uuid4().hex
        identity, at_ms = identity_of(id, caller), now_ms()
        unpublished = Submission(
            body_hash=b"", lane=caller.lanes[0], submitted_ms=at_ms, due_ms=None, deadline_ms=at_ms
        )
        await self._store.follow(
            identity, unpublished, first_entry=NewEntry(QUEUED, b"{}"), keep_until_ms=at_ms + KEPT_MS
        )
        try:
            await self._client.result(id, tenant=caller.tenant)
        except NotEnded as answer:
            return answer.status == "unknown"
        finally:
            await self._store.unfollow(identity)
        return False
