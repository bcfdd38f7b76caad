"""A fault for the soak's checker to find: deliveries are acked, and their copies not published."""

from __future__ import annotations

from typing import Any

from django_amqp_events.worker import pool_job

from . import faulty  # noqa: F401 - its handlers


def publish(settings: Any, message: Any, outcome: pool_job.Outcome) -> pool_job.Outcome:
    return outcome._replace(kind="published")


pool_job._publish = publish
