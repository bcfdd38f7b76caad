"""The ledger, to which rows are only added."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Published(models.Model):
    """An event of this service that the broker has confirmed."""

    objects: ClassVar[models.Manager[Published]]
    event_id = models.CharField(max_length=255, unique=True)
    name = models.CharField(max_length=255)
    at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.name} {self.event_id}"


class Attempt(models.Model):
    """One run of one handler for one event; `state` is Celery's: SUCCESS, RETRY, FAILURE."""

    objects: ClassVar[models.Manager[Attempt]]
    handler = models.CharField(max_length=255)
    event_id = models.CharField(max_length=255)
    event_name = models.CharField(max_length=255)
    attempt = models.PositiveIntegerField()
    state = models.CharField(max_length=20)
    exception = models.CharField(max_length=200, blank=True)
    due_at = models.DateTimeField(null=True)
    began_at = models.DateTimeField()
    ended_at = models.DateTimeField()

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["handler", "event_id"], name="ledger_attempt_run")
        ]

    def __str__(self) -> str:
        return f"{self.handler} {self.event_id} attempt {self.attempt}: {self.state}"
