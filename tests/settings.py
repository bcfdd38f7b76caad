"""Django settings of the test suite."""

from __future__ import annotations

import json
import os

SECRET_KEY = "not a secret: tests only"
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.admin",
    "django_celery_results",
    "django_amqp_events",
]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
if given := os.environ.get("AMQP_EVENTS_TEST_DATABASE"):  # scripts/database_server.py
    DATABASES = {"default": json.loads(given)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
# Neither UTC nor without daylight saving.
TIME_ZONE = "America/New_York"
AMQP_EVENTS = {"SERVICE": "testing"}
# Django 6.1 asks for it; pytest-django keeps what is sent.
MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
