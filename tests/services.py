"""Settings of a service whose handlers take anything."""

from __future__ import annotations

from typing import Any


def handling(*events: str, **options: Any) -> dict[str, Any]:
    """Return the entry of HANDLERS for a handler that no worker runs."""
    return {"EVENTS": [*events], "HANDLER": "tests.integration.handlers.handle", **options}


BILLING: dict[str, Any] = {
    "SERVICE": "billing",
    "AUTODISCOVER": [],
    "CELERY_APP": "tests.celery_app.app",
    "HANDLERS": {"send_invoice": handling("shop.order.*"), "book": handling("shop.order.*")},
    "RENAMED_HANDLERS": {"send_bill": "send_invoice"},
}
