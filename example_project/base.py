"""Settings that both services share; `shop.py` and `billing.py` have the rest.

The environment of the example (the library itself reads none):

AMQP_URL              the broker, amqp://user:password@host:5672/vhost
AMQP_MANAGEMENT_URL   its management API, for exact counts in events_declare and events_status
EXAMPLE_DATABASE      a PostgreSQL database, which libpq's variables (PGHOST, PGUSER, PGPASSWORD)
                      find; SQLite in EXAMPLE_DATA by default
EXAMPLE_DATA          folder of SQLite databases and mails, .run/example by default
EXAMPLE_STATIC        folder of collectstatic, in EXAMPLE_DATA by default
EXAMPLE_PREFIX        prefix of every name on the broker, to share a vhost
EXAMPLE_RELEASE       1, or 2 with the fixes that `releases.py` names
DJANGO_SECRET_KEY     the same for all processes of a service; by default random for each process,
                      so that sessions end with it
DJANGO_ALLOWED_HOSTS  comma-separated; localhost by default, which probes use
DJANGO_HTTPS          1: redirect to HTTPS; "proxy": behind a proxy that ends TLS and always sets
                      X-Forwarded-Proto; 0: plain HTTP. By default 0 with DJANGO_DEBUG, else 1
DJANGO_DEBUG          1 for development: runserver serves static files
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("EXAMPLE_DATA") or ROOT / ".run" / "example")
DATA.mkdir(parents=True, exist_ok=True)

DEBUG = os.environ.get("DJANGO_DEBUG") == "1"
SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY") or secrets.token_urlsafe(64)
EXAMPLE_RELEASE = int(os.environ.get("EXAMPLE_RELEASE") or 1)
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
ALLOWED_HOSTS += filter(None, os.environ.get("DJANGO_ALLOWED_HOSTS", "").split(","))
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
HTTPS = os.environ.get("DJANGO_HTTPS") or ("0" if DEBUG else "1")
CSRF_COOKIE_SECURE = SESSION_COOKIE_SECURE = SECURE_SSL_REDIRECT = HTTPS != "0"
SECURE_HSTS_SECONDS = 365 * 24 * 60 * 60 if HTTPS != "0" else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = HTTPS != "0"
if HTTPS == "proxy":
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")

ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
STATIC_URL = "/static/"
STATIC_ROOT = os.environ.get("EXAMPLE_STATIC") or DATA / "static"
LOGIN_URL = "admin:login"
if not DEBUG:  # after collectstatic
    MIDDLEWARE.insert(1, "whitenoise.middleware.WhiteNoiseMiddleware")
    STORAGES = {
        "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
        "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
    }
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

SHARED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_celery_results",
    "django_amqp_events",
    "example_project.ledger",
]


def database(service: str) -> dict[str, dict[str, Any]]:
    """Return the PostgreSQL database, or a SQLite database for many writing processes."""
    if name := os.environ.get("EXAMPLE_DATABASE"):
        return {
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": name,
                "CONN_MAX_AGE": 60,  # seconds; otherwise a worker connects again for every handler
                "CONN_HEALTH_CHECKS": True,
            }
        }
    return {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": DATA / f"{service}.sqlite3",
            "CONN_MAX_AGE": 60,  # seconds; otherwise a worker connects again for every handler
            "OPTIONS": {
                # Take the write lock when the transaction begins, and wait for it: SQLite refuses
                # a transaction that reads first and writes later at once, without waiting.
                "timeout": 30,
                "transaction_mode": "IMMEDIATE",
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            },
        }
    }


# -- Celery -----------------------------------------------------------------------------------

CELERY_BROKER_URL = os.environ.get("AMQP_URL") or "amqp://example:example@127.0.0.1:5672/"
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_RESULT_BACKEND = "django-db"
CELERY_RESULT_EXTENDED = True
CELERY_TASK_IGNORE_RESULT = True  # ordinary tasks; handlers ignore theirs by default
CELERY_TASK_STORE_ERRORS_EVEN_IF_IGNORED = True
# Required for handlers; see `manage.py check`.
CELERY_BROKER_CHANNEL_ERROR_RETRY = True
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = True

PREFIX = os.environ.get("EXAMPLE_PREFIX", "")
MANAGEMENT_URL = os.environ.get("AMQP_MANAGEMENT_URL", "")
