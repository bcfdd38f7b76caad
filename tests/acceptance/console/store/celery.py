"""The Celery app."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "store.settings")

app = Celery("store")
app.config_from_object("django.conf:settings", namespace="CELERY")
