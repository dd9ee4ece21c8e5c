"""The interface `Turns`, which decides which of the requests that wait for one account's budget is granted next.

A process that has the account for itself decides by itself (`own_turns.py`). Processes that share an account let a
script in Redis decide (`consumers/state/redis/shared_turns.py`).
"""

from typing import Final, Protocol

from consumers.limits import forecast
from consumers.limits.account import Account
from consumers.limits.base import Amounts, Feedback, Kind, Reservation, Wait
from consumers.limits.lines import Waiter
from lanekeeper.telemetry import logs, signals

LATE_S: Final = 0.0005
"""The time, in seconds, that is added when the timer for the next waiting request is set. If the timer fired slightly
too early, it would have to be set again."""
log = logs.logger()


class Turns(Protocol):
    """Decides which of the requests that wait for one account gets its budget next, and when."""

    account: Account

    @property
    def is_idle(self) -> bool:
        """True if the account may be removed: no request waits for its budget, no call runs, and nothing has to be sent
        to Redis."""

    def now_s(self) -> float:
        """The current time in seconds, by the clock that the account's recorded times use."""

    def step(self) -> None:
        """Grant all waiting requests that may be granted now, and set a timer for the next one. It may return before it
        is decided which requests are granted; `decided` waits for the decision."""

    async def decided(self, waiter: Waiter) -> None:
        """Wait until it is decided whether this request, which has just begun to wait, gets the account's budget at
        once."""

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        """After a call, settle its reservation, which must not be settled yet. `used`: the amounts that the call used;
        None if it used nothing."""

    def learn(self, feedback: Feedback) -> None:
        """Learn the account's limits from one response of the provider."""

    async def aclose(self) -> None:
        """Stop the timer, and send Redis the changes of the budget that it does not know yet. Call it when no request
        waits for the budget any more."""


def refuse(account: Account, waiter: Waiter, wait: Wait) -> None:
    """Refuse a request that waits for budget: take it out of its line, and let its task get the exception WaitTooLong
    with the forecast `wait`."""
    account.leave(waiter)
    waiter.refuse(wait)


def refuse_hopeless(account: Account, now_s: float) -> None:
    """Refuse the waiting requests that would certainly get their budget too late for their deadline."""
    for waiter, wait in list(forecast.hopeless(account, now_s)):
        refuse(account, waiter, wait)


def log_learned(account: Account, feedback: Feedback, *, before: Amounts) -> None:
    """Log how a provider's response has changed an account's limits, and that the account is paused if the response
    says that its spend limit is reached. `before`: the limits before the response."""
    if feedback.kind is Kind.SPEND_LIMIT:
        log.error(signals.ACCOUNT_PAUSED, account=account.name, for_s=account.spec.spend_pause_s)
    if (after := account.per_minute()) != before:
        log.info(
            signals.LIMITS_LEARNED,
            account=account.name,
            kind=str(feedback.kind),
            requests=after.requests,
            input_tokens=after.input_tokens,
            output_tokens=after.output_tokens,
        )
