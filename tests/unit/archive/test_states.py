"""The state machine of an archived event: what is allowed, what is refused, what never happens."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_amqp_events.archive import states, tables
from django_amqp_events.archive.states import UnpublishedReplay
from django_amqp_events.exceptions import ConfigurationError
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    Replay,
    State,
)
from django_amqp_events.reasons import Reason
from tests import archive_rows
from tests.archive_rows import NOW, again, seen
from tests.conftest import ONE, POSTGRESQL

HANDLER = "send_invoice"

pytestmark = pytest.mark.usefixtures("archive_database")


#: At version 3, so that a stale version can be detected.
make = partial(archive_rows.make, version=3)


def claim(*events: ArchivedEvent, force: bool = False, **more: Any) -> list[Replay]:
    return states.claim(
        more.pop("seen", seen(*events)),
        handlers={event.pk: more.get("handler", HANDLER) for event in events},
        by=more.get("by", "ada"),
        reason=more.get("reason", "fixed\0"),
        now=more.get("now", NOW),
        force=force,
    )


def reclaim(**more: Any) -> list[Replay]:
    options: dict[str, Any] = {
        "service": "billing",
        "handlers": {},
        "since_before": NOW + timedelta(minutes=1),
        "limit": 100,
        "size": 10**6,
        "now": NOW + timedelta(minutes=2),
    }
    return states.reclaim(**{**options, **more})


def give_back(each: Replay, *, unconfirmed: bool = False, error: str = "no route") -> None:
    states.returned(
        [UnpublishedReplay(replay=each, error=Reason.of(error), unconfirmed=unconfirmed)], now=NOW
    )


def number_of_states(event: ArchivedEvent) -> tuple[Any, ...]:
    now = again(event)
    return now.state, now.version, now.replays, now.state_since


# -- the table ----------------------------------------------------------------------------

OPERATIONS: dict[str, tuple[Callable[[ArchivedEvent], Any], State, State]] = {
    "claim": (claim, State.ARCHIVED, State.QUEUED),
    "force": (lambda event: claim(event, force=True), State.REPLAYING, State.QUEUED),
    "discard": (
        lambda event: states.discard(seen(event), by="ada", reason="a test", now=NOW),
        State.ARCHIVED,
        State.DISCARDED,
    ),
    "resolve": (
        lambda event: states.resolve(seen(event), by="ada", reason="a test", now=NOW),
        State.REPLAYING,
        State.DISCARDED,
    ),
    "restore": (
        lambda event: states.restore(seen(event), by="ada", reason="a test", now=NOW),
        State.DISCARDED,
        State.ARCHIVED,
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_decision_has_one_state_that_it_starts_from(operation: str) -> None:
    """The others stay to the last column, and nothing is said of them in the history."""
    run, before, after = OPERATIONS[operation]
    for state in State:
        event = make(state=state, replays=0)
        unchanged = number_of_states(event)
        done = run(event)
        if state == before:
            assert len(done) == 1
            assert again(event).state == after
            assert again(event).version == 4
            if after == State.QUEUED:
                states.published(done, now=NOW)
            action = ArchiveAction.objects.get(event=event)
            assert (action.by, action.reason) in {("ada", "a test"), ("ada", "fixed\\x00")}
        else:
            assert done == []
            assert number_of_states(event) == unchanged
            assert not ArchiveAction.objects.filter(event=event).exists()
            assert not Replay.objects.filter(event=event).exists()


@ONE
@pytest.mark.parametrize("operation", OPERATIONS)
def test_changed_version_is_left_alone(operation: str) -> None:
    run, before, _ = OPERATIONS[operation]
    for version in (2, 4):
        event = make(state=before)
        event.version = version
        unchanged = number_of_states(event)
        assert run(event) == []
        assert number_of_states(event) == unchanged
    assert not ArchiveAction.objects.exists()


def test_nothing_seen_is_nothing_done() -> None:
    """An empty condition is true of every row."""
    events = [make(state=state) for state in State]
    assert claim() == []
    for decide in (states.discard, states.restore, states.resolve):
        assert decide({}, by="ada", reason="", now=NOW) == []
    assert all(again(event).version == 3 for event in events)


# -- publishing ---------------------------------------------------------------------------


@ONE
@pytest.mark.parametrize("state", [State.ARCHIVED, State.DISCARDED])
def test_ended_unconfirmed_replay_is_not_resumed(state: State) -> None:
    event = make()
    (first,) = claim(event)
    give_back(first, unconfirmed=True)
    if state == State.DISCARDED:
        states.discard(seen(again(event)), by="ada", reason="by hand", now=NOW)
    states.failed_again({first.pk: NOW}, now=NOW)
    if state == State.DISCARDED:
        states.restore(seen(again(event)), by="ada", reason="no", now=NOW)
    (second,) = claim(again(event))
    assert second.pk != first.pk


# -- left queued --------------------------------------------------------------------------


def test_a_claim_has_its_time() -> None:
    claim(make())
    assert reclaim(since_before=NOW) == []
    assert reclaim(service="stock") == [], "another service's mirror"
    assert len(reclaim(since_before=NOW + timedelta(microseconds=1))) == 1


def test_oldest_expired_claims_are_taken_first() -> None:
    events = [make(number, body_size=400) for number in range(4)]
    for number, event in enumerate(reversed(events)):
        claim(event, now=NOW + timedelta(seconds=number))
    assert [each.event.pk for each in reclaim(limit=1)] == [events[3].pk]
    assert {each.event.pk for each in reclaim(size=900)} == {events[2].pk, events[1].pk}
    assert [each.event.pk for each in reclaim(size=1)] == [events[0].pk], "one that is larger"


# -- transactions -------------------------------------------------------------------------


def test_a_claim_in_a_transaction_is_refused_with_the_remedy() -> None:
    """ATOMIC_REQUESTS: what is published could be rolled back, and be claimed once more."""
    event, left = make(1), make(2)
    claim(left)
    using = tables.database()
    remedy = r"ATOMIC_REQUESTS.*non_atomic_requests"
    with transaction.atomic(using=using):
        with pytest.raises(ConfigurationError, match=remedy):
            claim(event)
        with pytest.raises(ConfigurationError, match=remedy):
            reclaim()
    assert again(event).state == State.ARCHIVED
    assert again(left).version == 4


def test_a_claim_without_autocommit_is_refused() -> None:
    event, using = make(), tables.database()
    transaction.set_autocommit(False, using=using)
    try:
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            claim(event)
    finally:
        transaction.rollback(using=using)
        transaction.set_autocommit(True, using=using)


@POSTGRESQL
def test_a_transaction_that_had_to_give_way_is_tried_again() -> None:
    """REPEATABLE READ: PostgreSQL ends the one that comes second, with serialization_failure."""
    event, using = make(), tables.database()
    tries = []
    with connections[using].cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ")

    @tables.retry_on_conflict
    def contested() -> int:
        tries.append(1)
        with transaction.atomic(using=using):
            tables.rows().count()
            if len(tries) == 1:
                elsewhere(using, event.pk)
            with tables.locking([event.pk]):
                return tables.rows().get().version

    assert contested() == 4
    assert len(tries) == 2
    tries.clear()
    with pytest.raises(OperationalError), transaction.atomic(using=using):
        contested()
    assert len(tries) == 1, "in the caller's transaction there is nothing to try again"


def elsewhere(using: str, pk: UUID) -> None:
    """Change a row on its own connection."""
    other = connections.create_connection(using)
    try:
        with other.cursor() as cursor:
            cursor.execute(
                "UPDATE django_amqp_events_archivedevent SET version = version + 1 WHERE id = %s",
                [pk],
            )
    finally:
        other.close()


@pytest.mark.parametrize("events", [2, 60])
def test_the_number_of_statements_does_not_grow_with_the_events(events: int) -> None:
    """Nor with the number of versions among them."""
    made = [make(number, version=number) for number in range(events)]
    alias = tables.database()
    with CaptureQueriesContext(connections[alias]) as captured:
        claimed = claim(*made)
        states.published(claimed, now=NOW)
    assert len(claimed) == events
    statements = [query["sql"] for query in captured if "SAVEPOINT" not in query["sql"]]
    assert len(statements) <= 18, statements
