"""A fault for the crash points to find: the relay deletes rows before it publishes their events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django_amqp_events.publish import outbox_rows
from django_amqp_events.publish.relay import Relay

from . import paired  # noqa: F401 - its handlers

publish = Relay._publish


def delete_and_publish(self: Relay, rows: Sequence[Any], **options: Any) -> None:
    if rows:
        outbox_rows.delete_confirmed(self.alias, rows)
    publish(self, rows, **options)


Relay._publish = delete_and_publish  # type: ignore[method-assign]
