"""The project of docs/redis.md: tasks on Redis, events on RabbitMQ."""

from __future__ import annotations

from .celery import app as celery_app

__all__ = ["celery_app"]
