"""What is shown: steps, one block that is updated in place at a terminal, tables."""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from typing import TextIO

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


class Screen:
    """Writes to a terminal, or plain lines to anything else."""

    #: Seconds between the plain lines of something that goes on.
    INTERVAL = 2.0

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        if isinstance(self.out, TextIOWrapper):
            self.out.reconfigure(errors="replace")  # a terminal that is not UTF-8
        self.terminal = self.out.isatty() and os.environ.get("TERM") != "dumb"
        self.colours = self.terminal and not os.environ.get("NO_COLOR")
        self.began = time.monotonic()
        self._height = 0
        self._said = 0.0

    @property
    def width(self) -> int:
        return shutil.get_terminal_size((100, 24)).columns if self.terminal else 200

    def paint(self, text: str, *codes: str) -> str:
        return f"\033[{';'.join(codes)}m{text}\033[0m" if self.colours and text else text

    def write(self, text: str = "") -> None:
        self.clear()
        self.out.write(text + "\n")
        self.out.flush()

    def heading(self, text: str) -> None:
        self.write()
        self.write(self.paint(text, BOLD))

    def step(self, name: str, text: str) -> None:
        """One thing that is done."""
        seconds = f"{time.monotonic() - self.began:5.1f} s"
        self.write(f"  {self.paint(seconds, DIM)}  {name:<10} {text}")

    def live(self, block: Sequence[str], plain: str) -> None:
        """Show a block in place of the one before; where that cannot be, a line now and then."""
        if self.terminal:
            self.clear()
            block = block[: shutil.get_terminal_size((100, 24)).lines - 2]
            self.out.write("".join(f"{cut(line, self.width - 1)}\n" for line in block))
            self.out.flush()
            self._height = len(block)
        elif time.monotonic() - self._said >= self.INTERVAL:
            self._said = time.monotonic()
            self.write(f"  {time.monotonic() - self.began:5.1f} s  {plain}")

    def status(self, text: str) -> None:
        """Say at a terminal what is waited for."""
        if self.terminal:
            self.live(["", f"  {self.paint(text, DIM)}"], "")

    def clear(self) -> None:
        """Take the block away."""
        if self._height:
            self.out.write(f"\033[{self._height}F\033[J")
            self._height = 0

    def bar(self, done: int, total: int, length: int = 24) -> str:
        filled = length if not total else min(length, done * length // total)
        return self.paint("█" * filled, GREEN) + self.paint("░" * (length - filled), DIM)

    def table(
        self,
        head: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        total: bool = False,
        wrap: bool = False,
    ) -> list[str]:
        """Lay out rows; numbers go to the right.

        Args:
            total: the last row stands apart.
            wrap: where it is too wide, the last column gets lines of its own.
        """
        cells = [[clean(str(cell)) for cell in row] for row in rows]
        count = len(head)
        numeric = [all(not row[i] or row[i].isdigit() for row in cells) for i in range(count)]
        sizes = [max(columns(row[i]) for row in [list(head), *cells]) for i in range(count)]
        below = wrap and sum(sizes) + 2 * count > self.width
        shown = count - 1 if below else count

        def line(row: Sequence[str]) -> str:
            padded = []
            for i, text in enumerate(row[:shown]):
                space = " " * (sizes[i] - columns(text))
                padded.append(space + text if numeric[i] else text + space)
            return "  " + cut("  ".join(padded).rstrip(), self.width - 3)

        lines = [self.paint(line(head), DIM)]
        for row in cells:
            lines.append(line(row))
            if below and row[-1]:
                lines.append("      " + self.paint(cut(row[-1], self.width - 7), DIM))
        if total:
            rule = "─" * min(sum(sizes) + 2 * count - 2, self.width - 3)
            lines.insert(-1, "  " + self.paint(rule, DIM))
        return lines


def clean(text: str) -> str:
    """Take out what would leave its cell: control characters, directions of writing."""
    return "".join("·" if unicodedata.category(char) in ("Cc", "Cf") else char for char in text)


def columns(text: str) -> int:
    """Return the columns that a text takes at a terminal."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def cut(text: str, width: int) -> str:
    """Cut a line to so many columns; colours take none."""
    taken, escape = 0, False
    kept: list[str] = []
    for char in text:
        if char == "\033":
            escape = True
        if not escape:
            taken += columns(char)
            if taken > width:
                return "".join(kept[:-1]) + "…" + ("\033[0m" if "\033" in text else "")
        elif char == "m":
            escape = False
        kept.append(char)
    return text
