"""What the mirror writes survives an export and an import, and so do the figures."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError, connections, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_amqp_events import conf
from django_amqp_events.archive import export, row_writer, states, tables
from django_amqp_events.archive.groups import failure_groups, group_counts
from django_amqp_events.models import (
    ArchivedEvent,
    FailureGroup,
    GroupCountChange,
    GroupHour,
    Revision,
    State,
)
from tests.archive_rows import again, seen
from tests.integration.archiving import FAILURE, archived, outcome, received, taken

from .test_export import everything, exported, wipe
from .test_mirror import MESSAGE

pytestmark = pytest.mark.usefixtures("archive_database")
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)

#: What may happen to an event of a worker.
LIVES = ("archived", "again", "discarded", "restored", "replaying", "succeeded", "failed", "edited")


@pytest.fixture(autouse=True)
def _billing(settings: Any) -> None:
    settings.AMQP_EVENTS = {
        "SERVICE": "billing", "AUTODISCOVER": [],
        "EVENTS": {"shop.order.created": {"SEARCH": ["order_id"]}},
    }  # fmt: skip


def keep(*messages: Any) -> None:
    row_writer.store([taken(message) for message in messages], conf.get_settings())


def live(name: str, number: int, life: str) -> None:
    """Let the mirror and an operator do with an event what its life says."""
    delivery = received(f"{name}-{number}", payload={"order_id": number})
    failure = FAILURE if number % 2 else None
    keep(archived(delivery, at=NOW, failure=failure))
    row = ArchivedEvent.objects.get(event_id=f"{name}-{number}")
    if life == "again":
        return keep(archived(delivery, at=NOW + timedelta(minutes=5)))
    if life in ("discarded", "restored"):
        states.discard(seen(row), by="ada", reason="", now=NOW)
        if life == "restored":
            states.restore(seen(again(row)), by="ada", reason="", now=NOW)
        return None
    if life == "archived":
        return None
    edit = Revision(body=b'[[],{"order_id":8},{}]') if life == "edited" else None
    [claimed] = states.claim(
        seen(row), handlers={row.pk: row.handler}, by="ada", reason="", now=NOW, edit=edit
    )
    states.published([claimed], now=NOW)
    if life == "succeeded":
        keep(outcome(row, str(claimed.replay.pk)))
    elif life in ("failed", "edited"):
        at = NOW + timedelta(hours=1)
        keep(archived(delivery, replay_id=str(claimed.replay.pk), at=at))
    return None


def figures() -> Any:
    """Return the exact numbers of each group that has any, and check them against its events."""
    using = tables.database()
    assert group_counts.recount(using=using, now=NOW) == 0
    rows = group_counts.with_exact_counts(FailureGroup.objects.all())
    numbers = {row.pk: (row.open_now, row.again_now, row.going_now) for row in rows}
    return {pk: counts for pk, counts in numbers.items() if any(counts)}


def empty() -> None:
    wipe()
    for model in (GroupCountChange, GroupHour, FailureGroup):
        model.objects.all().delete()


@settings(
    max_examples=int(os.environ.get("AMQP_EVENTS_FUZZ", "12")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    messages=st.lists(MESSAGE, max_size=3),
    lives=st.lists(st.sampled_from(LIVES), max_size=4),
    used=st.booleans(),
    groups=st.booleans(),
)
def test_what_the_mirror_writes_round_trips(
    messages: Any, lives: Any, used: bool, groups: bool
) -> None:
    """Into an empty or a used database, with the groups of the events or without them."""
    empty()
    row_writer.store(messages, conf.get_settings())
    for number, life in enumerate(lives):
        live("order", number, life)
    events = ArchivedEvent.objects.count()
    before, counts, lines = everything(), figures(), exported()
    if groups:
        wipe()
        failure_groups.rebuild()
    else:
        empty()
    if used:
        for number in range(2):
            live("other", number, "again")
    others, known = everything(), figures()
    done = export.import_events(lines, dry_run=True)
    assert (done.events, done.known, done.refused) == (events, 0, [])
    assert (everything(), figures()) == (others, known)
    done = export.import_events(lines)
    assert (done.events, done.known, done.refused) == (events, 0, [])
    done = export.import_events(lines, dry_run=True)
    assert (done.events, done.known, done.refused) == (0, events, [])
    failure_groups.fold_all_counts()
    after = figures()
    ArchivedEvent.objects.filter(event_id__startswith="other-").delete()
    failure_groups.rebuild()
    for model, rows in everything().items():
        assert rows == before[model]
    assert figures() == counts
    if not used:
        assert after == counts


@pytest.mark.parametrize("archive_database", ["sqlite"], indirect=True)
def test_an_import_waits_for_another_writer() -> None:
    """SQLite has one, and refuses at once a transaction that has read before it writes."""
    for number in range(3):
        live("order", number, "again")
    before, lines = everything(), exported()
    wipe()
    connections[tables.database()].settings_dict["OPTIONS"]["timeout"] = 0.05
    connections[tables.database()].close()
    begun, end = threading.Event(), threading.Event()

    def write() -> None:
        try:
            while not end.is_set():
                # It is refused, too.
                with suppress(OperationalError), transaction.atomic(using=tables.database()):
                    FailureGroup.objects.filter(pk=uuid4()).update(open=0)
                    begun.set()
                    end.wait(0.2)
                end.wait(0.02)
        finally:
            connections.close_all()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert begun.wait(30)
        done = export.import_events(lines)
    finally:
        end.set()
        writer.join()
    assert (done.events, done.refused) == (3, [])
    assert everything() == before
    assert ArchivedEvent.objects.filter(state=State.ARCHIVED).count() == 3
