"""An attempt at a request: its provider is called, and where that one fails another, under one CLIENT span a call.

At most two calls an attempt: retries (`consumers/retry.py`) come on top, and two layers that repeat multiply. Who is
asked next must not be known to fail (`breaker.py`) and must have room at once: an attempt does not stand in line again.

    the provider is down, broken or cut off   another provider, the same model
    it is overloaded, or says 429 for long    another provider, or the fallback model
    it says 429                               another provider, the same model
    it refuses our key, or the account is     another provider
    at its spend limit
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import assert_never

from consumers.failures import TIMEOUT, BreakerOpen, Failover, ProviderError, Retry, TransientError
from consumers.limits.base import Heard, Kind
from consumers.prices import Prices
from consumers.providers import counting
from consumers.providers.base import Answer, Parts, Provider, Restartable
from consumers.providers.breaker import Breakers, Pass, Tell, nobody
from consumers.providers.routes import Route
from lanekeeper.telemetry import logs, recording, signals
from lanekeeper.telemetry.tracing import Tracing
from topology.codec.request import Request

LONG_S = 5.0
"""After a 429 that tells a longer wait a fallback model is asked, too."""
SPEND_REFUSALS = 10
"""In a row, from one account: then it is left alone until a person has acted."""
LEAST_LEFT_S = 1.0
"""With less left until its deadline nobody else is asked."""
DEADLINE_ABOUT_S = 0.1
LATE = TransientError("no answer before the request's deadline", type=TIMEOUT)
"""What a deadline ended may be a provider that hangs, though nobody waited until its call had timed out."""
Enter = Callable[[Route, float], Awaitable[Pass | None]]
Move = Callable[[Route, ProviderError | None], Awaitable[bool]]
"""Reserve for another route at once, or not at all; whether it could. Then what was reserved for the one before is
settled: by the error of its call, or given back where none was made (None)."""
log = logs.logger()


async def stay(_: Route, __: ProviderError | None) -> bool:
    """Nobody else is asked."""
    return False


class Registry:
    """The providers of this process. `learn` is told, by account, what every response says of its limits."""

    def __init__(
        self,
        *providers: Provider,
        tracing: Tracing,
        breakers: Breakers | None = None,
        prices: Prices | None = None,
        learn: Callable[[str, Heard], None] = lambda _, __: None,
    ) -> None:
        self._providers = {each.name: each for each in providers}
        self._tracing = tracing
        self._breakers = breakers or Breakers()
        self._prices = prices or Prices()
        self._learn = learn
        self._spend_refusals: dict[str, int] = {}

    async def stream(
        self,
        request: Request,
        *,
        timeout_s: float,
        parts: Restartable | None,
        routes: Sequence[Route] = (),
        until_s: float = inf,
        move: Move = stay,
        begin: Callable[[], None] = lambda: None,
        tell: Tell = nobody,
    ) -> Answer:
        """Make one attempt; as `Provider.stream`.

        `routes`: the one that is reserved for, then those that may be asked instead; none: the first provider.
        `until_s`: its deadline, by the event loop's clock. `begin` is called before a call is made; `tell` is told how
        breakers change. Raises BreakerOpen, where no call was made.
        """
        routes = routes or (self._only(request),)
        enter = partial(self._breakers.enter, request=request.id, tell=tell)
        entered, others = await self._enter(routes, enter, move)
        begin()
        try:
            return await self._call(entered, request, timeout_s=timeout_s, parts=parts, until_s=until_s)
        except ProviderError as error:
            left_s = until_s - asyncio.get_running_loop().time()
            candidates = [each for each in others if _helps(error, entered.route, each)]
            if left_s < LEAST_LEFT_S or (other := await self._next(candidates, enter, move, error)) is None:
                raise
            first = error
        log.info(
            signals.FAILED_OVER,
            provider=entered.route.provider,
            model=entered.route.model,
            to_provider=other.route.provider,
            to_model=other.route.model,
            error=first.brief,
        )
        if parts is not None and parts.restart():
            log.info(signals.STREAM_RESTARTED, error=first.brief)
        try:
            return await self._call(other, request, timeout_s=min(timeout_s, left_s), parts=parts, until_s=until_s)
        except ProviderError as error:
            if error.means.retry is Retry.REJECTED and first.means.retry is not Retry.REJECTED:
                raise first from error  # what the second refuses, the first may answer yet
            raise

    async def _enter(self, routes: Sequence[Route], enter: Enter, move: Move) -> tuple[Pass, Sequence[Route]]:
        """The first that may be called, and those after it."""
        clock = asyncio.get_running_loop().time
        if (entered := await enter(routes[0], clock())) is not None:
            return entered, routes[1:]
        if (entered := await self._next(routes[1:], enter, move, None)) is None:
            raise BreakerOpen(min(self._breakers.wait_s(each, clock()) for each in routes))
        return entered, routes[routes.index(entered.route) + 1 :]

    async def _next(
        self, routes: Sequence[Route], enter: Enter, move: Move, error: ProviderError | None
    ) -> Pass | None:
        clock = asyncio.get_running_loop().time
        for route in routes:
            if (entered := await enter(route, clock())) is None:
                continue
            moved = False
            try:
                moved = await move(route, error)
            finally:
                if not moved:
                    await self._breakers.unknown(entered, clock())
            if moved:
                return entered
        return None

    async def _call(
        self, entered: Pass, request: Request, *, timeout_s: float, parts: Parts | None, until_s: float
    ) -> Answer:
        route, clock = entered.route, asyncio.get_running_loop().time
        began_s = clock()
        with self._tracing.chat(
            model=route.name, provider=route.provider, stream=parts is not None, max_tokens=request.max_tokens
        ) as span:
            try:
                answer = await self._providers[route.provider].stream(
                    asking_for(request, route.name), timeout_s=timeout_s, parts=parts
                )
            except ProviderError as error:
                self._learn(route.account, self._heard(route.account, error, took_s=clock() - began_s))
                await self._breakers.failed(entered, error, clock(), timeout_s=timeout_s)
                raise
            except BaseException:  # cancelled, or a fault of ours
                if parts is None and clock() >= until_s - DEADLINE_ABOUT_S:
                    await self._breakers.failed(entered, LATE, clock(), timeout_s=clock() - began_s)
                else:
                    await self._breakers.unknown(entered, clock())
                raise
            self._spend_refusals.pop(route.account, None)
            self._learn(route.account, counting.answered(answer, took_s=clock() - began_s))
            await self._breakers.answered(entered, clock())
            answer = replace(answer, cost_usd=self._prices.cost_usd(route.model, answer.usage))
            recording.answer(
                span,
                model=answer.model,
                input_tokens=answer.usage.input_tokens,
                output_tokens=answer.usage.output_tokens,
                cache_read_tokens=answer.usage.cache_read_input_tokens,
                cache_write_tokens=answer.usage.cache_creation_input_tokens,
                stop_reason=answer.stop_reason,
                request_id=answer.request_id,
                cost_usd=answer.cost_usd,
            )
            return answer

    def _heard(self, account: str, error: ProviderError, *, took_s: float) -> Heard:
        """A spend limit that is met once is told to whoever met it, and in the log; met again and again, it is the
        account's."""
        heard = counting.failed(error, error.rate, took_s=took_s)
        if heard.kind is not Kind.SPEND_LIMIT:
            return heard
        met = self._spend_refusals[account] = self._spend_refusals.get(account, 0) + 1
        if met == 1:
            log.error(signals.SPEND_LIMIT_MET, account=account, pauses_after=SPEND_REFUSALS, error=error.brief)
        return heard if met >= SPEND_REFUSALS else replace(heard, kind=Kind.FAILED)

    def _only(self, request: Request) -> Route:
        name = next(iter(self._providers))
        return Route(provider=name, model=request.model, name=request.model, account=name)


def asking_for(request: Request, model: str) -> Request:
    """The same request for a model of another name; itself where it has that name."""
    if model == request.model:
        return request
    body = json.dumps({**json.loads(request.body), "model": model}).encode()
    return replace(request, model=model, body=body)


def _helps(error: ProviderError, failed: Route, other: Route) -> bool:
    """Whether another may answer where one failed so."""
    is_elsewhere, is_paid_by_another = other.provider != failed.provider, other.account != failed.account
    is_same = other.model == failed.model
    match error.means.failover:
        case Failover.NOBODY:
            return False
        case Failover.PROVIDER:
            return is_elsewhere
        case Failover.SAME_MODEL:
            return is_elsewhere and is_same
        case Failover.ACCOUNT:
            return is_paid_by_another
        case Failover.SAME_MODEL_FIRST:
            return is_paid_by_another and (is_same or (error.retry_after_s or 0) > LONG_S)
        case never:
            assert_never(never)
