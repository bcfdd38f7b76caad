"""A fault for the soak's checker to find: deliveries are acked, and their copies not published."""

from __future__ import annotations

from collections.abc import Sequence

from django_amqp_events.worker import pool_job

from . import faulty  # noqa: F401 - its handlers


def publish(
    engine: pool_job.Engine, options: pool_job.JobOptions, decided: Sequence[pool_job.Decided]
) -> None:
    for one in decided:
        one.outcome = one.outcome._replace(kind="published")


pool_job._publish = publish
