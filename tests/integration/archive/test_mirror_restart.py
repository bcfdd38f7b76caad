"""Killed and concurrent mirrors: every message becomes one row and the queue is empty."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_amqp_events.archive import states as event_states
from django_amqp_events.message.types import Message
from django_amqp_events.models import (
    ArchivedEvent,
    ArchivedFailure,
    Replay,
    State,
)
from tests.conftest import EACH

from ..archiving import (
    FAILURE,
    archived,
    outcome,
    publish,
    received,
    store,
    taken,
)
from ..processes import mirrors

pytestmark = pytest.mark.usefixtures("archive_database")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def processes(billing: Any, archive_database: Any, tmp_path: Any) -> Any:
    with mirrors(billing.vhost, archive_database, tmp_path) as starter:
        yield starter


@EACH
def test_concurrent_mirrors_store_each_message_once(billing, processes, archive_database):
    """The messages of one event may reach different mirrors, some twice."""
    number = 2 if archive_database.kind == "sqlite" else 4
    replayed = [received(f"replayed-{n}") for n in range(150)]
    store([taken(archived(each)) for each in replayed])
    rows = {row.event_id: row for row in ArchivedEvent.objects.all()}
    claimed = event_states.claim(
        {row.pk: row.version for row in rows.values()},
        handlers={row.pk: row.handler for row in rows.values()},
        by="ada",
        reason="",
        now=NOW,
    )
    event_states.published(claimed, now=NOW)
    replays = {each.event.event_id: str(each.pk) for each in claimed}
    messages: list[Message]
    expected: Counter[State]
    messages, expected = [], Counter[State]()
    for n, each in enumerate(replayed):
        event_id = f"replayed-{n}"
        ends = ("failed", "succeeded", "both")[n % 3]
        if ends != "succeeded":
            messages += [archived(each, attempt=2, replay_id=replays[event_id])] * 2
        if ends != "failed":
            messages += [outcome(rows[event_id], replays[event_id])] * 2
        expected[State.ARCHIVED if ends == "failed" else State.SUCCEEDED] += 1
    fresh = [received(f"fresh-{n}") for n in range(300)]
    for each in fresh:
        for attempt in (3, 4):
            at = NOW + timedelta(minutes=attempt)
            messages += [archived(each, attempt=attempt, at=at)] * 2
        expected[State.ARCHIVED] += 1
    random.Random(number).shuffle(messages)
    server = archive_database.server
    deadlocks = server.log.count("deadlock detected") if server else 0
    publish(billing, *messages)
    running = [processes.start("--until-empty", "--batch-size", "40") for _ in range(number)]
    assert [each.wait() for each in running] == [0] * number
    processes.empty()
    said = "".join(each.said for each in processes.started)
    assert "paused" not in said, said
    assert "cannot be stored" not in said
    assert (server.log.count("deadlock detected") if server else 0) == deadlocks
    states = Counter(ArchivedEvent.objects.values_list("state", flat=True))
    assert states == expected
    assert ArchivedFailure.objects.count() == 150 + 100 + 2 * 300
    assert ArchivedFailure.objects.filter(replay__isnull=False).count() == 100
    # Success, whether it was reported before the failure or after it, is final.
    assert Counter(Replay.objects.values_list("state", flat=True)) == {
        "failed": 50,
        "succeeded": 100,
    }
    again = ArchivedEvent.objects.filter(state=State.ARCHIVED, event_id__startswith="replayed")
    assert set(again.values_list("attempts", flat=True)) == {3 + 2}
    assert set(again.values_list("unconfirmed", "error")) == {(False, None)}
    once = ArchivedEvent.objects.filter(event_id__startswith="fresh")
    assert set(once.values_list("attempts", "last_failed_at")) == {(4, NOW + timedelta(minutes=4))}
    assert set(once.values_list("exception", flat=True)) == {FAILURE.exception}
    assert billing.ready("billing:archive") == 0
