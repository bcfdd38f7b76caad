"""A result backend with its own database."""

from __future__ import annotations

from typing import Any

from django.db.models import Model


class Router:
    """Sends django-celery-results to the database ``results``, and everything else elsewhere."""

    def db_for_read(self, model: type[Model], **_: Any) -> str | None:
        return "results" if model._meta.app_label == "django_celery_results" else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool:
        return (db == "results") == (app_label == "django_celery_results")
