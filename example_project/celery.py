"""The project's Celery app, as Celery's guide for Django says; nothing of it is about events."""

from __future__ import annotations

from celery import Celery

app = Celery("example_project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
