"""What is counted and audited is what was published, or may have been: all ways, all answers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from django_amqp_events import signals
from django_amqp_events.admin import formatting
from django_amqp_events.archive import eligibility, replay, states, tables
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.archive.selection import Selection
from django_amqp_events.exceptions import (
    BrokerUnavailableError,
    ExchangeMissingError,
    MessageTooLargeError,
    PublishError,
    PublishInterruptedError,
    PublishNackedError,
    PublishTimeoutError,
    UnroutableError,
)
from django_amqp_events.models import ArchiveAction, ArchivedEvent, Revision, State
from tests.archive_rows import NOW, again, make, replaying, seen
from tests.doubles.broker import Broker
from tests.doubles.receivers import connected
from tests.services import BILLING

pytestmark = pytest.mark.usefixtures("archive_database", "broker")

#: Errors after which a message is certainly in no queue, and those after which it may be in one.
NOT_PUBLISHED = (
    BrokerUnavailableError,
    ExchangeMissingError,
    UnroutableError,
    MessageTooLargeError,
)
MAYBE = (PublishTimeoutError, PublishInterruptedError, PublishNackedError)
WAYS = ("replay", "force", "edit", "batch")


@pytest.fixture(autouse=True)
def billing(settings: Any) -> None:
    settings.AMQP_EVENTS = {**BILLING, "EDITING": True}


@pytest.fixture
def told() -> Iterator[list[Any]]:
    heard: list[Any] = []

    def hear(sender: object, *, event: Any, **_: Any) -> None:
        heard.append(event.id)

    with connected(hear, signals.event_replayed):
        yield heard


def overdue() -> ArchivedEvent:
    """An event whose first replay has no outcome."""
    return replaying(tables.clock() - timedelta(days=3))


def press(way: str, row: ArchivedEvent, batch: UUID | None) -> None:
    """Replay a row as it is now."""
    row = again(row)
    if way == "edit":
        replay.edit(row.pk, row.version, {"order_id": 8}, by="ada", reason="fixed")
    else:
        version = seen(row) if batch is None else batch_states.next_events(batch, 10)
        replay.replay(version, by="ada", reason="fixed", force=way == "force", batch=batch)


def start(way: str) -> tuple[ArchivedEvent, UUID | None]:
    row = overdue() if way == "force" else make()
    if way != "batch":
        return row, None
    batch = batch_states.freeze(tables.rows(), by="ada")
    batch_states.start(batch.pk, by="ada", reason="fixed")
    return row, batch.pk


@pytest.mark.parametrize("kind", NOT_PUBLISHED)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_published_is_not_counted(
    broker: Broker, told: list[Any], way: str, kind: type[PublishError]
) -> None:
    row, batch = start(way)
    before = again(row)
    broker.answer = lambda message: kind("no")
    tries = 6 if kind.scope in ("broker", "exchange") or way != "batch" else 1
    for _ in range(tries):
        press(way, row, batch)
    now = again(row)
    assert (now.replays, now.state, now.unconfirmed) == (before.replays, before.state, False)
    assert str(now.error) == "no"
    assert eligibility.is_overdue(now) == (way == "force")
    assert not ArchiveAction.objects.exists()
    assert not told
    assert len(broker.messages) == tries
    if tries == 1:
        return
    broker.answer = lambda message: None
    press(way, row, batch)
    now = again(row)
    assert (now.replays, now.state) == (before.replays + 1, State.REPLAYING)
    [action] = ArchiveAction.objects.all()
    assert action.action == ("replay" if way == "batch" else way)
    assert (action.by, action.reason, action.batch_id) == ("ada", "fixed", batch)
    assert action.replay_id == states.replays().get(number=now.replays).pk
    assert told == [row.event_id]


@pytest.mark.parametrize("kind", MAYBE)
@pytest.mark.parametrize("way", WAYS)
def test_what_may_be_published_is_counted_once(
    broker: Broker, way: str, kind: type[PublishError]
) -> None:
    row, batch = start(way)
    broker.answer = lambda message: kind("unknown")
    press(way, row, batch)
    now = again(row)
    assert (now.replays, now.unconfirmed) == (row.replays + 1, True)
    [action] = ArchiveAction.objects.all()
    assert action.action == ("replay" if way == "batch" else way)
    # Its outcome ends it, and is no second replay.
    states.finish({states.replays().get(number=now.replays).pk: NOW}, now=NOW)
    assert (again(row).replays, again(row).state) == (row.replays + 1, State.SUCCEEDED)
    assert ArchiveAction.objects.count() == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["confirm", "success", "failure"])
def test_a_process_that_died_after_its_publish_loses_no_audit(way: str, end: str) -> None:
    row, batch = start(way)
    handlers = {row.pk: "send_invoice"}
    edit = Revision(body=b"[[],{},{}]") if way == "edit" else None
    [taken] = states.claim(
        seen(again(row)),
        handlers=handlers,
        by="ada",
        reason="fixed",
        now=tables.clock(),
        force=way == "force",
        batch=batch,
        edit=edit,
    )
    assert not ArchiveAction.objects.exists()
    ends = {taken.pk: NOW}
    if end == "confirm":
        replay.resume(lease=0)
        states.finish(ends, now=tables.clock())
    elif end == "success":
        states.finish(ends, now=tables.clock())
    else:
        states.failed_again(ends, now=NOW)
    states.published([taken], now=tables.clock())
    [action] = ArchiveAction.objects.all()
    assert (action.action, action.by) == ("replay" if way == "batch" else way, "ada")


def test_a_second_user_is_audited_too(broker: Broker) -> None:
    row = make()
    broker.answer = lambda message: PublishTimeoutError("unknown")
    replay.edit(row.pk, row.version, {"order_id": 8}, by="ada", reason="wrong id")
    broker.answer = lambda message: None
    replay.replay(seen(again(row)), by="bob", reason="again")
    actions = ArchiveAction.objects.order_by("pk").values_list("action", "by", "reason")
    assert list(actions) == [("edit", "ada", "wrong id"), ("replay", "bob", "again")]
    steps = formatting.timeline(row, [], [*states.replays()], ArchiveAction.objects.order_by("pk"))
    told = [(step.who, step.note) for step in steps if step.who]
    assert sorted(told) == [("by ada", "wrong id"), ("by bob", "again")]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("TaxError", 1),
        ("taxerror", 0),
        ("billing.errors.TaxError", 1),
        ("Billing.errors.TaxError", 0),
        ("errors.TaxError", 1),
        ("Error", 0),
        ("%", 0),
    ],
)
def test_a_filter_by_exception_tells_cases_apart(name: str, found: int) -> None:
    make(exception="billing.errors.TaxError")
    assert Selection(exceptions=[name]).queryset().count() == found


def test_a_resolved_event_that_is_restored_is_replayed_by_force_only(broker: Broker) -> None:
    """Its first replay may still wait in a queue."""
    row = overdue()
    replay.decide(seen(row), eligibility.RESOLVE, by="ada", reason="booked by hand")
    [old] = states.replays().filter(event=row)
    replay.decide(seen(again(row)), eligibility.RESTORE, by="bob", reason="it was not")
    now = again(row)
    assert (now.state, now.replays, eligibility.is_overdue(now)) == (State.REPLAYING, 1, True)
    assert not replay.replay(seen(now), by="bob").published
    assert replay.replay(seen(now), by="bob", force=True).published == [row.pk]
    states.finish({old.pk: NOW}, now=NOW)
    assert again(row).state == State.REPLAYING, "of an older replay"
    assert len(broker.messages) == 1


@pytest.mark.parametrize("success", [True, False])
def test_an_outcome_counts_that_comes_while_a_forced_replay_is_refused(
    broker: Broker, success: bool
) -> None:
    row = overdue()
    [old] = states.replays().filter(event=row)

    def answer(_message: object) -> PublishError:
        if success:
            states.finish({old.pk: NOW}, now=tables.clock())
        else:
            states.failed_again({old.pk: NOW}, now=NOW)
        return UnroutableError("no queue", event_id="x", event_name="y")

    broker.answer = answer
    assert not replay.replay(seen(row), by="ada", force=True).published
    now = again(row)
    assert now.state == (State.SUCCEEDED if success else State.ARCHIVED)
    assert (now.replays, bool(now.error)) == (1, not success)
