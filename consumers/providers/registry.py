"""Makes the calls to this process's providers. Each call gets an OpenTelemetry span and a price, and the budget learns
from the response which limits the account has."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Protocol

import structlog
from cachetools import LRUCache
from opentelemetry.trace import Span

from consumers.dialects import DIALECTS
from consumers.dialects.answers import NO_CATEGORY, REFUSAL, Answer, OnEvent
from consumers.failures import ProviderError, TransientError
from consumers.job import Route
from consumers.limits.base import CallInProgress, Feedback, Kind
from consumers.prices import Prices
from consumers.providers.batches import Batches
from consumers.providers.routes import OTHER
from lanekeeper.telemetry import signals, tracing
from lanekeeper.telemetry.figures import TOKENS, Histogram, timings
from lanekeeper.telemetry.tracing import Tracing
from topology.codec.decoding import Request
from topology.codec.fields import with_field


class CallFigures:
    """What the calls to one provider for one model took, by their outcome (`answered`, `ProviderError.cause` or
    `cancelled`), and what they used."""

    def __init__(self) -> None:
        self.times = timings()
        self.first_tokens = Histogram()
        self.inputs, self.outputs = Histogram(TOKENS), Histogram(TOKENS)
        self.cache_read = 0
        self.cache_write = 0
        self.uncached = 0
        self.web_searches = 0
        self.usd = 0.0
        self.unpriced = 0
        """How many answers are in `usd` with nothing, because the price of a model is unknown."""

    def count(self, answer: Answer) -> None:
        usage = answer.usage
        self.inputs.add(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)
        self.outputs.add(usage.output_tokens)
        self.uncached += usage.input_tokens
        self.cache_read += usage.cache_read_input_tokens
        self.cache_write += usage.cache_creation_input_tokens
        self.web_searches += usage.web_searches
        self.usd += answer.cost_usd or 0.0
        self.unpriced += answer.cost_usd is None


log = structlog.get_logger()
STOP_REASONS = frozenset(
    {
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "compaction", REFUSAL,
        "model_context_window_exceeded", "stop", "length", "tool_calls", "function_call", "content_filter", "completed",
        "max_output_tokens",
    }
)  # fmt: skip
CATEGORIES = frozenset({"cyber", "bio", "frontier_llm", "reasoning_extraction", "general_harms", NO_CATEGORY})
"""Those of refusals. In metrics another category, or another stop reason, is `other`."""
UNPRICED_TOLD = 1000
"""For so many models without a price a warning is logged once each."""


class Provider(Protocol):
    """The adapter of one provider. It does not retry failed calls: `consumers/failures.py` decides on that."""

    name: str

    @property
    def batches(self) -> Batches | None:
        """None if the provider has no batches."""

    async def stream(
        self,
        request: Request,
        *,
        timeout_s: float,
        parts: OnEvent | None,
        in_progress: CallInProgress | None = None,
        traceparent: str | None = None,
    ) -> Answer:
        """Make one call. The answer is streamed if `parts` is given, or if it may take longer than ten minutes. What a
        streamed call has used so far is reported in `in_progress`.

        `timeout_s` is the time limit of the whole call or, if the answer is streamed, of the time to the first token;
        `request.call_s` bounds every pause after it. Raises `ProviderError`; cancelling the call closes its socket.
        """

    async def probe(self, model: str, *, by_call: bool) -> None:
        """Find out whether calls can be answered: return if so, else raise `ProviderError`. It makes a request that
        costs nothing, if the provider has one; otherwise, or if `by_call`, a call of `model` for one token."""

    async def aclose(self) -> None: ...


class Registry:
    """Makes calls to the providers of this process."""

    def __init__(
        self,
        *providers: Provider,
        tracing: Tracing,
        prices: Prices | None = None,
        learn: Callable[[str, Feedback], None] = lambda _, __: None,
    ) -> None:
        self._providers = {provider.name: provider for provider in providers}
        self._tracing = tracing
        self.prices = prices or Prices()
        self._models = self.prices.models
        self._unpriced: LRUCache[str, bool] = LRUCache(UNPRICED_TOLD)
        self._learn = learn
        self.calls: defaultdict[tuple[str, str, str], CallFigures] = defaultdict(CallFigures)
        self.stops: Counter[tuple[str, str, str]] = Counter()
        """Answers by lane, model and stop reason."""
        self.refusals: Counter[tuple[str, str, str]] = Counter()
        """Those that are refusals, by lane, model and category."""

    @property
    def names(self) -> Collection[str]:
        return self._providers.keys()

    async def call(
        self,
        route: Route,
        request: Request,
        *,
        timeout_s: float,
        parts: OnEvent | None,
        in_progress: CallInProgress | None = None,
    ) -> Answer:
        """Like `Provider.stream`, with the cost of the call."""
        clock = asyncio.get_running_loop().time
        began_s, outcome, has_first = clock(), "cancelled", False
        calls = self._calls_of(route)
        dialect = DIALECTS[request.dialect]

        async def noting(event: bytes) -> None:
            nonlocal has_first
            if not has_first and dialect.content in event:
                has_first = True
                calls.first_tokens.add(clock() - began_s)
            if parts is not None:
                await parts(event)

        with self._tracing.chat(
            model=route.name,
            provider=route.provider,
            stream=parts is not None,
            max_tokens=request.max_tokens or None,  # embeddings have none
            operation=dialect.operation,
        ) as span:
            try:
                answer = await self._providers[route.provider].stream(
                    asking_for(request, route.name),
                    timeout_s=timeout_s,
                    parts=None if parts is None else noting,
                    in_progress=in_progress,
                    traceparent=self._tracing.traceparent(),
                )
                outcome = "answered"
            except ProviderError as error:
                outcome = error.cause
                feedback = Feedback(
                    kind=error.means.says,
                    request=request.id,
                    rate=error.rate,
                    retry_after_s=error.retry_after_s,
                    took_s=clock() - began_s,
                )
                self._learn(route.account, feedback)
                raise
            finally:
                calls.times[outcome].add(clock() - began_s)
            counted = answer.counted._replace(output_tokens=0)  # the provider counts them after it has sent the headers
            feedback = Feedback(kind=Kind.ANSWERED, rate=answer.rate, counted=counted, took_s=clock() - began_s)
            self._learn(route.account, feedback)
            return self._count(answer, route, span)

    def batches(self, provider: str) -> Batches | None:
        found = self._providers.get(provider)
        return None if found is None else found.batches

    async def from_batch(self, route: Route, line: bytes, *, dialect: str) -> Answer:
        """The answer in one line of a batch's results, with its cost; no call is made. Raises the `ProviderError` that
        the line tells instead."""
        batches = self._providers[route.provider].batches if route.provider in self._providers else None
        if batches is None:
            raise TransientError(f"the provider {route.provider[:80]!r} of its batch is gone", type="no_batches")
        operation = DIALECTS[dialect].operation
        with self._tracing.chat(model=route.name, provider=route.provider, stream=False, operation=operation) as span:
            return self._count(await batches.answer(line, dialect=dialect), route, span)

    def count_stop(self, lane: str, model: str, answer: Answer) -> None:
        """Count an answer by why it ended."""
        model, reason = self._label(model), answer.stop_reason or OTHER
        self.stops[lane, model, reason if reason in STOP_REASONS else OTHER] += 1
        if answer.refusal is not None:
            self.refusals[lane, model, answer.refusal if answer.refusal in CATEGORIES else OTHER] += 1

    def _label(self, model: str) -> str:
        return model if model in self._models else OTHER

    def _calls_of(self, route: Route) -> CallFigures:
        return self.calls[route.provider, route.account, self._label(route.model)]

    def _count(self, answer: Answer, route: Route, span: Span) -> Answer:
        if answer.is_counted:
            answer.cost_usd = self.prices.cost_usd(route.model, answer.usage, name=route.name)
        answer.saved_usd = self.prices.saved_usd(route.model, answer.usage, name=route.name)
        if answer.is_counted and answer.cost_usd is None and route.model not in self._unpriced:
            self._unpriced[route.model] = True
            log.warning(signals.MODEL_UNPRICED, model=route.model, setting="LANEKEEPER_PRICES__MODELS")
        self._calls_of(route).count(answer)
        tracing.record_answer(
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

    async def probe(self, route: Route, by_call: bool) -> None:
        await self._providers[route.provider].probe(route.name, by_call=by_call)


def asking_for(request: Request, model: str) -> Request:
    """The request with the provider's own name for the model."""
    if model == request.model:
        return request
    return replace(request, model=model, body=with_field(request.body, "model", model))
