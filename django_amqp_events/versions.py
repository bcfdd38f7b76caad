"""The supported versions of the libraries below this package; ``pyproject.toml`` has them too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Final

from .exceptions import ConfigurationError


@dataclass(frozen=True, slots=True)
class Range:
    """Supported versions of a library, from the first up to, not including, another one.

    Attributes:
        why: what the others lack, or may change.
    """

    first: str
    end: str
    why: str

    @property
    def specifier(self) -> str:
        """The range as pip reads it."""
        return f">={self.first}" + (f",<{self.end}" if self.end else "")

    def __contains__(self, installed: str) -> bool:
        end = not self.end or _numbers(installed) < _numbers(self.end)
        return end and _numbers(installed) >= _numbers(self.first)


_INTERNALS: Final = "a worker settles events through its internals, which other versions change"

SUPPORTED: Final[dict[str, Range]] = {
    "amqp": Range("5.4", "6", "older ones read some types of headers as others"),
    "billiard": Range("4.2.1", "5", _INTERNALS),
    "celery": Range("5.5.3", "6", _INTERNALS),
    "django": Range("5.2", "", "older ones have no security updates"),
    "kombu": Range("5.5.4", "6", _INTERNALS),
}


def unsupported(*libraries: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with each installed version that is not supported, and the remedy.

    Args:
        libraries: names in :data:`SUPPORTED`; by default all.
    """
    for library in libraries or SUPPORTED:
        supported, installed = SUPPORTED[library], version(library)
        if installed not in supported:
            yield (
                f"{library} {installed} is not supported: {supported.why}",
                f'run `pip install "{library}{supported.specifier}"`',
            )


@cache
def check() -> None:
    """Check the installed versions.

    Raises:
        ConfigurationError: one is not supported.
    """
    for problem, remedy in unsupported():
        raise ConfigurationError(f"{problem}; {remedy}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
