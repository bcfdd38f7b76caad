"""Handle an event once, and tell whether that was skipped."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery.exceptions import Ignore

from django_amqp_events.worker import inbox


def once(*args: Any) -> str | None:
    """Return what the run returns, ``None`` for an event that is skipped."""
    result: str | None = None
    with suppress(Ignore):
        result = inbox.once(*args)
    return result
