"""What was learned of an account, on its way to other processes and from them."""

from consumers.limits import learned
from consumers.limits.account import Account
from consumers.limits.learned import Learned
from lanekeeper.telemetry import logs, signals

SHOWN: int = 200
"""Characters of an error."""
log = logs.logger()


class Knowledge:
    """Of one account."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._written: tuple[Learned, str] | None = None
        self._unreadable = ""
        """Why what others have learned could not be read, as it was logged last."""

    def text(self) -> str:
        """What this process knows, as Redis keeps it."""
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
