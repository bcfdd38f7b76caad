"""Events on RabbitMQ."""

from __future__ import annotations

from django_amqp_events import event


@event("shop.ordered")
def ordered(order: int) -> None: ...


@event("shop.booked")
def booked(order: int) -> None: ...
