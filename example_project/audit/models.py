"""The audit trail."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Entry(models.Model):
    """An event of an order."""

    objects: ClassVar[models.Manager[Entry]]
    event_id = models.CharField(max_length=255, unique=True)
    event_name = models.CharField(max_length=255)
    published_at = models.DateTimeField(null=True)
    subject = models.CharField(max_length=50)

    class Meta:
        verbose_name_plural = "entries"

    def __str__(self) -> str:
        return f"{self.event_name} {self.subject}"
