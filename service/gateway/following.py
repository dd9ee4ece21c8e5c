"""Reads the entries of a request (its stored steps and events) from any number on, as its worker writes them. The last
entry says how the request ended."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple

from consumers.job import now_ms
from consumers.state.following import Entry
from lanekeeper.contract.messages import BodyAddress
from service.config.gateway_section import GatewayKey
from service.gateway.documents import end_of, status_of
from service.gateway.looking import Looking
from service.gateway.requests import Requests, identity_of


class LargeEnd(NamedTuple):
    """The last entry of a request whose result is in the store of large bodies."""

    number: int
    kind: str
    text: bytes
    """The part of the entry's JSON before the result; `end` is the part after it."""
    result: BodyAddress
    """The address of the result in the store of large bodies."""
    end: bytes


@dataclass(slots=True)
class Following:
    """Follows requests for clients: yields a request's entries (its stored events) as workers write them. A caller can
    follow only requests of its own tenant."""

    requests: Requests
    looking: Looking

    async def entries(self, id: str, caller: GatewayKey, *, after: int) -> AsyncGenerator[Entry | LargeEnd, None]:
        """The entries with a number above `after`, as they are written. The last one is made from the result, and its
        number is one above that of the last stored entry. The iterator ends after it.

        When the process stops, the iterator ends without the last entry. Raises ApiError if the request is unknown, or
        the store cannot be reached.
        """
        identity = identity_of(id, caller)
        while (look := await self.looking.news(identity, after)) is not None:
            for entry in look.entries:
                yield entry
                after = entry.number
            if look.is_known and not (look.ended and after >= look.last):
                continue
            known = await self.requests.known(id, caller)
            completion = known.found.completion
            if completion is None:  # a dead letter was replayed, and the request runs again
                continue
            if after != look.last + 1:
                status = status_of(id, known.found, known.submission, now_ms=now_ms())
                number, kind = look.last + 1, end_of(completion)
                if status.result is None:
                    yield Entry(number, kind, status.text)
                else:
                    yield LargeEnd(number, kind, status.text, status.result, status.end)
            return
