"""The terminal: steps, a block updated in place, tables."""

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
    """Output to a terminal, or plain lines to a file or pipe."""

    #: Seconds between two plain lines of progress.
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
        """Print a completed step."""
        seconds = f"{time.monotonic() - self.began:5.1f} s"
        self.write(f"  {self.paint(seconds, DIM)}  {name:<10} {text}")

    def live(self, block: Sequence[str], plain: str) -> None:
        """Replace the last block at a terminal; otherwise print *plain* every few seconds."""
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
        """Say at a terminal what is in progress."""
        if self.terminal:
            self.live(["", f"  {self.paint(text, DIM)}"], "")

    def clear(self) -> None:
        """Remove the block."""
        if self._height:
            self.out.write(f"\033[{self._height}F\033[J")
            self._height = 0

    def table(
        self,
        head: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        total: bool = False,
        wrap: bool = False,
    ) -> list[str]:
        """Lay out rows, numbers to the right.

        Args:
            total: separate the last row.
            wrap: if the table is too wide, the last column gets its own lines.
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


def bar(done: int, total: int, length: int = 24) -> str:
    filled = min(length, done * length // total) if total else 0
    return "█" * filled + "░" * (length - filled)


def clean(text: str) -> str:
    """Replace characters that would leave their cell: controls, writing directions."""
    return "".join("·" if unicodedata.category(char) in ("Cc", "Cf") else char for char in text)


def columns(text: str) -> int:
    """Return the width of a text at a terminal."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def cut(text: str, width: int) -> str:
    """Cut a line to *width* columns; colours take none."""
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
