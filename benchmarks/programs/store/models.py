"""The table that handlers write to."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """A row of business."""

    number = models.BigIntegerField()
    note = models.TextField()

    class Meta:
        app_label = "store"

    def __str__(self) -> str:
        return f"order {self.number}"
