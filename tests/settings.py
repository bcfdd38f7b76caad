"""Django settings of the test suite."""

from __future__ import annotations

SECRET_KEY = "not a secret: tests only"
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django_amqp_events",
]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
AMQP_EVENTS = {"SERVICE": "testing"}
