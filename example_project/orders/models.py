"""The shop's orders."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Order(models.Model):
    """An accepted order."""

    objects: ClassVar[models.Manager[Order]]
    number = models.CharField(max_length=20, unique=True)
    event_id = models.CharField(max_length=255, unique=True)
    placed_at = models.DateTimeField()
    customer = models.JSONField()
    lines = models.JSONField()
    currency = models.CharField(max_length=3)
    total = models.DecimalField(max_digits=14, decimal_places=2)
    invoice_number = models.CharField(max_length=20, blank=True)

    def __str__(self) -> str:
        return self.number


class Confirmation(models.Model):
    """A confirmation mail that was sent."""

    objects: ClassVar[models.Manager[Confirmation]]
    number = models.CharField(max_length=20, unique=True)
    sent_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.number
