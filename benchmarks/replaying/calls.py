"""One worker process of the replay: it estimates what requests use, makes their calls, and handles the results."""

import random
from collections.abc import Callable
from typing import Protocol

from benchmarks.replaying.load import Ask
from benchmarks.replaying.provider import Answer, Provider
from consumers.failures import ProviderError, RateLimitedError, TransientError
from consumers.limits.base import Amounts, Feedback, Kind, Reservation
from consumers.limits.estimates import Estimates, UsageClass
from consumers.limits.spec import BudgetSpec
from consumers.outcomes import Retried
from consumers.providers.breaker import Breaker, Failure, State
from consumers.retry import RetryPolicy, decide

MODEL = "replay"
MAX_TOKENS = 2048
TRAVEL_S = (0.001, 0.010)
"""How long a message takes to the provider or back."""
A_DAY_MS = 86_400_000
TIMEOUT_S = 600.0


class Gate(Protocol):
    """The interface of the replay that a process uses: the clock, and the events that it reports."""

    now_s: float

    def after(self, seconds: float, event: Callable[[], None]) -> None: ...
    def arrives(self, ask: Ask) -> None: ...
    def settle(self, reservation: Reservation, used: Amounts | None) -> None: ...
    def learn(self, feedback: Feedback) -> None: ...
    def calls(self, ask: Ask) -> None: ...
    def leaves(self, ask: Ask) -> None: ...
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
            self._gate.settle(reservation, None)
            self._gate.leaves(ask)
            self._gate.after(wait_s, lambda: self._gate.arrives(ask))
            return
        is_probe = self._breaker.state is not State.CLOSED
        if is_probe:
            self._breaker.probe(now_s)
        ask.attempts += 1
        if ask.attempts == 1:
            self._gate.calls(ask)
        self._gate.after(self._travel_s(), lambda: self._enters(ask, reservation, now_s, is_probe))

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
            body_bytes=ask.body_bytes,
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
            failure = Failure(at_s=began_s, request=str(id(ask)), is_unreached=False)
            self._breaker.failed(failure, probe=is_probe)
            error = TransientError("500", status=answer.status)
        self._gate.learn(
            Feedback(
                kind=error.means.says,
                rate=answer.rate,
                retry_after_s=error.retry_after_s,
                took_s=self._gate.now_s - began_s,
            )
        )
        self._gate.settle(reservation, error.spent(reservation.amounts))
        self._gate.leaves(ask)
        self._gate.after(self._pause_s(error, ask.attempts), lambda: self._gate.arrives(ask))

    def _pause_s(self, error: ProviderError, attempts: int) -> float:
        """The pause before the next attempt, as in a worker, except that no request is ever given up."""
        found = decide(
            error,
            attempts=attempts,
            max_attempts=attempts + 1,
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
