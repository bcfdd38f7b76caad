"""Settings of the service `shop`: it takes orders, reserves stock and confirms by mail."""

from __future__ import annotations

import django

from .base import *  # noqa: F403
from .base import DATA, MANAGEMENT_URL, PREFIX, SHARED_APPS, database

INSTALLED_APPS = [
    *SHARED_APPS,
    "example_project.orders",
    "example_project.stock",
    "example_project.audit",
]
DATABASES = database("shop")
# Cookies ignore ports: two services on 127.0.0.1 need different cookie names.
SESSION_COOKIE_NAME, CSRF_COOKIE_NAME = "shop_session", "shop_csrf"

# Services on one vhost need a queue each for ordinary tasks. Its name must not start with "shop.",
# as the handlers' queues do.
CELERY_TASK_DEFAULT_QUEUE = f"{PREFIX}tasks-shop"

AMQP_EVENTS = {
    "SERVICE": "shop",
    "PREFIX": PREFIX,
    "MANAGEMENT_URL": MANAGEMENT_URL,
    "METRICS": True,  # events_worker --metrics-port serves them
    "HANDLERS": {
        # Declared here, not by a decorator: the app audit does not know events.
        "audit.record": {
            "EVENTS": ["shop.order.#"],
            "HANDLER": "example_project.audit.trail.record",
            "BIND": True,
        },
    },
}

if django.VERSION >= (6, 1):
    SILENCED_SYSTEM_CHECKS = ["mail.E001"]  # the demo reads its mails from files
    MAILERS = {
        "default": {
            "BACKEND": "django.core.mail.backends.filebased.EmailBackend",
            "OPTIONS": {"file_path": DATA / "mail"},
        },
    }
else:
    EMAIL_BACKEND = "django.core.mail.backends.filebased.EmailBackend"
    EMAIL_FILE_PATH = DATA / "mail"
DEFAULT_FROM_EMAIL = "orders@shop.example"
