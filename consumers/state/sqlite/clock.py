"""The two clocks of the SQLite store: the time since boot, which never jumps, for leases; and the calendar time, for
retention."""

import time
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    """The clocks of this machine. All processes of the machine read the same times."""

    def since_boot_ms(self) -> int:
        """The milliseconds since boot. They include the time that the machine sleeps (on Linux), and are not changed
        when the calendar time is set."""
        clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux
        return (time.monotonic_ns() if clock is None else time.clock_gettime_ns(clock)) // 1_000_000

    def since_1970_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot(self) -> str:
        """The id of the boot that `since_boot_ms` counts from; empty if the system does not provide it."""
        try:
            return BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            return ""
