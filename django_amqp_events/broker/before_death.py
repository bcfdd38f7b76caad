"""Undo what RabbitMQ does to a message that it dead-letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..declare.registry import Registry
from ..message.types import Received
from .topology import Names


def before_death(
    received: Received, deaths: Iterable[Mapping[str, Any]], names: Names, registry: Registry
) -> Received:
    """Return the message as it was in its handler's queue, as far as its deaths say."""
    known = registry.by_queue()
    ours = [
        death
        for death in deaths
        if death["queue"] in known or str(death["queue"]).startswith(names.handlers)
    ]
    # A handler's queue sets its name as the routing key of a dead letter.
    ours.sort(key=lambda death: death["queue"] != received.routing_key)
    # A message that was in a delay has not died in a handler's queue.
    returned = [death for death in deaths if death["exchange"] == names.return_]
    for death in ours or returned:
        keys = [key for key in death["routing_keys"] if key]
        return replace(
            received,
            queue=str(death["queue"]),
            exchange=str(death["exchange"] or ""),
            routing_key=keys[0] if keys else received.routing_key,
        )
    return received
