"""Sends the parts of a streamed answer to the requester, one message for each event of the provider.

A part is published without waiting for the confirms of earlier parts. Waiting would delay the first piece of the answer
by three round trips to the broker, because a stream begins with three other events. Parts keep their order, because
they are published on one channel. A lost part does not fail the attempt, because the final reply has the whole answer.
The final reply is sent only after each part is confirmed or counts as lost.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from consumers.job import Job
from consumers.providers.registry import CONTENT
from consumers.replies.reply import PART_TIMEOUT_S, Replies
from lanekeeper.amqp.publisher import Confirm
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, signals

UNCONFIRMED = 64
UNCONFIRMED_BYTES = 256 * 1024
"""How many bytes the unconfirmed parts of a stream may have together. A single part may be larger, but is sent only
when no other part is unconfirmed."""
FIRST_UNCONFIRMED = 4
"""How many published parts of a stream may wait for their confirms when the stream begins; the limit doubles each time
it is reached, up to `UNCONFIRMED`. The first piece of the answer is the fourth part, because three other events come
before it. So the first wait for a confirm follows that piece, which thereby reaches the client early, even if the
provider sends the whole answer at once."""
log = logs.logger()


class Parts:
    """Sends the parts of one attempt's stream to the requester, numbered from 0. Call this object with each event of
    the provider.

    If the requester may already have events of an earlier call to a provider, a part `restart` is sent first, which
    tells the requester to discard those events. That is so in a second or later attempt, in the second call of an
    attempt, and after a redelivery of the request.
    """

    def __init__(self, replies: Replies, job: Job) -> None:
        self._replies = replies
        self._job = job
        self._seq = -1
        self._has_lost = False
        self._unconfirmed: deque[tuple[asyncio.Future[Confirm], int]] = deque()
        self._bytes = 0
        self._most = FIRST_UNCONFIRMED
        self.flow = False
        self.on_flow: Callable[[], None] = lambda: None
        self.has_sent = False

    async def __call__(self, event: bytes, /) -> None:
        if not self.flow and CONTENT in event:
            self.flow = True
            self.on_flow()
        address, progress = self._job.message.reply_to, self._job.progress
        if not address and progress is None:
            return
        had_sent, self.has_sent = self.has_sent, True
        if self._seq < 0 and (had_sent or self._job.attempts > 1 or self._job.redelivered):
            await self._send(address, "restart", b"{}")
        await self._send(address, "event", event)

    def restart(self) -> bool:
        had_begun, self._seq, self.flow = self._seq >= 0, -1, False
        return had_begun

    async def confirmed(self) -> None:
        """Wait until the broker has confirmed all parts of the stream, for at most `PART_TIMEOUT_S`. Parts that are not
        confirmed by then count as lost."""
        if waiting := [answer for answer, _ in self._unconfirmed if not answer.done()]:
            await asyncio.wait(waiting, timeout=PART_TIMEOUT_S)
        while self._unconfirmed:
            self._take_oldest()

    async def _send(self, address: str | None, part: str, body: bytes) -> None:
        self._seq += 1
        if not address:
            if self._job.progress is not None:
                self._job.progress.part(part, body)
            return
        await self._make_room(len(body))
        try:
            answer = await self._replies.part(self._job, address, part=part, seq=self._seq, body=body)
        except BrokerError as error:
            self._log_loss(str(error))
            return
        self._unconfirmed.append((answer, len(body)))
        self._bytes += len(body)

    async def _make_room(self, size: int) -> None:
        while self._unconfirmed:
            oldest, _ = self._unconfirmed[0]
            if not oldest.done():
                if len(self._unconfirmed) < self._most and self._bytes + size <= UNCONFIRMED_BYTES:
                    return
                self._most = min(UNCONFIRMED, 2 * self._most)
                await asyncio.wait([oldest], timeout=PART_TIMEOUT_S)
                await asyncio.sleep(0)  # a gateway in this process handles the parts that it has received first
            self._take_oldest()

    def _take_oldest(self) -> None:
        answer, size = self._unconfirmed.popleft()
        self._bytes -= size
        if not answer.done():
            self._log_loss(f"no confirm within {PART_TIMEOUT_S:g} s")
        elif (error := answer.exception()) is not None:
            self._log_loss(str(error))
        elif (refused := answer.result()) is not None:
            self._log_loss(refused.__name__)

    def _log_loss(self, why: str) -> None:
        if not self._has_lost:  # logged once for each attempt, because a full queue refuses all later parts too
            self._has_lost = True
            log.info(signals.PART_LOST, reason=why)
