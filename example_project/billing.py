"""Settings of the service `billing`: it invoices orders, books revenue and reports the tax."""

from __future__ import annotations

from .base import *  # noqa: F403
from .base import MANAGEMENT_URL, PREFIX, SHARED_APPS, database

INSTALLED_APPS = [*SHARED_APPS, "example_project.invoices"]
DATABASES = database("billing")
# Cookies ignore ports: two services on 127.0.0.1 need different cookie names.
SESSION_COOKIE_NAME, CSRF_COOKIE_NAME = "billing_session", "billing_csrf"

CELERY_TASK_DEFAULT_QUEUE = f"{PREFIX}tasks-billing"

AMQP_EVENTS = {
    "SERVICE": "billing",
    "PREFIX": PREFIX,
    "MANAGEMENT_URL": MANAGEMENT_URL,
    "METRICS": True,  # events_worker --metrics-port serves them
    "HANDLERS": {
        # Overrides the decorator's options: four attempts, with delays of 1, 2 and 4 seconds.
        "invoices.register_sale": {"MAX_RETRIES": 3, "RETRY_BACKOFF": 1},
    },
}
