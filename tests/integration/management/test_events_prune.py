"""``events_prune``: what is settled and old goes, with its history; nothing else does."""

from __future__ import annotations

import os
import signal
import threading
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from django_celery_results.models import TaskResult

from django_amqp_events.archive import retention, states, tables
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    ArchivedFailure,
    FailureGroup,
    Replay,
    State,
)
from tests.archive_rows import add_failure, add_replay, make, make_group
from tests.commands import run_command
from tests.conftest import EACH, ONE, ROW_LOCKS

from ..conftest import wait_until

#: Nothing here talks to a broker.
pytestmark = pytest.mark.usefixtures("archive_database")
#: On each kind of database, with time zones; and of what no database has a part in.

NOW = datetime.now(UTC)


@pytest.fixture
def prune(settings, archive_database):
    """Run the command; its exit code, and its output or its error."""
    settings.AMQP_EVENTS = {"SERVICE": "billing", "AUTODISCOVER": []}

    def run(*arguments: str) -> tuple[int, str]:
        code, out, err = run_command("events_prune", *arguments)
        return code, out or err

    return run


def event(state: State, days: float, **fields) -> ArchivedEvent:
    """An event that has been in a state for so many days, with a history."""
    since = NOW - timedelta(days=days)
    row = make(state=state, at=since, event_id=str(uuid4()), **fields)
    replay = add_replay(row)
    add_failure(row, replay=replay)
    ArchiveAction.objects.create(event=row, at=since, action="replay", replay_id=replay.pk)
    return row


def left() -> set[str]:
    """Return the rows as ``state days``."""
    return {
        f"{row.state} {round((NOW - row.state_since).total_seconds() / 86400)}"
        for row in ArchivedEvent.objects.all()
    }


def one_of_each() -> None:
    with transaction.atomic(using=tables.database()):
        for state in State:
            for days in (1, 40, 100, 4000):
                event(state, days)


KEPT = {f"{state} {days}" for state in State for days in (1, 40, 100, 4000)}


def test_history_is_deleted_and_task_results_stay(prune):
    gone, stays = event(State.SUCCEEDED, 40), event(State.SUCCEEDED, 20)
    for row in (gone, stays):
        TaskResult.objects.create(task_id=row.task_id, status="FAILURE")
    prune()
    for model in (Replay, ArchivedFailure, ArchiveAction):
        assert [row.event_id for row in model.objects.all()] == [stays.pk]
    assert TaskResult.objects.count() == 2


@ONE
def test_ages(prune, settings):
    never = {"SUCCEEDED": None, "DISCARDED": None}
    all_succeeded = {f"succeeded {days}" for days in (1, 40, 100, 4000)}
    all_discarded = {f"discarded {days}" for days in (1, 40, 100, 4000)}
    old = {"discarded 100", "discarded 4000"}
    for setting, arguments, gone in (
        ({}, (), {"succeeded 40", "succeeded 100", "succeeded 4000", *old}),
        (never, (), set()),
        ({"SUCCEEDED": timedelta(days=50)}, (), {"succeeded 100", "succeeded 4000", *old}),
        ({**never, "DISCARDED": 43_200}, (), all_discarded),
        (never, ("--archived", "500w1d"), {"archived 4000"}),
        ({"SUCCEEDED": 1, "DISCARDED": timedelta(weeks=8)}, (), old | all_succeeded),
        # Replaying events are never deleted.
        ({"SUCCEEDED": 1, "DISCARDED": 1}, ("--archived", "0s"),
         {each for each in KEPT if each.split()[0] not in ("queued", "replaying")}),
    ):  # fmt: skip
        settings.AMQP_EVENTS = {"SERVICE": "billing", "AUTODISCOVER": [], "RETENTION": setting}
        ArchivedEvent.objects.all().delete()
        one_of_each()
        assert prune(*arguments)[0] == 0
        assert left() == KEPT - gone, arguments


@ONE
def test_the_ages_of_replaying_events_are_refused(archive_database):
    for state in (State.QUEUED, State.REPLAYING):
        for of in (retention.prune, retention.due):
            with pytest.raises(ValueError, match="never deleted"):
                of({state: 1.0}, service="billing")


@ONE
def test_a_dry_run_counts_and_deletes_nothing(prune):
    one_of_each()
    code, out = prune("--dry-run", "--archived", "300d")
    assert code == 0
    assert "succeeded  3 rows would be deleted, kept 30 d" in out
    assert "archived   1 row would be deleted, kept 300 d" in out
    assert left() == KEPT


@ONE
def test_batches_are_transactions_and_ctrl_c_ends_between_them(prune, monkeypatch):
    for _ in range(7):
        event(State.SUCCEEDED, 40)
    seen: list[int] = []
    delete = retention._delete_events

    def counted(old, ids):
        seen.append(len(ids))
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return delete(old, ids)

    monkeypatch.setattr(retention, "_delete_events", counted)
    monkeypatch.setattr(retention, "ROWS_PER_TRANSACTION", 3)
    code, out = prune()
    assert seen == [3, 3]
    assert code == 1
    assert "stopped early; 6 rows deleted" in out
    assert ArchivedEvent.objects.count() == 1


@EACH
def test_event_restored_during_the_prune_stays(prune, monkeypatch):
    """Between the query for old rows and the lock."""
    row, other = event(State.DISCARDED, 100), event(State.DISCARDED, 100)
    locking = tables.locking

    def restored(ids, **options):
        if not ArchiveAction.objects.filter(action="restore").exists():
            monkeypatch.setattr(tables, "locking", locking)
            assert states.restore({row.pk: 0}, by="ada", reason="", now=datetime.now(UTC))
        return locking(ids, **options)

    monkeypatch.setattr(tables, "locking", restored)
    assert retention.prune({State.DISCARDED: 86400.0}, service="billing").total == 1
    assert ArchivedEvent.objects.get().pk == row.pk
    assert ArchivedFailure.objects.get().event_id == row.pk
    assert not Replay.objects.filter(event_id=other.pk).exists()


@ROW_LOCKS
def test_locked_rows_are_waited_for_and_read_again(archive_database):
    row = event(State.DISCARDED, 100)
    pruned: list[retention.Pruned] = []

    def other() -> None:
        try:
            pruned.append(retention.prune({State.DISCARDED: 86400.0}, service="billing"))
        finally:
            connections[archive_database.alias].close()

    thread = threading.Thread(target=other)
    with transaction.atomic(using=archive_database.alias):
        ArchivedEvent.objects.filter(pk=row.pk).update(state=State.ARCHIVED, version=1)
        thread.start()
        wait_until(archive_database.waiting, "the other one waits for the row")
    thread.join(30)
    assert [each.total for each in pruned] == [0]
    assert ArchivedFailure.objects.get().event_id == row.pk


@EACH
def test_pruning_reads_no_bodies(archive_database):
    def statements(count: int) -> list[str]:
        for _ in range(count):
            event(State.SUCCEEDED, 40)
        with CaptureQueriesContext(connections[archive_database.alias]) as captured:
            assert retention.prune({State.SUCCEEDED: 86400.0}, service="billing").total == count
        return [query["sql"] for query in captured]

    few, many = statements(2), statements(40)
    assert len(few) == len(many)
    quote = connections[archive_database.alias].ops.quote_name
    assert not any(quote(column) in sql for column in ("body", "document") for sql in many)


@EACH
def test_a_database_without_tables(prune, archive_database):
    call_command(
        "migrate", "django_amqp_events", "zero", database=archive_database.alias, verbosity=0
    )
    code, err = prune()
    assert code == 2
    assert "run `manage.py migrate`" in err


@EACH
def test_a_group_without_events_goes_with_the_last_of_them(prune):
    event(State.DISCARDED, 100, last_failed_at=NOW - timedelta(days=100))
    event(State.DISCARDED, 100, last_failed_at=NOW - timedelta(days=100), exception="Noted")
    event(State.ARCHIVED, 1, exception="Open")
    failure_groups.rebuild()
    make_group(service="shop", exception="Another")
    noted = FailureGroup.objects.get(exception="Noted")
    failure_groups.write(noted.pk, seen=0, by="", now=NOW, note="known", assignee="", ticket="")
    code, out = prune()
    assert code == 0
    assert "1 group without events deleted" in out
    left = FailureGroup.objects.values_list("exception", flat=True)
    assert set(left) == {"Noted", "Open", "Another"}
    assert "without events" not in prune()[1]
