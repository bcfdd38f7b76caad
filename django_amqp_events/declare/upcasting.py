"""Chains of upcasters, by which a handler of a newer version of an event receives older ones.

:func:`django_amqp_events.worker.binding.upcast` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Upcaster = Callable[[dict[str, Any]], Mapping[str, Any]]
#: Upcasters by the names of the older event and of the newer one.
Upcasters = Mapping[str, Mapping[str, Upcaster]]


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

    It leads to the nearest version that the handler's patterns match. An event that they match
    itself has none.
    """
    possible = (_upcast(upcasters, matches, source) for source in upcasters if not matches(source))
    return tuple(upcast for upcast in possible if upcast is not None)


def _upcast(upcasters: Upcasters, matches: Callable[[str], bool], source: str) -> Upcast | None:
    paths: dict[str, tuple[Upcaster, ...]] = {source: ()}
    pending = [source]
    for name in pending:  # breadth first, so that the nearest version is found first
        for target, step in upcasters.get(name, {}).items():
            if target in paths:
                continue
            paths[target] = (*paths[name], step)
            if matches(target):
                return Upcast(source=source, target=target, steps=paths[target])
            pending.append(target)
    return None
