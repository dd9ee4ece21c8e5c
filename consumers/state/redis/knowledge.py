"""Writes for other processes what was learned about an account, and reads what they have learned."""

from consumers.limits import learned
from consumers.limits.account import Account
from consumers.limits.learned import Learned
from lanekeeper.telemetry import logs, signals

SHOWN: int = 200
"""How many characters of an error are logged."""
log = logs.logger()


class Knowledge:
    """What was learned about one account."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._written: tuple[Learned, str] | None = None
        self._unreadable = ""
        """The last logged error from reading what others have learned."""

    def text(self) -> str:
        """What this process knows, as the text that Redis keeps."""
        known = self._account.learned()
        if self._written is None or self._written[0] != known:
            self._written = known, learned.write(known)
        return self._written[1]

    def load(self, text: bytes) -> None:
        """Take over what others have learned. What cannot be read is ignored: this process keeps what it knows."""
        try:
            self._account.load(learned.read(text))
            self._unreadable = ""
        except learned.UnreadableError as error:
            if str(error) != self._unreadable:  # another version writes every few seconds: logged once
                self._unreadable = str(error)
                log.warning(signals.LEARNED_UNREADABLE, account=self._account.name, error=str(error)[:SHOWN])
