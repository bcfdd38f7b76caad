"""Decisions in the admin on a real broker: what reaches the handler's queue, who is told what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client, override_settings

from django_amqp_events.models import ArchiveAction, ArchivedEvent, State
from machine import free_ports
from tests.unit.admin import admin_world as world
from tests.unit.admin.admin_world import Page

from ..archiving import (
    archived,
    mirror_all,
    outcome,
    publish,
    received,
)
from ..wire import close_pools

#: The message for the user who is late.
FASTER = "1 event skipped: another user or tab changed it first; its state is now {}"
QUEUE = "billing.send_invoice"


@pytest.fixture
def ada(transactional_db: None) -> Iterator[Client]:
    with override_settings(**world.SETTINGS):
        yield world.client_of(world.user(*world.PERMISSIONS))


def said(response) -> list[str]:
    return [str(each) for each in response.context["messages"]]


def test_replay_reaches_its_handler_and_reports_its_outcome(billing, ada):
    delivery = received("order-1", headers={"traceparent": "00-1"})
    publish(billing, archived(delivery), archived(received("order-2")))
    mirror_all(billing)
    rows = list(ArchivedEvent.objects.order_by("event_id"))
    asked = ada.post(world.url("changelist"), world.select(rows, "replay"))
    page = Page(asked.content.decode())
    assert QUEUE in page.words
    assert billing.ready(QUEUE) == 0
    done = ada.post(world.url("replay"), {**page.fields, "reason": "fixed"}, follow=True)
    assert said(done) == ["2 events published to their handlers."]
    messages = {each.headers["event-id"]: each for each in billing.take_all(QUEUE)}
    assert set(messages) == {"order-1", "order-2"}
    body = messages["order-1"].body
    assert (body if isinstance(body, bytes) else body.encode()) == delivery.body
    made = rows[0].replay_set.get()
    assert (made.requested_by, made.reason) == ("ada", "fixed")
    assert ArchiveAction.objects.count() == 2
    assert not LogEntry.objects.exists()
    assert messages["order-1"].headers["event-replay-id"] == str(made.pk)
    publish(billing, outcome(rows[0], str(made.pk)))
    mirror_all(billing)
    words = Page(ada.get(world.url("change", rows[0].pk)).content.decode()).words
    assert "replay 1: succeeded" in words
    assert "Nothing is left to do" in words
    # A stale page is refused with a message.
    again = ada.post(world.url("replay"), {**page.fields, "reason": "again"}, follow=True)
    first, second = sorted(said(again))
    assert first.startswith(f"{FASTER.format('replaying')} (last decision: replayed by ada, 20")
    assert second.startswith(FASTER.format("succeeded"))
    assert billing.ready(QUEUE) == 0


def test_unreachable_broker_is_reported_and_the_event_stays(billing, ada):
    publish(billing, archived(received("order-1")))
    mirror_all(billing)
    row = ArchivedEvent.objects.get()
    close_pools()
    before = billing.app.conf.broker_url
    billing.app.conf.broker_url = f"amqp://127.0.0.1:{free_ports(1)[0]}//"
    try:
        assert ada.get(world.url("replay"), {"seen": world.frozen(row)}).status_code == 200
        done = ada.post(world.url("replay"), {"seen": world.frozen(row)}, follow=True)
    finally:
        billing.app.conf.broker_url = before
        close_pools()
    assert done.status_code == 200
    assert any("not published" in each for each in said(done)), said(done)
    row.refresh_from_db()
    assert row.state == State.ARCHIVED
    # The broker is back, and so is he.
    done = ada.post(world.url("replay"), {"seen": world.frozen(row)}, follow=True)
    assert said(done)[0].startswith("1 event published")
    assert billing.ready(QUEUE) == 1
