"""Makes the calls to this process's providers. Each call gets an OpenTelemetry span and a price, and the budget learns
from the response which limits the account has."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

from consumers.chain import Route
from consumers.failures import ProviderError
from consumers.limits.base import Feedback, Kind
from consumers.prices import Prices
from consumers.providers.base import Answer, OnEvent, Provider
from lanekeeper.telemetry import logs, recording, signals
from lanekeeper.telemetry.tracing import Tracing
from topology.codec.request import Request

SPEND_REFUSALS = 10
"""If a provider has refused this many calls in a row because the account's spend limit is reached, the account is not
used for a while, because only a person can raise that limit."""
log = logs.logger()


class Registry:
    """Makes calls to the providers of this process, each with a trace span and a price. `learn` is called after each
    response, with the name of the account (a provider's limits for a class of models) and what the response says about
    its limits."""

    def __init__(
        self,
        *providers: Provider,
        tracing: Tracing,
        prices: Prices | None = None,
        learn: Callable[[str, Feedback], None] = lambda _, __: None,
    ) -> None:
        self._providers = {provider.name: provider for provider in providers}
        self._tracing = tracing
        self._prices = prices or Prices()
        self._learn = learn
        self._spend_refusals: dict[str, int] = {}

    async def call(self, route: Route, request: Request, *, timeout_s: float, parts: OnEvent | None) -> Answer:
        """Make one call to the route's provider, like `Provider.stream`, and add the cost of the call to the answer."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        with self._tracing.chat(
            model=route.name, provider=route.provider, stream=parts is not None, max_tokens=request.max_tokens
        ) as span:
            try:
                answer = await self._providers[route.provider].stream(
                    asking_for(request, route.name), timeout_s=timeout_s, parts=parts
                )
            except ProviderError as error:
                self._learn(route.account, self._feedback(route.account, error, took_s=clock() - began_s))
                raise
            self._spend_refusals.pop(route.account, None)
            counted = answer.counted._replace(output_tokens=0)  # the provider counts them after it has sent the headers
            self._learn(
                route.account,
                Feedback(kind=Kind.ANSWERED, rate=answer.rate, counted=counted, took_s=clock() - began_s),
            )
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

    def _feedback(self, account: str, error: ProviderError, *, took_s: float) -> Feedback:
        """What a failed call says about its account, for the budget. The first refusal because of a spend limit is
        logged. Such refusals count as ordinary failures until there are `SPEND_REFUSALS` in a row."""
        feedback = Feedback(kind=error.means.says, rate=error.rate, retry_after_s=error.retry_after_s, took_s=took_s)
        if feedback.kind is not Kind.SPEND_LIMIT:
            return feedback
        count = self._spend_refusals[account] = self._spend_refusals.get(account, 0) + 1
        if count == 1:
            log.error(signals.SPEND_LIMIT_MET, account=account, pauses_after=SPEND_REFUSALS, error=error.brief)
        return feedback if count >= SPEND_REFUSALS else replace(feedback, kind=Kind.FAILED)


def asking_for(request: Request, model: str) -> Request:
    """A copy of the request that contains the provider's own name for the model (`model`); the request itself if it
    contains that name already."""
    if model == request.model:
        return request
    body = json.dumps({**json.loads(request.body), "model": model}).encode()
    return replace(request, model=model, body=body)
