"""What a transaction means for an event: the same on RabbitMQ and on each double of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from django.db import transaction

from django_amqp_events import Options, OutboxError, UnroutableError, publish_event
from django_amqp_events.models import OutboxEvent
from django_amqp_events.signals import event_published
from django_amqp_events.testing import capture_events, memory_events, override_events
from tests.conftest import Vhost
from tests.integration.wire import Wire, until

NAME = "shop.order.created"
ALIAS = "archive"
DOORS = ["rabbitmq", "memory_events", "memory", "inline", "capture_events"]

pytestmark = pytest.mark.parametrize("archive_database", ["sqlite"], indirect=True)


class Undone(Exception):
    """Rolls a transaction back."""


class Door:
    """A broker, and the ids of the events that it has confirmed."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.confirmed: list[str] = []

    def receive(self, event_id: str, **_: Any) -> None:
        self.confirmed.append(event_id)

    def reaches(self, *ids: str) -> None:
        until(lambda: len(self.confirmed) >= len(ids), "the confirms")
        assert self.confirmed == [*ids]


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest, archive_database: object, vhost: Vhost) -> Iterator[Door]:
    with ExitStack() as stack:
        wire = stack.enter_context(Wire.on(vhost.url, DATABASE=ALIAS, PUBLISH="outbox"))
        door = Door(wire)
        if request.param == "memory_events":
            stack.enter_context(memory_events())
        elif request.param == "capture_events":
            stack.enter_context(capture_events())
        elif request.param != "rabbitmq":
            stack.enter_context(override_events(BACKEND=request.param))
        stack.enter_context(override_events(UNROUTED="ignore"))
        event_published.connect(door.receive)
        stack.callback(event_published.disconnect, door.receive)
        yield door
        expected = door.confirmed if request.param == "rabbitmq" else []
        assert wire.ids(about=len(expected)) == expected


@pytest.mark.parametrize("mode", ["outbox", "on_commit"])
def test_a_commit_publishes_and_a_rollback_does_not(door: Door, mode: Any) -> None:
    options = Options(mode=mode)
    with transaction.atomic(using=ALIAS):
        first = publish_event(NAME, {}, options=options)
        with suppress(Undone), transaction.atomic(using=ALIAS):
            publish_event(NAME, {}, options=options)
            raise Undone
        door.reaches()
    door.reaches(first)
    with suppress(Undone), transaction.atomic(using=ALIAS):
        publish_event(NAME, {}, options=options)
        raise Undone
    second = publish_event(NAME, {}, options=options)
    door.reaches(first, second)
    until(lambda: not OutboxEvent.objects.using(ALIAS).exists(), "no row is left")


def test_a_transaction_on_another_database(door: Door) -> None:
    with transaction.atomic(using="default"):
        with pytest.raises(OutboxError, match="open on database 'default'"):
            publish_event(NAME, {})
        now = publish_event(NAME, {}, options=Options(mode="immediate"))
    door.reaches(now)


@pytest.mark.parametrize("door", DOORS[:3], indirect=True)
def test_an_unroutable_event(door: Door) -> None:
    door.wire.unbind()
    with override_events(UNROUTED="raise"):
        for mode in ("immediate", "on_commit"):
            with pytest.raises(UnroutableError):
                publish_event("nobody", {}, options=Options(mode=mode))
        publish_event("nobody", {})
        kept = OutboxEvent.objects.using(ALIAS)
        until(lambda: kept.filter(attempts=1).count() == 1, "its row has the error")
    door.reaches()
