"""One worker process of the replay, which estimates what requests use, makes their calls, and handles the results; and
the provider, with the buckets and headers of the simulated API, without HTTP."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from benchmarks.replaying.load import Ask
from benchmarks.replaying.scenarios import Scenario
from consumers.dialects.anthropic import read_rate
from consumers.failures import OverloadedError, ProviderError, RateLimitedError, RetryPolicy, TransientError, decide
from consumers.limits.base import Amounts, BudgetSpec, Feedback, Kind, RateHeaders, Reservation
from consumers.limits.estimates import Estimates, UsageClass
from consumers.outcomes import Retried
from consumers.providers.breakers import Breaker, BreakerState, FailedCall
from service.simulated.buckets import Limits
from service.simulated.faults import Refusal
from topology.lanes import DEFAULT_LANES

MODEL = "replay"
MAX_TOKENS = 2048
TRAVEL_S = (0.001, 0.010)
"""How long a message takes to the provider or back."""
A_DAY_MS = 86_400_000
ATTEMPTS = {lane.name: lane.max_attempts for lane in DEFAULT_LANES}


@dataclass(frozen=True, slots=True)
class Answer:
    """The provider's answer to a new call: 200 (admitted; it ends later), 429, 500 or 529."""

    status: int
    rate: RateHeaders | None = None
    retry_after_s: float | None = None


class Provider:
    """The provider of a scenario."""

    def __init__(self, limits: Amounts, scenario: Scenario, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._scenario = scenario
        self._rng = random.Random(scenario.seed)
        self.running = 0
        requests, input_tokens, output_tokens = (round(each) for each in limits)
        self._limits = Limits(
            requests=requests,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            burst_s=scenario.bucket_s,
            clock=clock,
        )

    def warm_up(self) -> RateHeaders | None:
        """The rate-limit headers of one answer, with full buckets."""
        rate = self.enter(1000).rate
        self.end(input_tokens=1000, output_tokens=100)
        return rate

    def enter(self, input_tokens: int) -> Answer:
        """A call arrives. Its estimated input is taken from the bucket, as the simulated API does."""
        of = self._scenario
        if of.down_s is not None and of.down_s[0] <= self._clock() < of.down_s[1]:
            return Answer(500)
        if of.steady is not None:
            is_full = of.most_calls is not None and self.running >= of.most_calls
            if is_full or self._rng.random() < of.weather:
                return Answer(529)
            self.running += 1
            return Answer(200)
        try:
            self._limits.enter(_estimated(input_tokens))
        except Refusal as refusal:
            return Answer(429, _read(refusal.headers), float(refusal.headers["retry-after"]))
        self.running += 1
        return Answer(200, _read(self._limits.headers()))

    def end(self, *, input_tokens: int, output_tokens: int) -> None:
        """The answer is complete: its output counts, and the estimate is corrected."""
        self.running -= 1
        if self._scenario.steady is None:
            self._limits.settle(input_tokens=input_tokens - _estimated(input_tokens), output_tokens=output_tokens)


def _estimated(input_tokens: int) -> int:
    return input_tokens * 4 // 3


def _read(answer_headers: Mapping[str, str]) -> RateHeaders | None:
    # reset times are wall-clock times; `read` checks only that they are near
    return read_rate(answer_headers, now_s=time.time())


class Gate(Protocol):
    """The interface of the replay that a process uses: the clock, and the events that it reports."""

    now_s: float

    def after(self, seconds: float, event: Callable[[], None]) -> None: ...
    def arrives(self, ask: Ask) -> None: ...
    def settle(self, reservation: Reservation, used: Amounts | None) -> None: ...
    def learn(self, feedback: Feedback) -> None: ...
    def calls(self, ask: Ask) -> None: ...
    def answered(self, ask: Ask) -> None: ...


class Caller:
    """A process with its own estimates and breaker. All processes share the gate and the provider."""

    def __init__(self, gate: Gate, provider: Provider, spec: BudgetSpec, rng: random.Random) -> None:
        self._gate, self._provider, self._rng = gate, provider, rng
        self._estimates = Estimates(
            first_output_tokens=spec.first_output_tokens, first_bytes_per_token=spec.first_bytes_per_token
        )
        self._breaker = Breaker(rng)

    def expected(self, ask: Ask) -> Amounts:
        """The amounts that a request is expected to use, computed as by `BudgetGate.amounts`."""
        return Amounts(
            1.0,
            self._estimates.input_tokens(MODEL, ask.body_bytes),
            self._estimates.output_tokens(_usage_class(ask), max_tokens=MAX_TOKENS),
        )

    def call(self, ask: Ask, reservation: Reservation) -> None:
        """Make the call of a request that was granted. While the breaker is open, the request comes back later instead,
        and no attempt is counted."""
        now_s = self._gate.now_s
        if (wait_s := self._breaker.wait_s(now_s)) > 0:
            self._gate.after(0.0, lambda: self._goes_back(ask, reservation, wait_s))
            return
        is_probe = self._breaker.state is not BreakerState.CLOSED
        if is_probe:
            self._breaker.probe(now_s)
        ask.attempts += 1
        if ask.attempts == 1:
            self._gate.calls(ask)
        self._gate.after(self._travel_s(), lambda: self._enters(ask, reservation, now_s, is_probe))

    def _goes_back(self, ask: Ask, reservation: Reservation, wait_s: float) -> None:
        self._gate.settle(reservation, None)
        self._gate.after(wait_s, lambda: self._gate.arrives(ask))

    def _enters(self, ask: Ask, reservation: Reservation, began_s: float, is_probe: bool) -> None:
        answer = self._provider.enter(ask.input_tokens)
        if answer.status == 200:
            self._gate.after(ask.takes_s, lambda: self._ends(ask, reservation, began_s, answer))
        else:
            self._gate.after(self._travel_s(), lambda: self._failed(ask, reservation, began_s, is_probe, answer))

    def _ends(self, ask: Ask, reservation: Reservation, began_s: float, answer: Answer) -> None:
        self._provider.end(input_tokens=ask.input_tokens, output_tokens=ask.output_tokens)
        self._gate.after(self._travel_s(), lambda: self._answered(ask, reservation, began_s, answer))

    def _answered(self, ask: Ask, reservation: Reservation, began_s: float, answer: Answer) -> None:
        now_s = self._gate.now_s
        ask.started_s, ask.answered_s = began_s, now_s
        self._breaker = Breaker(self._rng)
        counted = ask.used._replace(output_tokens=0)  # the headers were sent before the output
        self._gate.learn(Feedback(kind=Kind.ANSWERED, rate=answer.rate, counted=counted, took_s=now_s - began_s))
        self._gate.settle(reservation, ask.used)
        self._estimates.learn(
            _usage_class(ask),
            text_bytes=ask.body_bytes,
            input_tokens=ask.input_tokens,
            output_tokens=ask.output_tokens,
        )
        self._gate.answered(ask)

    def _failed(self, ask: Ask, reservation: Reservation, began_s: float, is_probe: bool, answer: Answer) -> None:
        error: ProviderError
        if answer.status == 429:
            ask.refused += 1
            self._breaker = Breaker(self._rng)  # a 429 shows that the provider works
            error = RateLimitedError("429", retry_after_s=answer.retry_after_s)
        else:
            is_overload = answer.status == 529
            failure = FailedCall(at_s=began_s, request=ask.id, is_unreached=False, is_overload=is_overload)
            self._breaker.failed(failure, probe=is_probe)
            ask.overloaded += is_overload
            error = OverloadedError("529") if is_overload else TransientError("500", status=answer.status)
        self._gate.learn(
            Feedback(
                kind=error.means.says,
                request=ask.id,
                rate=answer.rate,
                retry_after_s=error.retry_after_s,
                took_s=self._gate.now_s - began_s,
            )
        )
        self._gate.settle(reservation, error.spent(reservation.amounts))
        self._gate.after(self._pause_s(error, ask.lane, ask.attempts), lambda: self._gate.arrives(ask))

    def _pause_s(self, error: ProviderError, lane: str, attempts: int) -> float:
        """The pause before the next attempt, as in a worker, except that no request is ever given up."""
        found = decide(
            error,
            attempts=attempts,
            max_attempts=max(ATTEMPTS[lane], attempts + 1),
            left_ms=A_DAY_MS,
            policy=RetryPolicy(),
            rng=self._rng,
        )
        assert isinstance(found, Retried)
        return found.delay_ms / 1000

    def _travel_s(self) -> float:
        return self._rng.uniform(*TRAVEL_S)


def _usage_class(ask: Ask) -> UsageClass:
    return UsageClass(ask.lane, "replay", MODEL)
