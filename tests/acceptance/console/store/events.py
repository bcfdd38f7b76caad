"""Events."""

from __future__ import annotations

from django_amqp_events import event


@event("store.ordered")
def ordered(order: int) -> None: ...
