"""Chains of upcasters, by which a handler of a newer version of an event receives older ones.

:func:`django_amqp_events.worker.binding.upcast` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Upcaster = Callable[[dict[str, Any]], Mapping[str, Any]]
#: The next version of each older event, and the upcaster to it.
Upcasters = Mapping[str, tuple[str, Upcaster]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcast:
    """How a handler receives an older event.

    Attributes:
        source, target: names of the older event and of the one that the handler's patterns match.
        steps: the upcasters between them, in order.
    """

    source: str
    target: str
    steps: tuple[Upcaster, ...]


def upcasts(upcasters: Upcasters, matches: Callable[[str], bool]) -> tuple[Upcast, ...]:
    """Return an upcast for each older event that a handler receives as another one.

    It leads to the first version that the handler's patterns match. An event that matches them has
    none.
    """
    found = []
    for source in upcasters:
        name, steps = source, dict[str, Upcaster]()
        while name in upcasters and name not in steps and not matches(name):
            target, steps[name] = upcasters[name]
            name = target
        if steps and matches(name):
            found.append(Upcast(source=source, target=name, steps=tuple(steps.values())))
    return tuple(found)
