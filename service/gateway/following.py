"""The entries of a request, from any number on, as its worker writes them; the last one says how it ended."""

from collections.abc import AsyncGenerator

from consumers.job import now_ms
from consumers.state.following import Entry
from service.config.gateway_section import GatewayKey
from service.gateway.documents import end_of, status_of
from service.gateway.looking import Looking
from service.gateway.requests import Requests, identity_of


class Following:
    """Follows requests of a caller's tenant."""

    def __init__(self, requests: Requests, looking: Looking) -> None:
        self._requests = requests
        self._looking = looking

    async def entries(self, id: str, caller: GatewayKey, *, after: int) -> AsyncGenerator[Entry, None]:
        """The entries after a number, as they come. The last one, after which this ends, is made of the result, and has
        the number that follows. It is left out if it is `after`.

        Ends without it where the process stops. Raises ApiError: the request is unknown, or the store is away.
        """
        identity = identity_of(id, caller)
        while (look := await self._looking.news(identity, after)) is not None:
            for entry in look.entries:
                yield entry
                after = entry.number
            if look.is_known and not (look.ended and after >= look.last):
                continue
            known = await self._requests.known(id, caller)
            completion = known.found.completion
            if completion is None:  # a dead letter that runs again
                continue
            if after != look.last + 1:
                told = status_of(id, known.found, known.submission, now_ms=now_ms())
                yield Entry(look.last + 1, end_of(completion), told)
            return
