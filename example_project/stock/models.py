"""The shop's shelves."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Product(models.Model):
    """An article, and how many of it can still be promised."""

    objects: ClassVar[models.Manager[Product]]
    sku = models.CharField(max_length=20, unique=True)
    name = models.CharField(max_length=100)
    available = models.PositiveIntegerField()

    def __str__(self) -> str:
        return self.sku


class Reservation(models.Model):
    """What an order has been promised."""

    objects: ClassVar[models.Manager[Reservation]]
    order_number = models.CharField(max_length=20, unique=True)
    pieces = models.PositiveIntegerField()

    def __str__(self) -> str:
        return self.order_number


class BackOrder(models.Model):
    """What an order has been promised and the shelves do not have; the buyers see to it."""

    objects: ClassVar[models.Manager[BackOrder]]
    order_number = models.CharField(max_length=20)
    sku = models.CharField(max_length=20)
    pieces = models.PositiveIntegerField()

    class Meta:
        verbose_name = "back order"

    def __str__(self) -> str:
        return f"{self.order_number}: {self.pieces} of {self.sku}"
