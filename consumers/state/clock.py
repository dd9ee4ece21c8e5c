"""The two times of an embedded store: one for leases, which never jumps, and the calendar's, for how long to keep."""

import time
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    """This machine's. Every process on it reads the same."""

    def since_boot_ms(self) -> int:
        """Goes on in sleep, whatever is done to the calendar; begins anew with each boot."""
        clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux
        return (time.monotonic_ns() if clock is None else time.clock_gettime_ns(clock)) // 1_000_000

    def since_1970_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot(self) -> str:
        """Which boot `since_boot_ms` counts from; empty where the system does not say."""
        try:
            return BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            return ""
