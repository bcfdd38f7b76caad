"""The shop's stock."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Product(models.Model):
    """A product, and how many of it are available."""

    objects: ClassVar[models.Manager[Product]]
    sku = models.CharField(max_length=20, unique=True)
    name = models.CharField(max_length=100)
    available = models.PositiveIntegerField()

    def __str__(self) -> str:
        return self.sku


class Reservation(models.Model):
    """The pieces reserved for an order."""

    objects: ClassVar[models.Manager[Reservation]]
    order_number = models.CharField(max_length=20, unique=True)
    pieces = models.PositiveIntegerField()

    def __str__(self) -> str:
        return self.order_number


class BackOrder(models.Model):
    """Pieces of an order that are not in stock and must be bought."""

    objects: ClassVar[models.Manager[BackOrder]]
    order_number = models.CharField(max_length=20)
    sku = models.CharField(max_length=20)
    pieces = models.PositiveIntegerField()

    class Meta:
        verbose_name = "back order"

    def __str__(self) -> str:
        return f"{self.order_number}: {self.pieces} of {self.sku}"
