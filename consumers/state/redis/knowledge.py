"""Exchanges with other processes what was learned about the limits of an account, as a text that Redis keeps."""

from consumers.limits import learned
from consumers.limits.account import Account
from consumers.limits.learned import Learned
from lanekeeper.telemetry import logs, signals

SHOWN: int = 200
"""How many characters of an error's text are written to the log."""
log = logs.logger()


class Knowledge:
    """Writes what this process has learned about the limits of a provider's account as text, and reads what other
    processes have written."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._written: tuple[Learned, str] | None = None
        self._unreadable = ""
        """The error that was logged last because the text could not be read."""

    def text(self) -> str:
        """What this process has learned about the account's limits, as text for Redis."""
        known = self._account.learned()
        if self._written is None or self._written[0] != known:
            self._written = known, learned.to_json(known)
        return self._written[1]

    def load(self, text: bytes) -> None:
        """Take over what other processes have learned about the account's limits. A text that cannot be read changes
        nothing, and is logged."""
        try:
            self._account.load(learned.read(text))
            self._unreadable = ""
        except learned.UnreadableError as error:
            if str(error) != self._unreadable:
                # a process of another version may write it every few seconds: log it once
                self._unreadable = str(error)
                log.warning(signals.LEARNED_UNREADABLE, account=self._account.name, error=str(error)[:SHOWN])
