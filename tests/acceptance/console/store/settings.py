"""Settings of the project; the environment has the addresses."""

from __future__ import annotations

import json
import os

SECRET_KEY = "not a secret: tests only"
USE_TZ = True
ALLOWED_HOSTS = ["testserver", "127.0.0.1"]
STATIC_URL = "/static/"
STATIC_ROOT = "static"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django_amqp_events",
    "store",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "store.middleware.namespaces",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": ["store.middleware.context"]},
    }
]
ROOT_URLCONF = "store.urls"
AUTH_USER_MODEL = "store.User"
AUTHENTICATION_BACKENDS = ["store.models.Token"]
DATABASES = {"default": json.loads(os.environ["STORE_DATABASE"])}
SESSION_COOKIE_NAME = "store"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

CELERY_BROKER_URL = os.environ["RABBITMQ_URL"]
CELERY_BROKER_CHANNEL_ERROR_RETRY = True
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = True

AMQP_EVENTS = {"SERVICE": "store"}
