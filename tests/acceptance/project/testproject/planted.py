"""A fault for the soak's checker to find: deliveries are acked, and their copies not published."""

from __future__ import annotations

from typing import Any

from django_amqp_events.worker import pool_job

from . import faulty  # noqa: F401 - its handlers


def publish(settings: Any, outcomes: list[pool_job.Outcome], messages: dict[int, Any]) -> None:
    for at in messages:
        outcomes[at] = outcomes[at]._replace(kind="ack")


pool_job._publish = publish
