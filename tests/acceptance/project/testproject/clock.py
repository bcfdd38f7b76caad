"""The wall clock of this process and its forks, which a test can step; sleeps and timeouts go on.

TESTPROJECT_CLOCK names a file with the offset in whole seconds. The patched names are Python's. A
library below it, such as libfaketime, has locks: a process that was forked while another thread
held one waited for ever.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

import time_machine

FILE: Final = os.environ["TESTPROJECT_CLOCK"]
#: Seconds between two looks into the file.
INTERVAL: Final = 1.0
NANOSECONDS: Final = 1_000_000_000


class Stepped(time_machine.Traveller):
    """The real time, and the offset."""

    _offset = 0
    _next_look = 0.0

    def time_ns(self) -> int:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + INTERVAL
            self._offset = int(Path(FILE).read_text())
        return time_machine.escape_hatch.time.time_ns() + self._offset * NANOSECONDS


def install() -> None:
    """Let the clock follow the file."""
    time_machine.travel(timedelta()).start()
    time_machine.traveller_stack[:] = [Stepped(0, None, tick=True)]
