"""The inbox on each database: one effect, whatever is delivered twice; no stale event wins."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from django.db import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)

from django_amqp_events import (
    PublishNackedError,
    RolledBackError,
    handler,
    publish_event,
    signals,
)
from django_amqp_events.archive import inbox_retention, replay, retention
from django_amqp_events.context import ReceivedEvent
from django_amqp_events.declare.newest import Version
from django_amqp_events.declare.registry import Handler, get_registry
from django_amqp_events.models import ArchivedEvent, InboxEntry, LatestVersion, State
from django_amqp_events.publish import outbox, outbox_rows
from django_amqp_events.testing import memory_events, override_events
from django_amqp_events.worker import inbox
from django_amqp_events.worker.verdict import InvalidArguments
from tests.archive_rows import make
from tests.conftest import ONE, POSTGRESQL, ROW_LOCKS, Database
from tests.doubles.receivers import connected
from tests.event_messages import published

from ..archiving import archived, mirror_all, publish
from ..archiving import received as delivered
from ..conftest import SHORT_LOCKS, wait_until
from ..wire import in_threads
from .handled import once

ALIAS = "archive"


@pytest.fixture
def books(archive_database: Database) -> Iterator[Handler]:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("CREATE TABLE effects (event varchar(64))")
    with override_events(SERVICE="billing", AUTODISCOVER=[]):

        @handler("shop.order", name="books.write", once=True, using=ALIAS)
        def write(**payload: Any) -> None: ...

        yield get_registry().handlers["books.write"]


def received(event_id: str = "", **more: Any) -> ReceivedEvent:
    return ReceivedEvent(id=event_id or str(uuid4()), name="shop.order", service="shop", **more)


def effect(event: ReceivedEvent) -> str:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("INSERT INTO effects VALUES (%s)", [event.id])
    return "done"


def effects() -> list[str]:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT event FROM effects")
        return [row[0] for row in cursor.fetchall()]


def run(books: Handler, event: ReceivedEvent) -> str | None:
    return once(books, event, lambda: effect(event))


def test_the_second_delivery_is_skipped(books: Handler, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []

    def hear(**told: Any) -> None:
        heard.append((told["sender"], told["handler"], told["event"].id))

    with connected(hear, signals.event_skipped):
        event = received()
        assert run(books, event) == "done"
        caplog.set_level("INFO")
        assert run(books, received(event.id, attempt=2)) is None
    assert effects() == [event.id]
    assert heard == [("billing", "books.write", event.id)]
    assert f"({event.id}) is skipped, since books.write has handled it" in caplog.text
    (entry,) = InboxEntry.objects.using(ALIAS)
    assert (entry.service, entry.handler, entry.source) == ("billing", "books.write", "shop")


def test_same_id_with_different_names_is_handled_twice(books: Handler) -> None:
    """The id may be an order number and the name says what happened; the archive agrees."""
    created = ReceivedEvent(id="7", name="shop.order.created", service="shop")
    paid = ReceivedEvent(id="7", name="shop.order.paid", service="shop")
    assert [run(books, event) for event in (created, paid, paid)] == ["done", "done", None]
    assert effects() == ["7", "7"]
    assert InboxEntry.objects.using(ALIAS).count() == 2


def test_a_conflict_in_the_handler_is_a_failure(
    books: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a row that cannot be inserted yet is waited for: the handler runs once per attempt."""
    monkeypatch.setattr(inbox, "is_conflict", lambda _: True)
    event, runs = received(), []

    def fail() -> None:
        runs.append(effect(event))
        raise OperationalError("deadlock detected") if len(runs) == 1 else ValueError("again")

    with pytest.raises(OperationalError):
        once(books, event, fail)
    assert len(runs) == 1
    assert not effects()


@ONE
def test_nothing_is_waited_for_in_the_transaction_of_a_caller(
    books: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may have ended it, and the caller's locks would last as long."""
    tries = []

    def locked(**_: Any) -> Any:
        tries.append(1)
        raise OperationalError("database is locked")

    monkeypatch.setattr(inbox, "is_locked", lambda _: True)
    with transaction.atomic(using=ALIAS), monkeypatch.context() as patched:
        patched.setattr(transaction, "atomic", locked)
        with pytest.raises(OperationalError):
            run(books, received())
    assert len(tries) == 1


def test_only_the_row_itself_says_that_an_event_is_handled(books: Handler) -> None:
    """The row of an event that was not handled violates another constraint, as of a migration."""
    table = InboxEntry._meta.db_table
    first, second = received(), received()
    assert run(books, first) == "done"
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(f"CREATE UNIQUE INDEX newer ON {table} (handler)")
    with pytest.raises(IntegrityError):
        run(books, second)
    assert run(books, first) is None
    assert effects() == [first.id]


def again(event: ReceivedEvent) -> None:
    """Insert an existing row and expect the error."""
    row = InboxEntry(id=uuid4(), handled_at=datetime.now(UTC), event_id=event.id)
    row.save(using=ALIAS)
    with suppress(IntegrityError):
        row.save(using=ALIAS, force_insert=True)


def divide(_: ReceivedEvent) -> None:
    with suppress(DatabaseError), connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT 1/0")


def give_up(_: ReceivedEvent) -> None:
    transaction.set_rollback(True, using=ALIAS)


def end(_: ReceivedEvent) -> None:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("ROLLBACK")


def close(_: ReceivedEvent) -> None:
    connections[ALIAS].close()


@pytest.mark.parametrize("swallow", [again, give_up, end, close])
def test_failed_commit_is_a_failure(
    books: Handler, swallow: Callable[[ReceivedEvent], None]
) -> None:
    """Django and the database roll back silently; the attempt fails and is retried."""
    check_swallowed(books, swallow)


@POSTGRESQL
def test_postgresql_does_not_commit(books: Handler) -> None:
    check_swallowed(books, divide)


@POSTGRESQL
@pytest.mark.parametrize("error", [IntegrityError, SoftTimeLimitExceeded])
def test_an_error_of_the_commit(
    books: Handler, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constraint that is checked last, or a soft time limit that is raised after it."""
    connection: Any = connections[ALIAS]
    event = received()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE effects ADD UNIQUE (event) DEFERRABLE INITIALLY DEFERRED")

    def interrupted(*, using: str) -> bool:
        raise SoftTimeLimitExceeded

    def twice() -> None:
        effect(event)
        if error is IntegrityError:
            effect(event)
        else:
            monkeypatch.setattr(transaction, "get_rollback", interrupted)

    with pytest.raises(error):
        once(books, event, twice)
    monkeypatch.undo()
    assert not effects()
    assert run(books, event) == "done"
    assert effects() == [event.id]


def check_swallowed(books: Handler, swallow: Callable[[ReceivedEvent], None]) -> None:
    event = received()

    def swallows() -> str:
        done = effect(event)
        swallow(event)
        return done

    with pytest.raises(RolledBackError, match=rf"{event.id}.*transaction on .* is rolled back"):
        once(books, event, swallows)
    assert not effects()
    assert not InboxEntry.objects.using(ALIAS).exists()
    assert run(books, event) == "done"
    assert effects() == [event.id]


def test_forced_replay_has_its_own_inbox_key(books: Handler) -> None:
    event = received()
    run(books, event)
    assert run(books, received(event.id, replay_id="r1")) is None
    forced = received(event.id, replay_id="r2", replay_forced=True)
    assert run(books, forced) == "done"
    assert run(books, forced) is None
    assert effects() == [event.id] * 2


def test_deliveries_at_the_same_time(books: Handler) -> None:
    """Eight threads with one event, which the database lets wait for a moment only: one effect."""
    event = received()
    start = threading.Barrier(8)
    outcomes: list[object] = []

    def work(_: int) -> None:
        connection = connections[ALIAS]
        with connection.cursor() as cursor:
            cursor.execute(SHORT_LOCKS[connection.vendor])
        start.wait(10)
        outcomes.append(once(books, event, slow))

    def slow() -> str:
        done = effect(event)
        time.sleep(1.5)
        return done

    assert not in_threads(8, work)
    assert Counter(outcomes) == {"done": 1, None: 7}
    assert effects() == [event.id]


@ROW_LOCKS
def test_deliveries_that_wait_for_one_that_is_rolled_back(
    books: Handler, archive_database: Database
) -> None:
    """MySQL gives all who wait a shared lock, and then ends all but one of them."""
    event = received()
    outcomes: list[object] = []

    def work() -> None:
        try:
            outcomes.append(run(books, event))
        except Exception as exc:  # noqa: BLE001 - compared below
            outcomes.append(exc)
        finally:
            connections[ALIAS].close()

    threads = [threading.Thread(target=work) for _ in range(6)]

    def fails() -> None:
        for thread in threads:
            thread.start()
        wait_until(lambda: archive_database.waiting() == len(threads), "all wait")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        once(books, event, fails)
    for thread in threads:
        thread.join(60)
    assert Counter(map(str, outcomes)) == {"done": 1, "None": 5}
    assert effects() == [event.id]


def test_old_rows_go_unless_their_event_is_in_the_archive(books: Handler) -> None:
    now = datetime.now(UTC)
    events = [received() for _ in range(5)]
    for event in events:
        run(books, event)
    old = now - timedelta(days=100)
    kept = [inbox.inbox_key("billing", "books.write", event) for event in events]
    InboxEntry.objects.using(ALIAS).filter(pk__in=kept[:4]).update(handled_at=old)
    for event, state in ((events[0], State.ARCHIVED), (events[1], State.SUCCEEDED)):
        make(state=state, at=old, name="shop.order", event_id=event.id)
    before = now - timedelta(days=31)
    assert sum(inbox_retention.prune(before=before, service="billing")) == 3
    left = {row.pk for row in InboxEntry.objects.using(ALIAS)}
    assert left == {kept[0], kept[4]}
    assert sum(inbox_retention.prune(before=before, service="billing")) == 0


@pytest.mark.parametrize("standing", ["failed", "discarded"])
def test_a_row_stays_while_its_event_is_in_the_outbox(books: Handler, standing: str) -> None:
    """One queue refused an event that another took: it is published to both when it is restored."""
    now = datetime.now(UTC)
    event, other = received(), received()
    run(books, event)
    run(books, other)
    with override_events(SERVICE="billing", DATABASE=ALIAS):
        message = published(event.name, event_id=event.id, service="billing")
        (held,) = outbox_rows.insert([message], alias=ALIAS, service="billing")
        refused = PublishNackedError("no", event_id=event.id, event_name=event.name)
        outbox_rows.record_failures(ALIAS, [outbox_rows.Answer(held, refused)])
        if standing == "discarded":
            assert outbox.discard([held.id], alias=ALIAS) == 1
        old = now - timedelta(days=40)
        InboxEntry.objects.using(ALIAS).update(handled_at=old)
        ages = {"outbox": 90 * 86400, "inbox": 30 * 86400}
        assert retention.prune(ages, service="billing").counts == {"inbox": 1, "groups": 0}
        assert run(books, event) is None
        assert run(books, other) == "done"
        outbox_rows.delete_confirmed(ALIAS, [held])
        assert sum(inbox_retention.prune(before=now - timedelta(days=31), service="billing")) == 1


def test_forced_replay_stays_forced_after_takeover(
    archive_database: Database, service: Any, fresh_vhost: Any
) -> None:
    billing = service(fresh_vhost, HANDLERS={"send_invoice": ["shop.order.created"]})
    billing.declare()
    publish(billing, archived(delivered("order-1")))
    mirror_all(billing)
    row = ArchivedEvent.objects.get()
    replay.replay({row.pk: row.version}, by="ada")
    assert "event-replay-forced" not in billing.take("billing.send_invoice").headers
    long_ago = datetime.now(UTC) - timedelta(days=2)
    ArchivedEvent.objects.update(state_since=long_ago)
    row.refresh_from_db()
    report = replay.replay({row.pk: row.version}, by="ada", force=True)
    assert report.published == [row.pk]
    message = billing.take("billing.send_invoice")
    assert message.headers["event-replay-forced"] is True
    ArchivedEvent.objects.update(state="queued", state_since=long_ago)
    assert replay.resume() == 1
    second = billing.take("billing.send_invoice")
    assert second.headers["event-replay-forced"] is True
    assert second.headers["event-replay-id"] == message.headers["event-replay-id"]


@pytest.mark.parametrize(
    ("error", "committed"),
    [
        (SoftTimeLimitExceeded, True),
        (OperationalError, True),
        (InterfaceError, True),
        (ProgrammingError, True),  # of psycopg, which cannot end an interrupted transaction
        (OperationalError, False),
    ],
)
def test_an_answer_to_the_commit_that_is_lost(
    books: Handler, error: type[Exception], monkeypatch: pytest.MonkeyPatch, *, committed: bool
) -> None:
    """The row tells whether the run counts: one that is committed has not failed."""
    connection, event = connections[ALIAS], received()
    commit = connection.commit

    def cut() -> None:
        if committed:
            commit()
        raise error

    def work() -> str:
        monkeypatch.setattr(connection, "commit", cut)
        return effect(event)

    if committed:
        assert once(books, event, work) == "done"
    else:
        with pytest.raises(error):
            once(books, event, work)
    monkeypatch.undo()
    assert effects() == [event.id] * committed
    assert run(books, event) == (None if committed else "done")
    assert effects() == [event.id]


def test_a_callback_after_the_commit_that_fails_is_logged(
    books: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    """The next attempt would be skipped, so there is none."""

    def work() -> str:
        transaction.on_commit(lambda: int("broken"), using=ALIAS)
        return effect(event)

    event = received()
    assert once(books, event, work) == "done"
    assert effects() == [event.id]
    assert "callback of transaction.on_commit()" in caplog.text
    assert "ValueError" in caplog.text


# -- newest ----------------------------------------------------------------------------------------


@pytest.fixture
def writer(archive_database: Database) -> Iterator[Handler]:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("CREATE TABLE orders (id integer primary key, version integer)")
    renamed = {"books.former": "books.write"}
    with override_events(SERVICE="billing", AUTODISCOVER=[], RENAMED_HANDLERS=renamed):

        @handler("shop.order", name="books.write", newest=("order", "version"), using=ALIAS)
        def write(**payload: Any) -> None: ...

        yield get_registry().handlers["books.write"]


def update(order: int, version: int) -> str:
    """Write an order, unless it would become older."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT version FROM orders WHERE id = %s", [order])
        row = cursor.fetchone()
        assert row is None or row[0] < version, "a stale event overwrote a newer one"
        cursor.execute("DELETE FROM orders WHERE id = %s", [order])
        cursor.execute("INSERT INTO orders VALUES (%s, %s)", [order, version])
    return "written"


def handle(writer: Handler, order: int, version: int, **more: Any) -> str | None:
    event = received(f"{order}-{version}", **more)
    thing = Version(str(order), version, is_time=False)
    return once(writer, event, lambda: update(order, version), thing)


def orders() -> dict[int, int]:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT id, version FROM orders")
        return dict(cursor.fetchall())


def test_an_event_that_is_not_newer_is_skipped_and_told(writer: Handler) -> None:
    told: list[tuple[str, bool]] = []

    def hear(event: ReceivedEvent, superseded: bool, **_: Any) -> None:
        told.append((event.id, superseded))

    with connected(hear, signals.event_skipped):
        assert handle(writer, 1, 5) == "written"
        assert handle(writer, 1, 5) is None  # delivered again
        assert handle(writer, 1, 3) is None
        assert handle(writer, 2, 3) == "written", "another order"
        same = Version("1", 5, is_time=False)
        assert once(writer, received("other"), lambda: update(1, 5), same) is None
        assert handle(writer, 1, 3) is None  # delivered again
    assert told == [("1-5", False), ("1-3", True), ("other", True), ("1-3", True)]
    superseded = InboxEntry.objects.using(ALIAS).filter(superseded=True)
    assert {row.event_id for row in superseded} == {"1-3", "other"}


def test_the_outcome_of_a_superseded_replay_says_so(archive_database: Database) -> None:
    """The archive must not take it for a run that succeeded."""
    with (
        override_events(HISTORY={"MAX_AGE": "1d"}, PUBLISH="immediate", handlers=[], events=[]),
        memory_events() as broker,
    ):
        publish_event("shop.order", {"order": 1, "version": 1})

        @handler("shop.order", name="books.write", newest=("order", "version"), using=ALIAS)
        def write(**payload: Any) -> None: ...

        publish_event("shop.order", {"order": 1, "version": 2})
        broker.run()
        assert broker.backfill("books.write") == 1
        broker.run()
        assert [outcome.outcome for outcome in broker.outcomes] == ["superseded"]


def test_every_order_ends_at_its_newest_version(writer: Handler) -> None:
    """Threads handle the versions in any order; each run that is not skipped fails once."""
    versions = [(order, version) for order in range(4) for version in range(20)]
    random.shuffle(versions)

    def work(number: int) -> None:
        for order, version in versions[number::4]:
            thing = Version(str(order), version, is_time=False)
            with suppress(ZeroDivisionError):
                once(writer, received(f"{order}-{version}"), lambda: 1 / 0, thing)
            handle(writer, order, version)

    assert not in_threads(4, work)
    assert orders() == dict.fromkeys(range(4), 19)
    assert InboxEntry.objects.using(ALIAS).count() == len(versions)


def test_a_forced_replay_runs_and_keeps_the_newest(writer: Handler) -> None:
    handle(writer, 1, 5)
    ran: list[str] = []
    forced = received("1-3", replay_id="r", replay_forced=True)
    once(writer, forced, lambda: ran.append("1-3"), Version("1", 3, is_time=False))
    assert ran == ["1-3"]
    assert LatestVersion.objects.using(ALIAS).get().version == 5


def test_a_version_of_another_type_is_archived(writer: Handler) -> None:
    handle(writer, 1, 5)
    later = Version("1", 10**15, is_time=True)
    with pytest.raises(InvalidArguments, match="is a time, and that of an earlier event is an int"):
        once(writer, received("x"), lambda: None, later)
    assert LatestVersion.objects.using(ALIAS).get().version == 5


def test_other_paths_have_other_versions(writer: Handler) -> None:
    """Customer 1 is not order 1, and a time follows no integer."""
    handle(writer, 1, 5)
    customers = replace(writer, newest=("customer", "version"))
    customer = Version("1", 3, is_time=False)
    assert once(customers, received("c"), lambda: "ran", customer) == "ran"
    assert once(customers, received("again"), lambda: "ran", customer) is None
    times = replace(writer, newest=("order", "time"))
    later = Version("1", 10**15, is_time=True)
    assert once(times, received("t"), lambda: "ran", later) == "ran"


def test_old_versions_are_pruned(writer: Handler) -> None:
    handle(writer, 1, 5)
    handle(writer, 2, 5)
    old = datetime.now(UTC) - timedelta(days=60)
    LatestVersion.objects.using(ALIAS).filter(thing="1").update(handled_at=old)
    before = datetime.now(UTC) - timedelta(days=40)
    assert inbox_retention.due(before=before, service="billing") == 1
    assert sum(inbox_retention.prune(before=before, service="billing")) == 1
    assert LatestVersion.objects.using(ALIAS).get().thing == "2"
