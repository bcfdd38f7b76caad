"""A fault for the soak's checker to find: deliveries are acked, and their copies not published."""

from __future__ import annotations

from typing import Any

from django_amqp_events.worker.settlement import Settler

from . import faulty  # noqa: F401 - its handlers


def publish(self: Settler, batch: list[Any]) -> None:
    self._answer(*(job.delivery for job in batch), ack=True)


Settler._publish = publish  # type: ignore[method-assign]
