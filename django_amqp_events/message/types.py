"""Messages to publish, deliveries, and what is read from them, as plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid5

from ..context import ReceivedEvent
from .text import as_text, parse_moment, utc_text

#: Celery's native delayed delivery puts 28 one-bit words before the routing key
#: (kombu.transport.native_delayed_delivery.calculate_routing_key).
_DELAY_PREFIX: Final = re.compile(r"^(?:[01]\.){28}")

_NAMESPACE: Final = UUID("6c0cf4a6-5d5b-5b0e-9d0f-0f3f0c1f5b58")


def handling(
    service: str, handler: str, event: ReceivedEvent, replay_id: str | None = None
) -> tuple[str, str, str, str, str, str]:
    """Return what identifies one handler's handling of an event, the same on every attempt.

    Several handlers share a published id. A publisher may use one id for ``order.created`` and
    ``order.paid``, so the name is part of it. Services with a handler of the same name may store
    their results in one place.

    Args:
        service: the handler's.
        replay_id: of a replay that is told apart.
    """
    return service, handler, event.service, event.id, event.name, replay_id or ""


def task_id(service: str, handler: str, event: ReceivedEvent, replay_id: str | None = None) -> str:
    """Return Celery's task id for :func:`handling`; it keys worker state and results by that."""
    return str(uuid5(_NAMESPACE, "\0".join(handling(service, handler, event, replay_id))))


def derived_id(*parts: str | int) -> UUID:
    """Return a UUID of version 8 (RFC 9562) that equal parts always have.

    MariaDB refuses one without a valid version, and orders those of version 8 as Python does.
    """
    # JSON keeps the boundaries of the parts.
    digest = blake2b(json.dumps(parts).encode(), digest_size=16).digest()
    value = int.from_bytes(digest, "big") & ~(0xF << 76 | 0b111 << 61)
    # The variant is 10. With the next bit set, byte 8 is not 0x80, which MariaDB refuses here: it
    # would take the UUID for one of an older version (MDEV-29959).
    return UUID(int=value | 0x8 << 76 | 0b101 << 61)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message to be published.

    Attributes:
        headers, properties: of AMQP; always persistent.
        event_id, name: of the event, for errors and logs.
    """

    exchange: str
    routing_key: str
    body: bytes
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    event_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error of one attempt, bounded to fit in a header.

    Attributes:
        exception: dotted class name.
        representation: what ``repr()`` returns, for Celery's task events.
        traceback: formatted; ``""`` if there is none.
        frames: innermost last; each ``{"file", "line", "function", "module"}``.
    """

    exception: str
    message: str = ""
    representation: str = ""
    traceback: str = ""
    frames: tuple[Mapping[str, Any], ...] = ()

    @property
    def first_line(self) -> str:
        """Exception and the first line of its text, for lists and logs."""
        return f"{self.exception}: {self.message.splitlines()[0] if self.message else ''}".rstrip(
            ": "
        )


def event_key(routing_key: str) -> str:
    """Return a routing key without the prefix of Celery's native delayed delivery."""
    return _DELAY_PREFIX.sub("", routing_key)


class Delivered(NamedTuple):
    """A delivery as its bytes came, with the broker's delivery info.

    A worker's main process passes it to a pool process without decoding it.

    Attributes:
        queue: the queue that it was consumed from.
        header: the payload of AMQP's content header frame.
    """

    queue: str
    exchange: str
    routing_key: str
    redelivered: bool
    header: bytes
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A delivery from the broker that is not validated.

    Attributes:
        queue: the queue that it was consumed from.
        exchange, routing_key, redelivered: the broker's delivery info.
        unreadable: why its headers and properties cannot be decoded, ``""`` if they can.
    """

    queue: str
    exchange: str
    routing_key: str
    body: bytes
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    redelivered: bool = False
    unreadable: str = ""

    @property
    def event_key(self) -> str:
        """The routing key without the prefix of Celery's native delayed delivery."""
        return event_key(self.routing_key)

    @property
    def deaths(self) -> list[dict[str, Any]]:
        """The broker's death history (``x-death``) as JSON types; not always newest first."""
        return [
            {
                "queue": as_text(death.get("queue")),
                "reason": as_text(death.get("reason")),
                "at": _death_time(death.get("time")),
                "count": death.get("count") if isinstance(death.get("count"), int) else None,
                "exchange": as_text(death.get("exchange")),
                "routing_keys": [as_text(key) for key in _list(death.get("routing-keys"))[:8]],
            }
            for death in _list(self.headers.get("x-death"))[:16]
            if isinstance(death, Mapping)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of one handler with one event."""

    attempt: int = 1
    due_at: datetime | None = None
    replay_id: str | None = None
    handler: str | None = None
    history: tuple[Mapping[str, Any], ...] = ()

    @property
    def first_failed_at(self) -> str | None:
        """Return the time of the first failure, as written in the history."""
        at = self.history[0].get("at") if self.history else None
        return at if isinstance(at, str) and parse_moment(at) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The decoded body of an event."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def _list(value: object) -> list[Any]:
    # Before the first death, x-death is any value that a publisher chose.
    return value if isinstance(value, list) else []


def _death_time(value: object) -> str | None:
    """Return the time of a death as text; py-amqp reads AMQP's seconds as naive UTC."""
    if not isinstance(value, datetime):
        return None
    try:
        return utc_text(value if value.tzinfo else value.replace(tzinfo=UTC))
    except (ValueError, OverflowError):
        return None
