"""Billing's tables."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Invoice(models.Model):
    """An invoice; `document` is rendered by an ordinary Celery task afterwards."""

    objects: ClassVar[models.Manager[Invoice]]
    number = models.CharField(max_length=20, unique=True)
    order_number = models.CharField(max_length=20, unique=True)
    customer = models.JSONField()
    currency = models.CharField(max_length=3)
    net = models.DecimalField(max_digits=14, decimal_places=2)
    tax = models.DecimalField(max_digits=14, decimal_places=2)
    total = models.DecimalField(max_digits=14, decimal_places=2)
    document = models.TextField(blank=True)

    def __str__(self) -> str:
        return self.number


class Revenue(models.Model):
    """Revenue booked for one order."""

    objects: ClassVar[models.Manager[Revenue]]
    order_number = models.CharField(max_length=20, unique=True)
    day = models.DateField()
    currency = models.CharField(max_length=3)
    amount = models.DecimalField(max_digits=14, decimal_places=2)

    def __str__(self) -> str:
        return f"{self.day} {self.amount} {self.currency}"


class SaleReport(models.Model):
    """The tax office's receipt for a sale."""

    objects: ClassVar[models.Manager[SaleReport]]
    order_number = models.CharField(max_length=20, unique=True)
    receipt = models.CharField(max_length=40)

    def __str__(self) -> str:
        return self.receipt
