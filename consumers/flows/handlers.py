"""Calls the handlers: Python functions that are registered in the settings, and answer requests whose property `type`
names them. What follows from a failed call is decided like that of a provider's (`failures.py`)."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import jiter
import structlog

from consumers.background import Background, end_within
from consumers.failures import HandlerDied, HandlerError, RejectedError
from consumers.flows.pool_worker import (
    ANSWERED,
    REJECTED,
    RUN,
    RUN_BATCH,
    UNSENDABLE,
    Unsendable,
    as_json,
    checked,
    describe,
    import_function,
    result_of_one,
    unpacked,
)
from consumers.flows.process_pool import NotImported, PoolProcess, ProcessDied, ProcessPool
from consumers.gathering import Gathering
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing
from topology.codec.bounds import ANSWER_BYTES

PROVIDER: Final = "handler"
"""The header `x-lane-provider` of what a handler answered; `x-lane-model` is the handler's name."""
CANCELLED_WITHIN_S = 1.0
"""How long an async handler may take to end after it was cancelled. Then it is left behind."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """The settings of one handler. `run`: `module:function`."""

    name: str
    run: str
    kind: Literal["async", "cpu"]
    many: bool = False
    """It takes a list, and returns one of the same length: a result, or an exception, for each."""
    count: int = 20
    window_s: float = 0.02


Result = tuple[bytes, bytes]
"""Its kind (`pool_worker.ANSWERED`, …), and its text."""
Call = Callable[[bytes, float], Awaitable[bytes]]
"""Calls a handler with a JSON body and a time limit in seconds, and returns the JSON of its result."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call it is: calls of a lower rank go first, then it is the tenants' turn."""

    lane: str = ""
    rank: int = 0
    tenant: str = ""


ANYONE: Final = Caller()


class Handlers:
    """The registered handlers of this process. `most_bytes`: the largest result. `slots`: how many requests of each
    lane this process works on at a time, so that nothing waits for more to be gathered. `urgent_rank`: that of the lane
    whose calls need not wait for others' to end; None: there is no other lane."""

    def __init__(
        self,
        specs: Iterable[HandlerSpec] = (),
        *,
        most_bytes: int = ANSWER_BYTES,
        slots: Mapping[str, int] | None = None,
        urgent_rank: int | None = None,
        cores: int | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._most_bytes = most_bytes
        self._slots = slots or {}
        self._pool = ProcessPool(cores, urgent_rank=urgent_rank)
        self._tracing = tracing or Tracing()
        self._functions: dict[str, Callable[[Any], Any]] = {}
        self._background = Background()
        self._gatherings: dict[tuple[str, str], Gathering[bytes, Result]] = {}
        """By handler and lane: what is urgent waits for nothing that is not."""

    async def load(self) -> list[str]:
        """Import every handler, and return why some cannot be, one line for each."""
        found = [(spec, await self._problem(spec)) for spec in self._specs.values()]
        return [f"handlers.{spec.name}.run: {spec.run!r}: {why}" for spec, why in found if why is not None]

    async def _problem(self, spec: HandlerSpec) -> str | None:
        if spec.kind == "cpu":  # imported where it runs: a library may be large
            try:
                async with self._pool.process(spec.run):
                    return None
            except NotImported as error:
                return str(error)
        try:
            function = import_function(spec.run)
        except Exception as error:
            return describe(error)[1]
        if not inspect.iscoroutinefunction(function):
            return 'it is no `async def`; set kind = "cpu" for a function that computes'
        self._functions[spec.name] = function
        return None

    @asynccontextmanager
    async def turn(self, name: str, caller: Caller = ANYONE, *, alone: bool = False) -> AsyncIterator[Call]:
        """Wait until the handler may be called (for a free process, if it computes), and yield the call, which raises
        ProviderError or RequestProblem. `alone`: without others, although it takes many."""
        spec = self._specs[name]
        if spec.many:
            yield partial(self._traced, name, partial(self._among_many, spec, caller, alone=alone))
            return
        if spec.kind == "async":
            yield partial(self._traced, spec.name, partial(self._one_in_loop, spec))
            return
        try:
            async with self._pool.process(spec.run, rank=caller.rank, tenant=caller.tenant) as process:
                yield partial(self._traced, spec.name, partial(self._in_process, spec, process))
        except NotImported as error:
            raise _not_imported(name, error) from None

    async def aclose(self, *, within_s: float) -> None:
        await self._pool.aclose()
        await self._background.finish(within_s=within_s)

    async def _traced(self, name: str, call: Call, body: bytes, timeout_s: float) -> bytes:
        with self._tracing.handler(name):
            return await call(body, timeout_s)

    async def _among_many(
        self, spec: HandlerSpec, caller: Caller, body: bytes, timeout_s: float, *, alone: bool
    ) -> bytes:
        try:
            if alone:
                ((kind, text),) = await self._many(spec, caller.rank, [body], timeout_s, caller.tenant)
            else:
                kind, text = await self._gathering(spec, caller).call(body, timeout_s, tenant=caller.tenant)
        except TimeoutError:
            raise HandlerError(f"handler {spec.name}: no result within {timeout_s:g} s", type="timeout") from None
        return _result(spec.name, kind, text)

    def _gathering(self, spec: HandlerSpec, caller: Caller) -> Gathering[bytes, Result]:
        if (found := self._gatherings.get((spec.name, caller.lane))) is None:
            count = min(spec.count, self._slots.get(caller.lane, spec.count))
            found = self._gatherings[spec.name, caller.lane] = Gathering(
                partial(self._many, spec, caller.rank), count=count, window_s=spec.window_s, background=self._background
            )
        return found

    async def _many(
        self, spec: HandlerSpec, rank: int, bodies: Sequence[bytes], timeout_s: float, tenant: str
    ) -> Sequence[Result]:
        """A result for each of these bodies. Raises HandlerError for all of them; RejectedError only for a single one,
        because among several it is not known whose input was at fault."""
        try:
            if spec.kind == "async":
                values = [jiter.from_json(body, cache_mode="none") for body in bodies]
                results = await self._in_loop(spec, values, timeout_s)
                return [result_of_one(each, most_bytes=self._most_bytes) for each in results]
            async with self._pool.process(spec.run, rank=rank, tenant=tenant) as process:
                together = b"[" + b",".join(bodies) + b"]"
                several = await self._in_process(spec, process, together, timeout_s, kind=RUN_BATCH)
            return unpacked(several)
        except NotImported as error:
            raise _not_imported(spec.name, error) from None
        except RejectedError as error:
            if len(bodies) == 1:
                raise
            raise HandlerError(error.detail, type="failed") from error

    async def _one_in_loop(self, spec: HandlerSpec, body: bytes, timeout_s: float) -> bytes:
        result = await self._in_loop(spec, jiter.from_json(body, cache_mode="none"), timeout_s)
        try:
            return as_json(result, most_bytes=self._most_bytes)
        except Unsendable as error:
            raise unsendable(spec.name, str(error)) from None

    async def _in_loop(self, spec: HandlerSpec, value: Any, timeout_s: float) -> Any:
        running = self._background.begin(_awaited(self._functions[spec.name], value), name=f"handler {spec.name}")
        try:
            if not await end_within(running, within_s=timeout_s):
                raise HandlerError(f"handler {spec.name}: no result within {timeout_s:g} s", type="timeout")
            if running.cancelled():  # what it waited for was, and not this call
                raise HandlerError(f"handler {spec.name}: cancelled from within", type="failed")
            return checked(running.result(), count=len(value)) if spec.many else running.result()
        except HandlerError:
            raise
        except Exception as error:
            raise _failed(spec.name, *describe(error)) from error
        finally:
            if not running.done():
                running.cancel()
                self._background.detached(_see_end(running, spec.name), name=f"end of handler {spec.name}")

    async def _in_process(
        self, spec: HandlerSpec, process: PoolProcess, body: bytes, timeout_s: float, *, kind: bytes = RUN
    ) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                kind, result = await process.call(spec.run, body, most_bytes=self._most_bytes, kind=kind)
        except ProcessDied as error:
            raise HandlerDied(f"handler {spec.name}: its process died under it ({error})", type="died") from None
        except TimeoutError:
            text = f"handler {spec.name}: no result within {timeout_s:g} s: its process was killed"
            raise HandlerError(text, type="timeout") from None
        return _result(spec.name, kind, result)


def _result(name: str, kind: bytes, text: bytes) -> bytes:
    if kind == ANSWERED:
        return text
    if kind == UNSENDABLE:
        raise unsendable(name, text.decode(errors="replace"))
    raise _failed(name, kind, text.decode(errors="replace"))


def _not_imported(name: str, error: NotImported) -> HandlerError:
    return HandlerError(f"handler {name}: not imported: {error}", type="failed")


async def _awaited(function: Callable[[Any], Any], value: object) -> object:
    try:
        return await function(value)
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except SystemExit as error:  # like the others, it would end the worker
        raise RuntimeError(f"it called sys.exit({error})") from None
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _see_end(running: "asyncio.Task[object]", name: str) -> None:
    if not await end_within(running, within_s=CANCELLED_WITHIN_S):
        log.error(signals.HANDLER_STUCK, handler=name)


def _failed(name: str, kind: bytes, text: str) -> HandlerError | RejectedError:
    if kind == REJECTED:
        return RejectedError(f"handler {name}: {text}", status=422, type="rejected")
    return HandlerError(f"handler {name}: {text}", type="failed", where=text.partition(": ")[0])


def unsendable(name: str, why: str) -> RequestProblem:
    """The final error for a result that cannot be sent: the handler is at fault, so its request is kept."""
    return RequestProblem("internal", f"handler {name}: {why}", brief=f"handler {name}: a result that cannot be sent")
