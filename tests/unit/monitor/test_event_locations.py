"""Where an event is: its rows in every table, its handlers, and the queues that may have it."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from django_amqp_events import conf
from django_amqp_events.archive import history, search_values, tables
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.archive.selection import Selection
from django_amqp_events.context import ReceivedEvent
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.models import (
    ArchivedEvent,
    Replay,
    State,
    clean,
)
from django_amqp_events.monitor import event_locations
from django_amqp_events.monitor.event_locations import LocatedEvent, locate
from tests import archive_rows
from tests.archive_rows import NOW, add_replay, make_inbox, make_outbox
from tests.commands import run_command
from tests.services import BILLING, handling

pytestmark = pytest.mark.django_db(transaction=True)

PAID = "shop.order.paid"
SETTINGS: dict[str, Any] = {
    **BILLING,
    "EVENTS": {PAID: {"SEARCH": ["order_id"]}},
    "HANDLERS": {
        "send_invoice": handling("shop.order.*"),
        "book": handling(PAID, ONCE=True),
        "ship": handling(PAID),
        "refund": handling("shop.refund.*"),
    },
}


@pytest.fixture(autouse=True)
def billing(settings: Any) -> None:
    settings.AMQP_EVENTS = SETTINGS


def find(value: str, **options: Any) -> tuple[LocatedEvent, ...]:
    return locate(value, conf.get_settings(), get_registry(), **options).events


def kinds(found: tuple[LocatedEvent, ...]) -> list[tuple[str, str, str]]:
    return [(row.kind, row.handler, row.state) for each in found for row in each.records]


@pytest.mark.parametrize(
    ("value", "found"),
    [("e1", ["e1"]), ("cart=7", ["cart=7", "e2"]), ("order_id=7", ["e1"]), ("cart=9", [])],
)
def test_past_events_are_found_by_id_and_by_value(
    monkeypatch: pytest.MonkeyPatch, value: str, found: list[str]
) -> None:
    payloads = {"e1": {"order_id": 7}, "cart=7": {"order_id": 8}, "e2": {"cart": 7}}
    past = [
        SimpleNamespace(event=ReceivedEvent(id=event_id, name=PAID, service="shop"), at=NOW)
        for event_id in payloads
    ]
    monkeypatch.setattr(history.Scan, "records", lambda _: iter(past))
    monkeypatch.setattr(history, "shown_payload", lambda record: payloads[record.event.id])
    assert [event.id for event in find(value, since=NOW)] == found


def make(number: int = 1, state: State = State.ARCHIVED, **fields: Any) -> ArchivedEvent:
    row = archive_rows.make(number, state, **{"name": PAID, **fields})
    search_values.store(search_values.in_event(row), using=tables.database())
    return row


def test_rows_of_every_table_are_found_by_every_id() -> None:
    make_outbox(event_id="order-1", name=PAID, due=-3600)
    make_inbox("order-1", name=PAID)
    row = make(1, State.REPLAYING, replays=1)
    other = make(1, State.ARCHIVED, handler="ship")
    replay = add_replay(row, state=Replay.State.PUBLISHED)
    batch = batch_states.freeze(Selection(handlers=["ship"]).queryset(), by="ada")
    expected = {
        ("outbox", "", "overdue"),
        ("archive", "send_invoice", "replaying"),
        ("archive", "ship", "archived"),
        ("replay", "send_invoice", "published"),
        ("batch", "ship", "pending"),
        ("inbox", "book", "handled"),
    }
    for value in ("order-1", str(row.pk), str(other.pk), replay.pk.hex, "7", "order_id=7", "7*"):
        found = find(value)
        assert len(found) == 1, value
        assert set(kinds(found)) == expected, value
        # events_batches takes the id of a batch.
        assert [each.id for each in found[0].records if each.kind == "batch"] == [batch.pk]


def test_a_row_says_what_to_do_next() -> None:
    make_outbox(event_id="order-1", name=PAID, due=-3600)
    row = make(1, replays=1, unconfirmed=True)
    add_replay(row, state=Replay.State.UNCONFIRMED)
    make(1, handler="gone")
    make(1, service="shipping", handler="pack")
    make(1, State.REPLAYING, handler="ship")
    [event] = find("order-1")
    about = {(each.kind, each.handler): each.about for each in event.records}
    assert "Run events_relay or events_worker." in about["outbox", ""]
    assert "Check its effect" in about["archive", "send_invoice"]
    assert "It cannot be replayed: there is no handler 'gone'" in about["archive", "gone"]
    assert "in a process of that service" in about["archive", "pack"]
    assert "The outcome is overdue." in about["archive", "ship"]


def test_handlers_that_may_still_get_the_event() -> None:
    make(1, handler="send_bill")
    make_inbox("order-1", name=PAID)
    [event] = find("order-1")
    assert {each.handler: each.waiting for each in event.destinations} == {
        "send_invoice": False,
        "book": False,
        "ship": True,
    }
    make_inbox("order-1", "ship", name=PAID)
    [event] = find("order-1")
    assert not any(each.waiting for each in event.destinations)


@pytest.mark.parametrize("superseded", [True, False])
def test_an_event_that_a_newer_one_has_superseded(superseded: bool) -> None:
    make_inbox("order-1", superseded=superseded)
    code, out, _ = run_command("events_find", "order-1")
    assert code == 0
    state = "superseded by a newer event" if superseded else "handled"
    assert f"inbox    billing book, {state} 20" in out


def test_a_name_and_an_id_are_one_event() -> None:
    make(1)
    make(1, name="shop.order.created")
    assert {each.name for each in find("order-1")} == {PAID, "shop.order.created"}


def test_only_the_tables_that_may_be_read_are_read() -> None:
    make_outbox(event_id="order-1", name=PAID, due=-3600)
    row = make(1)
    make(1, handler="ship")
    assert kinds(find("order-1", kinds=["outbox"])) == [("outbox", "", "overdue")]
    assert find("7", by_value=False) == ()
    mine = tables.rows().filter(handler="send_invoice")
    assert kinds(find("order-1", kinds=["archive"], events=mine)) == [
        ("archive", "send_invoice", "archived")
    ]
    assert kinds(find(row.pk.hex, events=mine.none())) == []


def test_the_newest_rows_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_locations, "ROWS", 2)
    for number in range(3):
        make(number, at=NOW + timedelta(hours=number))
    found = locate("order_id=7", conf.get_settings(), get_registry())
    assert [each.id for each in found.events] == ["order-2", "order-1"]
    assert found.more


def test_text_that_a_database_refuses_finds_what_was_stored_of_it() -> None:
    make(1, event_id=clean("a\0b\udcff"))
    assert [each.id for each in find("a\0b\udcff")] == ["a\\x00b\\udcff"]
    assert find("order_id=\0") == ()
