"""A project without Django's admin, to which docs/console.md adds a console."""

from __future__ import annotations

from .celery import app as celery_app

__all__ = ["celery_app"]
