"""The client for programs without an event loop: a Flask or Django view, a Celery task, a script.

    from lanekeeper.sync import Client

    client = Client("amqp://guest:guest@localhost:5672/")       # connects on first use
    print(client.request({"prompt": "Name three rivers."}, key="critical.docs.example").text)

All threads of a process may share one client. It works after a fork: a process that was forked (by Gunicorn, Celery, …)
opens a connection of its own on first use. All clients of a process run in one background thread. A client that was
not closed is closed when nothing refers to it any more, or when the process ends.
"""

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar, Unpack

from lanekeeper import client as asynchronous
from lanekeeper import groups
from lanekeeper.client import Body
from lanekeeper.contract.messages import Depth
from lanekeeper.contract.problems import ClientMisused
from lanekeeper.groups import Found, GroupProgress, Outcome
from lanekeeper.replies import Cancelled, Final, Part
from lanekeeper.requests import Options

T = TypeVar("T")
READ_AHEAD = 16
CLOSED_WITHIN_S = 5.0
"""At the end of the process."""


class _Process:
    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.opened: weakref.WeakSet[_Opened] = weakref.WeakSet()

    def begin(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="lanekeeper", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin_closing(self, opened: "_Opened") -> None:
        """Takes no lock of ours and waits for nothing: the garbage collector may call it anywhere."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(opened.close(), self._loop)

    @staticmethod
    def wait(running: "Future[T]") -> T:
        """An interrupted caller (Ctrl-C, a task's time limit) cancels it."""
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise


class _Forks:
    """Counts the forks from the first process to this one: a process may get the id of one that has ended."""

    count = 0

    def add(self) -> None:
        self.count += 1


_forks = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forks.add)
_processes: dict[int, _Process] = {}
"""By their number of forks, those before this one as well."""


class _Opened:
    def __init__(self, make: Callable[[], asynchronous.Client]) -> None:
        self.process = _processes.setdefault(_forks.count, _Process())
        self._make = make
        self._opening = asyncio.Lock()
        self._client: asynchronous.Client | None = None

    async def client(self) -> asynchronous.Client:
        async with self._opening:
            if self._client is None:
                self._client = await self._make().__aenter__()
                self.process.opened.add(self)
            return self._client

    async def close(self) -> None:
        async with self._opening:
            if self._client is not None and self in self.process.opened:
                try:
                    await self._client.__aexit__(None, None, None)
                finally:
                    self.process.opened.discard(self)


def _close_dropped(opened: dict[int, _Opened]) -> None:
    if (own := opened.get(_forks.count)) is not None:
        own.process.begin_closing(own)


@atexit.register
def _close_all() -> None:
    if (process := _processes.get(_forks.count)) is not None:
        wait_for_all([process.begin(opened.close()) for opened in list(process.opened)], timeout=CLOSED_WITHIN_S)


class Client:
    """The same methods as `lanekeeper.Client`, which block until their result is there, and raise the same errors.

    It connects on first use. `close`, or leaving a `with` block, closes this process's connection.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self._make = partial(asynchronous.Client, url, **settings)
        self._make()  # wrong parameters are refused now, not on first use
        self._opened: dict[int, _Opened] = {}
        self._is_closed = False
        weakref.finalize(self, _close_dropped, self._opened).atexit = False

    def __enter__(self) -> Self:
        self._run(_nothing)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        if (opened := self._opened.pop(_forks.count, None)) is not None:
            opened.process.wait(opened.process.begin(opened.close()))

    def publish(self, body: Body, *, key: str, **options: Unpack[Options]) -> str:
        return self._run(lambda client: client.publish(body, key=key, **options))

    def request(self, body: Body, *, key: str, timeout_s: float | None = None, **options: Unpack[Options]) -> Final:
        return self._run(lambda client: client.request(body, key=key, timeout_s=timeout_s, **options))

    def stream(
        self, body: Body, *, key: str, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Generator[Part | Final, None, None]:
        return self._each(lambda client: client.stream(body, key=key, timeout_s=timeout_s, **options))

    def _each(self, begin: Callable[[asynchronous.Client], AsyncGenerator[T, None]]) -> Generator[T, None]:
        came: asyncio.Queue[T | _Over] = asyncio.Queue(READ_AHEAD)

        opened = self._of_this_process()

        async def follow() -> None:
            try:
                async with aclosing(begin(await opened.client())) as items:  # opening may fail, too
                    async for item in items:
                        await came.put(item)
                await came.put(_Over(None))
            except Exception as error:
                await came.put(_Over(error))

        process, following = opened.process, opened.process.begin(follow())
        try:
            while not isinstance(item := process.wait(process.begin(came.get())), _Over):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            following.cancel()

    def cancel(self, id: str, *, tenant: str | None = None) -> Cancelled:
        return self._run(lambda client: client.cancel(id, tenant=tenant))

    def result(self, id: str, *, tenant: str | None = None, wait_s: float = 0) -> Final:
        return self._run(lambda client: client.result(id, tenant=tenant, wait_s=wait_s))

    def results(self, ids: Sequence[str], *, tenant: str | None = None) -> Mapping[str, Found]:
        return self._run(lambda client: client.results(ids, tenant=tenant))

    def publish_many(
        self,
        bodies: Mapping[str, Body] | Sequence[Body],
        *,
        key: str,
        group: str | None = None,
        **options: Unpack[Options],
    ) -> "Group":
        made = self._run(lambda client: client.publish_many(bodies, key=key, group=group, **options))
        return self.group(made.id, tenant=options.get("tenant"))

    def group(self, id: str, *, tenant: str | None = None) -> "Group":
        return Group(self, id, tenant)

    def depth(self, lane: str) -> Depth | None:
        return self._run(lambda client: client.depth(lane))

    @property
    def trouble(self) -> str | None:
        return self._run(_trouble)

    def _run(self, use: Callable[[asynchronous.Client], Awaitable[T]]) -> T:
        opened = self._of_this_process()

        async def work() -> T:
            return await use(await opened.client())

        return opened.process.wait(opened.process.begin(work()))

    def _of_this_process(self) -> _Opened:
        if self._is_closed:
            raise ClientMisused("this client is closed: make another")
        if asyncio._get_running_loop() is not None:
            raise ClientMisused("lanekeeper.sync would block this thread's event loop: await lanekeeper.Client there")
        return self._opened.setdefault(_forks.count, _Opened(self._make))


class _Over(NamedTuple):
    """The end of what a generator yields. `error`: None if it ended by itself."""

    error: Exception | None


class Group:
    """The same as `lanekeeper.Group`."""

    def __init__(self, client: Client, id: str, tenant: str | None) -> None:
        self.id = id
        self._client = client
        self._of_client: Callable[[asynchronous.Client], groups.Group] = lambda opened: opened.group(id, tenant=tenant)

    def progress(self) -> GroupProgress:
        return self._client._run(lambda client: self._of_client(client).progress())

    def cancel(self) -> GroupProgress:
        return self._client._run(lambda client: self._of_client(client).cancel())

    def results(self, *, in_order: bool = False) -> Generator[tuple[str, Outcome], None]:
        return self._client._each(lambda client: self._of_client(client).results(in_order=in_order))


async def _nothing(_: asynchronous.Client) -> None: ...


async def _trouble(client: asynchronous.Client) -> str | None:
    return client.trouble
