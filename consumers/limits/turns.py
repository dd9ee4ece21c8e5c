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
"""A timer fires this much after the moment it waits for. If it fired too early, it would have to fire twice."""
log = logs.logger()


class Turns(Protocol):
    """Of one account."""

    account: Account

    @property
    def is_idle(self) -> bool:
        """Nobody waits, no call runs, and nothing is left to be told: the account may be forgotten."""
        ...

    def now_s(self) -> float:
        """The clock of the account."""
        ...

    def step(self) -> None:
        """Grant whoever may go now, and look again when time brings more. May return before it is decided."""
        ...

    async def decided(self, waiter: Waiter) -> None:
        """Wait until it is decided whether this waiter, who has just joined, may go at once."""
        ...

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        """Take a reservation back that is not settled yet, and what of it was used."""
        ...

    def learn(self, heard: Heard) -> None:
        """From one response."""
        ...

    async def aclose(self) -> None:
        """End the timers. Nobody may wait any more."""
        ...


def refuse(account: Account, waiter: Waiter, wait: Wait) -> None:
    """Send a waiter away."""
    account.leave(waiter)
    waiter.refuse(wait)


def refuse_hopeless(account: Account, now_s: float) -> None:
    """Send those away whose time ends before their turn."""
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
