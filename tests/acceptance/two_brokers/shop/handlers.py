"""Handlers that start tasks and publish events, also in threads of their own."""

from __future__ import annotations

from threading import Thread

from django_amqp_events import handler

from .events import booked
from .tasks import note, pack, ship


@handler("shop.ordered")
def book(order: int) -> None:
    note("booked", order=order)
    pack.delay(order)
    ship.delay(order)
    thread = Thread(target=pack.delay, args=[order + 1])
    thread.start()
    thread.join()
    booked.publish(order=order)


@handler("shop.booked", once=True)
def report(order: int) -> None:
    note("reported", order=order)
    pack.apply_async([order + 2])
