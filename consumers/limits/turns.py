"""The seam below `Accounts`: who decides whose turn it is at one account.

A process that has the account for itself decides by itself (`own_turns.py`). Processes that share an account let a
script in Redis decide (`consumers/state/redis/shared_turns.py`).
"""

from typing import Final, Protocol

from consumers.limits import forecast
from consumers.limits.account import Account
from consumers.limits.amounts import Amounts
from consumers.limits.base import Heard, Kind, Reservation, Wait
from consumers.limits.waiter import Waiter
from lanekeeper.telemetry import logs, signals

LATE_S: Final = 0.0005
"""A timer is set this much later than the moment it waits for. If it fired too early, it would have to fire twice."""
log = logs.logger()


class Turns(Protocol):
    """The turns of one account."""

    account: Account

    @property
    def is_idle(self) -> bool:
        """No request waits, no call runs, and no news has to be sent to Redis: the account may be forgotten."""

    def now_s(self) -> float:
        """The clock of the account."""

    def step(self) -> None:
        """Grant all waiters that may go now, and look again when more has come in. May return before deciding."""

    async def decided(self, waiter: Waiter) -> None:
        """Wait for the decision whether this waiter, which has just joined the line, may go at once."""

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        """Settle a reservation that is not settled yet. `used`: the amounts that were used."""

    def learn(self, heard: Heard) -> None:
        """Learn from one response."""

    async def aclose(self) -> None:
        """End the timers. No request may wait any more."""


def refuse(account: Account, waiter: Waiter, wait: Wait) -> None:
    """Take a waiter out of line, and tell its task that it cannot be granted in time."""
    account.leave(waiter)
    waiter.refuse(wait)


def refuse_hopeless(account: Account, now_s: float) -> None:
    """Refuse the waiters whose turn would come too late."""
    for waiter, wait in list(forecast.hopeless(account, now_s)):
        refuse(account, waiter, wait)


def log_learned(account: Account, heard: Heard, *, before: Amounts) -> None:
    """Log what a response changed. `before`: the limits before it."""
    if heard.kind is Kind.SPEND_LIMIT:
        log.error(signals.ACCOUNT_PAUSED, account=account.name, for_s=account.spec.spend_pause_s)
    if (after := account.per_minute()) != before:
        log.info(
            signals.LIMITS_LEARNED,
            account=account.name,
            kind=str(heard.kind),
            requests=after.requests,
            input_tokens=after.input_tokens,
            output_tokens=after.output_tokens,
        )
