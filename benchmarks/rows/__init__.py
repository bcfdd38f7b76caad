"""The benchmarks, one module each, in the order of RESULTS.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from ..ground import Ground
from ..measured import Measured, Size

Tell = Callable[[str], object]


class Run(Protocol):
    def __call__(self, ground: Ground, size: Size, tell: Tell) -> list[Measured]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark.

    Attributes:
        title: its heading.
        about: its text.
        run: measures it.
        brief: whether the short form runs it when no names are given.
    """

    name: str
    title: str
    about: str
    run: Run
    brief: bool = True


NAMES = (
    "publish",
    "outbox",
    "handle",
    "mixed",
    "once",
    "retry",
    "memory",
    "footprint",
    "delayed",
    "latency",
    "mirror",
    "replay",
    "declare",
    "startup",
    "growth",
    "history",
)


def benchmarks() -> Mapping[str, Benchmark]:
    """Return all benchmarks by name."""
    found = {}
    for name in NAMES:
        module = import_module(f".{name}", __name__)
        about = (module.__doc__ or "").strip()
        title, _, text = about.partition("\n\n")
        found[name] = Benchmark(
            name=name, title=title.rstrip("."), about=text, run=module.run,
            brief=getattr(module, "BRIEF", True),
        )  # fmt: skip
    return found
