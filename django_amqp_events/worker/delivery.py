"""A delivery that a worker has received and not settled yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from .dispatch import Reading


@dataclass(slots=True, kw_only=True, eq=False)
class Delivery(Reading):
    """A delivery with its message, until it is acked or rejected.

    Attributes:
        message: kombu's message; acked and rejected in the main thread only.
        since: monotonic time of receipt; RabbitMQ's consumer timeout runs from there.
    """

    message: Any
    since: float = field(default_factory=monotonic)
    settled: bool = False

    @property
    def lost(self) -> bool:
        """Whether its channel is closed, so that RabbitMQ delivers the event again."""
        channel = self.message.channel
        return channel is None or channel.connection is None
