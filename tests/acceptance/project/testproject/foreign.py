"""A service whose events come from programs in other languages."""

from __future__ import annotations

from typing import Any

from django_amqp_events import current_event, handler

from . import ledger


@handler("shop.order.created", max_retries=1, retry_backoff=1)
def register(**payload: Any) -> None:
    """Fail at first, so that what comes back is a copy of ours."""
    event = current_event()
    assert event is not None
    if event.attempt == 1:
        raise LookupError("not yet")
    ledger.write(
        "registered", payload=payload, source=event.source, subject=event.subject,
        content_type=event.content_type,
    )  # fmt: skip
