"""Step the clock of processes that testproject's ``clock`` has given one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

#: Seconds by which a clock is stepped at most.
MOST: Final = 300


def step(file: Path, seconds: float) -> None:
    """Set the clock of the processes that read *file*, relative to the real one."""
    new = file.with_suffix(".new")
    new.write_text(f"{seconds:.0f}")
    new.replace(file)
