"""Decisions in the admin on a real broker: what reaches the handler's queue, who is told what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

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
from ..conftest import Service
from ..serving import Browser, serving
from ..wire import close_pools, in_threads

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


# -- over HTTP ------------------------------------------------------------------------------


def test_concurrent_edit_and_replay_are_one_replay(
    empty_database: dict[str, object], billing: Service, tmp_path: Path
) -> None:
    """Of twenty concurrent browsers, half edit and half replay."""
    with serving(empty_database, billing.vhost.url, tmp_path) as (address, pk):
        ada = Browser(address).login("ada")
        archive = "/admin/django_amqp_events/archivedevent/"
        asked = ada.open(f"{archive}decide/replay/?seen={pk.hex}:0&back=event").fields
        editor = ada.open(f"{archive}{pk}/edit/?version=0").fields
        told: dict[int, str] = {}

        def post(number: int) -> None:
            browser = Browser(address, ada.cookies)
            if number % 2:
                payload = json.dumps({"order_id": number})
                form = {**editor, "payload": payload, "step": "publish", "reason": "a number"}
                told[number] = browser.open(f"{archive}{pk}/edit/", form).words
            else:
                form = {**asked, "reason": "fixed"}
                told[number] = browser.open(f"{archive}decide/replay/", form).words

        raised = in_threads(20, post)
        assert not raised, (raised[:3], (tmp_path / "log").read_text()[-3_000:])
        [winner] = [number for number, words in told.items() if "1 event published" in words]
        action = "edited and replayed" if winner % 2 else "replayed"
        for number, words in told.items():
            if number != winner:
                assert "another user or tab changed it first" in words, words
                assert f"last decision: {action} by ada, 20" in words, words
        detail = ada.open(f"{archive}{pk}/change/").words
        assert ("Revision 1" in detail) == bool(winner % 2)
        assert "Revision 2" not in detail
        assert "replay 2" not in detail
    [message] = billing.take_all(QUEUE)
    payload = json.loads(message.body)[1]
    assert payload["order_id"] == (winner if winner % 2 else 7)
