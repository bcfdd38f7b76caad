"""``once`` as far as it needs no second process: options, keys, the backends in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import IntegrityError
from django.db.models import signals

from django_amqp_events import (
    current_event,
    handler,
    publish_event,
)
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.memory import MemoryBackend
from django_amqp_events.models import InboxEntry
from django_amqp_events.testing import memory_events, override_events
from django_amqp_events.worker import inbox
from tests.doubles.receivers import connected
from tests.event_messages import published

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    with override_events(handlers=[], events=[], PUBLISH="immediate"):
        yield


def make(**options: Any) -> None:
    @handler("a.b", name="t.group", once=True, retry_backoff=1, **options)
    def group(fails: int = 0) -> None:
        event = current_event()
        assert event is not None
        Group.objects.create(name=f"{event.id}-{Group.objects.count()}")
        if event.attempt <= fails:
            raise ValueError("not yet")


def test_the_alias_is_that_of_using_else_that_of_the_settings() -> None:
    make()
    with override_events(DATABASE="orders"):
        assert inbox.database(get_registry().handlers["t.group"]) == "orders"
        assert inbox.aliases() == ["orders"]
    found = replace(get_registry().handlers["t.group"], using="books")
    assert inbox.database(found) == "books"


@pytest.mark.django_db
def test_the_row_sends_no_signals() -> None:
    """A receiver of the project for all models would be part of each run."""
    make()
    called: list[type[Any]] = []

    def receiver(sender: type[Any], **_: Any) -> None:
        called.append(sender)

    with connected(receiver, signals.pre_save, signals.post_save), memory_events(NOW) as broker:
        publish_event("a.b", {})
        broker.run()
    assert InboxEntry.objects.count() == 1
    assert set(called) == {Group}


@pytest.mark.django_db
def test_on_the_broker_in_memory() -> None:
    make()
    with memory_events(NOW) as broker:
        event_id = publish_event("a.b", {"fails": 2})
        broker.run()
        broker.advance(10)
        assert Group.objects.count() == 1, "the failed attempts are rolled back"
        again(broker, event_id)
        assert Group.objects.count() == 1
        assert not broker.archived
    entry = InboxEntry.objects.get()
    assert (entry.handler, entry.event_id, entry.name) == ("t.group", event_id, "a.b")


@pytest.mark.django_db
@pytest.mark.parametrize(("swallows", "archived"), [(1, 0), (9, 1)])
def test_a_swallowed_error_is_a_failure_like_any_other(swallows: int, archived: int) -> None:
    """It is retried, and archived when that helps nothing."""
    Group.objects.create(name="taken")

    @handler("a.b", name="t.careless", once=True, max_retries=2)
    def careless() -> None:
        event = current_event()
        assert event is not None
        with suppress(IntegrityError):
            Group.objects.create(name="new" if event.attempt > swallows else "taken")

    with memory_events(NOW) as broker:
        publish_event("a.b", {})
        broker.run()
        broker.advance(60)
        assert len(broker.archived) == archived
        assert "atomic(using='default')" in str(broker.archived) or not archived
    assert Group.objects.filter(name="new").count() == 1 - archived
    assert InboxEntry.objects.count() == 1 - archived


def again(broker: MemoryBackend, event_id: str) -> None:
    """Deliver an event a second time."""
    message = published("a.b", event_id=event_id, service="testing", at=NOW)
    broker.publish([message], mandatory=True)
    broker.run()


@pytest.mark.django_db
def test_on_the_inline_backend() -> None:
    make()
    with override_events(BACKEND="inline"):
        publish_event("a.b", {})
    assert InboxEntry.objects.count() == Group.objects.count() == 1
