"""The project's Celery app, as in Celery's guide for Django; events need nothing here."""

from __future__ import annotations

from celery import Celery

app = Celery("example_project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
