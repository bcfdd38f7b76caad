"""Decisions in the admin on a real broker: what reaches the handler's queue, who is told what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import Client, override_settings

from django_amqp_events.models import ArchivedEvent, State
from machine import free_ports
from tests.unit.admin import admin_world as world

from ..archiving import (
    archived,
    mirror_all,
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
