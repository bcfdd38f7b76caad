"""Settings of one service; `tests.acceptance.harness` fills the environment."""

from __future__ import annotations

import json
import os
from typing import Any

import pymysql

# Django's backend imports mysqlclient, which has no wheels for Linux.
pymysql.install_as_MySQLdb()

if "TESTPROJECT_CLOCK" in os.environ:
    from . import clock

    clock.install()

WHERE = os.environ["TESTPROJECT_DIR"]
EXTRA: dict[str, Any] = json.loads(os.environ.get("TESTPROJECT_EVENTS", "{}"))

SECRET_KEY = "not a secret: tests only"
DEBUG = False
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django_celery_results",
    "django_amqp_events",
    "testproject",
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.path.join(WHERE, "db.sqlite3"),  # noqa: PTH118
        "OPTIONS": {"timeout": 20},
    },
}
if given := os.environ.get("TESTPROJECT_DATABASE"):
    DATABASES = {"default": json.loads(given)}
if given := os.environ.get("TESTPROJECT_RESULTS"):
    DATABASES["results"] = json.loads(given)
    DATABASE_ROUTERS = ["testproject.results.Router"]
if "TESTPROJECT_ADMIN" in os.environ:
    from tests.web_settings import MIDDLEWARE, STATIC_URL, TEMPLATES  # noqa: F401 - settings

    INSTALLED_APPS[:0] = [
        "django.contrib.auth",
        "django.contrib.sessions",
        "django.contrib.messages",
        "django.contrib.admin",
    ]
    ROOT_URLCONF = "testproject.office"
AMQP_EVENTS = {
    "SERVICE": os.environ["TESTPROJECT_SERVICE"],
    # testproject.<name> declares the handlers.
    "AUTODISCOVER": [os.environ["TESTPROJECT_HANDLERS"]],
    "PUBLISH": "immediate",
    "TOPOLOGY": "auto",
    "CONFIRM_TIMEOUT": 5,
    **EXTRA,
}
