"""Allowances in memory, like those of the SQLite store; a test can make them unavailable."""

from consumers.state.base import StoreUnavailable, Taken


class MemoryAllowances:
    def __init__(self) -> None:
        self.used: dict[str, float] = {}
        self.resets_in_s = 3600.0
        self.is_away = False
        self.fails_at = 0
        """The number of the only call that raises StoreUnavailable; 0: none."""
        self._calls = 0

    async def take(self, name: str, amount: float, *, limit: float, period_s: int) -> Taken:
        self._look()
        used = self.used.get(name, 0.0)
        granted = used + amount <= limit
        if granted:
            used = self.used[name] = used + amount
        return Taken(granted=granted, used=used, resets_in_s=self.resets_in_s)

    async def give_back(self, name: str, amount: float, *, period_s: int) -> None:
        self._look()
        self.used[name] = max(0.0, self.used.get(name, 0.0) - amount)

    def _look(self) -> None:
        self._calls += 1
        if self.is_away or self._calls == self.fails_at:
            raise StoreUnavailable("away")
