"""The provider's log of calls, in a file that both the provider and the suite map into memory, so that reading it costs
the provider nothing.

A request carries its number in its prompt (`load.py`). Times are CLOCK_MONOTONIC, the same in all processes.
"""

import mmap
from pathlib import Path
from typing import Final

_HEAD: Final = 3
"""How many numbers the file begins with: the calls, the repeated calls, and whether answers are held back."""


class CallLog:
    """The times at which the call of each request began and ended; 0.0: not yet."""

    def __init__(self, path: Path, *, most: int) -> None:
        """Creates the file if it is missing. `most`: an upper bound, which no request's number reaches."""
        self.most = most
        size = 8 * (_HEAD + 2 * most)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        view = memoryview(self._map)
        self._counts = view[: 8 * _HEAD].cast("q")
        self.began = view[8 * _HEAD : 8 * (_HEAD + most)].cast("d")
        self.ended = view[8 * (_HEAD + most) :].cast("d")

    @property
    def calls(self) -> int:
        return self._counts[0]

    @property
    def repeated(self) -> int:
        """Calls for a request that had been called before."""
        return self._counts[1]

    @property
    def held(self) -> bool:
        """While true, the provider holds back its answers, so that a drain begins when all its workers are ready."""
        return bool(self._counts[2])

    @held.setter
    def held(self, on: bool) -> None:
        self._counts[2] = on

    def begin(self, number: int, now_s: float) -> None:
        self._counts[0] += 1
        if self.began[number]:
            self._counts[1] += 1
        else:
            self.began[number] = now_s

    def clear(self) -> None:
        """Set everything to 0 for the next run. There must be no calls meanwhile."""
        self._map[:] = bytes(len(self._map))
