"""The store, a database beside the broker, which is implemented with SQLite and with Redis.

The store keeps which worker has claimed a request and how the request ended (at most one result for each request), how
many requests wait in the broker for a delay, how much of an allowance (such as a tenant's dollars) was used in a
period, leases for jobs that only one process may do at a time, the progress of requests that clients follow, and what
operators have paused.

The store is not the system of record: losing it can cause a repeated call to a provider, but loses no request. Every
method raises `StoreUnavailable` if the store cannot answer, or cannot make a change durable.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self

from consumers.state.base import Identity, Look, RequestFilter, RequestPage, StoredFile, Submission
from consumers.state.groups import Groups
from consumers.state.rows import SmallRows
from lanekeeper.telemetry.figures import Timings


class Store(Groups, SmallRows):
    """What a worker asks of the store: of requests and their progress (`Requests`), groups, and small rows; and here,
    what only an engine knows. A store is open from `__aenter__` to `__aexit__`. `__aenter__` never raises an error: if
    the SQLite file or the Redis server cannot be used, every later call tries it again."""

    times: Timings
    is_full: bool

    @property
    @abstractmethod
    def trouble(self) -> str | None: ...

    @abstractmethod
    async def probe(self) -> None: ...

    @abstractmethod
    async def sweep(self) -> int:
        """Remove what need no longer be kept and, if the store is too large, the oldest rows of the tenants that have
        most. It does a limited amount of work: call it again until it returns 0."""

    @abstractmethod
    async def tenants_of(self, id: str) -> Sequence[str]:
        """The tenants of which a request with this id is known, in the order of their names."""

    @abstractmethod
    async def listed(self, wanted: RequestFilter, *, most: int, after: str | None = None) -> RequestPage:
        """A page of the requests of all tenants, without the steps and items of pipelines. `after`: `next` of the page
        before. Raises ValueError if that is none."""

    @abstractmethod
    async def submission(self, identity: Identity) -> Submission | None: ...

    @abstractmethod
    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> Sequence[Look | None]:
        """Returns the new entries of several requests, each of which is given with the number of the last entry that
        was read. The result for a request is None if the store knows the request, it has not ended, and it has no new
        entries."""

    @abstractmethod
    async def keep_file(self, file: StoredFile) -> bool:
        """Returns False, and changes nothing, if the file is another tenant's, or its tenant has `files_per_tenant`."""

    @abstractmethod
    async def find_files(self, ids: Sequence[str]) -> Mapping[str, StoredFile]:
        """Those that are known, by their ids, of all tenants."""

    @abstractmethod
    async def files(self, tenant: str) -> Sequence[StoredFile]:
        """All of a tenant's, the newest first."""

    @abstractmethod
    async def forget_file(self, file: StoredFile) -> None: ...

    @abstractmethod
    async def note_webhook(self, identity: Identity, row: bytes, *, until_ms: int) -> None:
        """Keep the log of a request's webhook, in place of an earlier one. Of more than `WEBHOOKS_KEPT`, and an
        eighth, the first to end of the tenants that have most are removed."""

    @abstractmethod
    async def webhook(self, identity: Identity) -> bytes | None: ...

    @abstractmethod
    async def webhooks(self, *, most: int) -> Sequence[tuple[Identity, bytes]]: ...

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...
