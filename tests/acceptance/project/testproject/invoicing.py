"""A task that retries itself with a countdown, and the handler that it becomes.

``TESTPROJECT_RELEASE`` says which release this is: one with the ``task``, with ``both``, or with
the ``handler``.
"""

from __future__ import annotations

import os
from typing import Any

from celery import shared_task

from django_amqp_events import event, handler

from . import ledger

RELEASE = os.environ["TESTPROJECT_RELEASE"]


def issue(order: str, failures: int, attempt: int, by: str) -> bool:
    """Return False if this attempt fails."""
    ledger.write("start", order=order, by=by)
    if attempt <= failures:
        return False
    ledger.write("end", order=order, by=by)
    return True


@event("invoicing.created")
def created(order: str, failures: int, countdown: int) -> None: ...


if RELEASE in ("task", "both"):

    @shared_task(bind=True, acks_late=True, max_retries=5)
    def invoice(self: Any, order: str, failures: int, countdown: int) -> None:
        if not issue(order, failures, self.request.retries + 1, "task"):
            raise self.retry(countdown=countdown)


if RELEASE in ("both", "handler"):

    @handler("invoicing.created", bind=True, default_retry_delay=1, retry_backoff=0)
    def send_invoice(self: Any, order: str, failures: int, countdown: int) -> None:
        if not issue(order, failures, self.event.attempt, "handler"):
            raise ValueError("not yet")
