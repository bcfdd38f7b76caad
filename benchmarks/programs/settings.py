"""Django's settings of the project, and of plain Celery in a Django project."""

from __future__ import annotations

from .given import GIVEN

SECRET_KEY = "of a benchmark"  # noqa: S105 - it keeps nothing secret
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["benchmarks.programs.store", *GIVEN.get("apps", ["django_amqp_events"])]
DATABASES = {
    "default": {
        # As in a project that is tuned for speed.
        "CONN_MAX_AGE": None,
        **GIVEN.get("database", {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}),
    }
}
AMQP_EVENTS = {
    "SERVICE": GIVEN.get("service", "bench"),
    "AUTODISCOVER": [],
    "CELERY_APP": "benchmarks.programs.service_events.app",
    "PUBLISH": GIVEN.get("mode", "immediate"),
    "QUEUE_TYPE": GIVEN.get("queue_type", "quorum"),
    "TOPOLOGY": GIVEN.get("topology", "verify"),
    "MANAGEMENT_URL": GIVEN.get("management", ""),
    **GIVEN.get("events_settings", {}),
}
