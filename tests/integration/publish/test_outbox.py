"""The outbox on a real broker, in SQLite's file and in PostgreSQL: what is published, and when."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from django.core.management import call_command
from django.db import DatabaseError, connections, transaction
from django.test.utils import CaptureQueriesContext

from broker import Node
from database_server import DatabaseServer
from django_amqp_events import (
    BrokerUnavailableError,
    Options,
    OutboxError,
    PublishError,
    PublishTimeoutError,
    event,
    process_identity,
    publish_event,
    publish_many,
)
from django_amqp_events.backoff import Backoff
from django_amqp_events.conf import get_settings
from django_amqp_events.databases import Now
from django_amqp_events.models import OutboxEvent
from django_amqp_events.publish import direct_publisher, outbox, outbox_rows
from django_amqp_events.publish.direct_publisher import CommittedRows, DirectPublisher
from django_amqp_events.publish.outbox_rows import Answer
from django_amqp_events.publish.relay import OutboxChannel, Relay, RelayCounts
from django_amqp_events.reasons import Reason
from django_amqp_events.signals import event_postponed, event_published, event_unrouted
from tests.conftest import ONE, POSTGRESQL, Database, Vhost, archive_in

from .. import wire as wire_module
from ..conftest import Service
from ..wire import (
    ACK,
    BLOCKED,
    UNBLOCKED,
    Proxy,
    Wire,
    finished,
    until,
)

NAME = "shop.order.created"
ALIAS = "archive"
#: Seconds in which a call returns that is not held: less than a CONFIRM_TIMEOUT.
SOON = 10.0
PATIENCE = direct_publisher.CONFIRM_WAIT_SECONDS

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for confirms, since a busy machine confirms late."""
    monkeypatch.setattr(direct_publisher, "CONFIRM_WAIT_SECONDS", 30.0)


@pytest.fixture
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_publisher, "CONFIRM_WAIT_SECONDS", PATIENCE)


@pytest.fixture
def wire(vhost: Vhost, archive_database: Database) -> Iterator[Wire]:
    with Wire.on(vhost.url, PUBLISH="outbox", DATABASE=ALIAS) as wire:
        yield wire


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Shorten leases."""

    def shorten(seconds: float) -> None:
        monkeypatch.setattr(outbox_rows, "LEASE", seconds)
        monkeypatch.setattr(outbox_rows, "BEGIN_WITHIN", seconds / 2)
        monkeypatch.setattr(outbox_rows, "RENEW", seconds / 6)
        outbox_rows._statement.cache_clear()

    yield shorten
    monkeypatch.undo()
    outbox_rows._statement.cache_clear()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat what has failed after minutes, so that no relay of the test meets it again."""
    for name in ("_NOWHERE", "_MAYBE_STORED"):
        monkeypatch.setattr(outbox_rows, name, Backoff(120.0, 600.0))


@contextmanager
def rollback(using: str = ALIAS) -> Iterator[None]:
    with suppress(LookupError), transaction.atomic(using=using):
        yield
        raise LookupError


def table() -> Any:
    return OutboxEvent.objects.using(ALIAS)


def make_due() -> None:
    table().update(due_at=Now())


def leave(count: int = 1, name: str = NAME, **options: Any) -> list[str]:
    """Commit events as a process does that dies before it publishes them."""
    settings = get_settings()
    from django_amqp_events.publish.publisher import _message

    messages = [
        _message(settings, name, {"n": n}, Options(**options), settings_now(), validate=True)
        for n in range(count)
    ]
    outbox_rows.insert(messages, alias=ALIAS, service="shop")
    make_due()
    return [message.event_id for message in messages]


def settings_now() -> Any:
    from django_amqp_events.publish import publisher

    return publisher.backend(get_settings()).now()


def relay(**options: Any) -> RelayCounts:
    """Run a relay until nothing is due."""
    said: list[str] = []
    made = Relay(
        app=wire_module.app, settings=get_settings(), alias=ALIAS, tell=said.append, **options
    )
    return made.run(until_empty=True)


# -- with the transaction -------------------------------------------------------------------------


def test_published_right_after_the_commit(wire: Wire):
    with transaction.atomic(using=ALIAS):
        first = publish_event(NAME, {"n": 1})
        rest = publish_many(NAME, [{"n": 2}, {"n": 3}])
        assert table().count() == 3
        assert wire.take() == []
    assert wire.ids() == [first, *rest]
    assert not table().exists()


def test_outside_a_transaction_publishes_immediately(wire: Wire):
    event_id = publish_event(NAME, {"n": 1})
    assert wire.ids() == [event_id]
    assert not table().exists()


def test_the_same_message_by_both_ways(wire: Wire):
    """A relay publishes the same message as the publishing process."""
    options: dict[str, Any] = {"event_id": "one", "headers": {"traceparent": "00-1", "n": 7}}
    leave(**options)
    assert relay() == RelayCounts(published=1)
    publish_event(NAME, {"n": 0}, options=Options(**options))
    by_relay, direct = wire.take()
    for message in (by_relay, direct):
        assert message.properties["application_headers"].pop("event-published-at")
        message.properties["application_headers"].pop("x-delivery-count", None)
    assert by_relay.body == direct.body
    assert by_relay.properties == direct.properties
    assert type(by_relay.properties["application_headers"]["n"]) is int


def test_many_are_one_statement(
    wire: Wire, archive_database: Database, monkeypatch: pytest.MonkeyPatch
):
    connection = connections[ALIAS]
    size, most = outbox_rows._statement_size, 0

    def measured(*args: Any) -> int:
        nonlocal most
        most = size(*args)
        return most

    monkeypatch.setattr(outbox_rows, "_statement_size", measured)
    with CaptureQueriesContext(connection) as queries, transaction.atomic(using=ALIAS):
        publish_many(NAME, [{"n": n} for n in range(60)])
    inserts = [query for query in queries if "INSERT" in query["sql"]]
    assert len(inserts) == 1
    # One for each so many that the database takes as parameters of one statement.
    with CaptureQueriesContext(connection) as queries:
        published = publish_many(NAME, [{"n": n} for n in range(2 * most + 1)])
    assert sum("INSERT" in query["sql"] for query in queries) == 3
    until(lambda: not table().exists(), "all are published")
    assert len(wire.take(about=60 + len(published))) == 60 + len(published)


def test_a_transaction_on_another_database(wire: Wire, archive_database: Database):
    created = event.__globals__["Event"](NAME, lambda n: None)
    with (
        transaction.atomic(using="default"),
        pytest.raises(OutboxError, match=r"open on database 'default'.*using\(using='default'\)"),
    ):
        created.publish(n=1)
    assert not table().exists()
    assert wire.take() == []
    with transaction.atomic(using="default"), transaction.atomic(using=ALIAS):
        both = created.publish(n=2)
    with rollback("default"):
        meant = created.using(using=ALIAS).publish(n=3)
    assert wire.ids() == [both, meant]
    with rollback("default"):
        created.using(using="default").publish(n=4)
        assert OutboxEvent.objects.using("default").count() == 1
    assert not OutboxEvent.objects.using("default").exists()


def test_without_a_table(wire: Wire, archive_database: Database):
    with connections[ALIAS].schema_editor() as editor:
        editor.delete_model(OutboxEvent)
    with pytest.raises(OutboxError, match=r"manage.py migrate --database archive"):
        publish_event(NAME, {})
    with pytest.raises(OutboxError), transaction.atomic(using=ALIAS):
        publish_event(NAME, {})
    assert wire.take() == []
    said: list[str] = []
    stopping = iter([False] * 3 + [True] * 100)
    Relay(
        app=wire_module.app, settings=get_settings(), alias=ALIAS, tell=said.append,
        stop=lambda: next(stopping),
    ).run()  # fmt: skip
    assert "is paused: a table is missing;" in said[0]
    assert "run `manage.py migrate`" in said[0]


def test_transactions_by_hand(wire: Wire, archive_database: Database):
    """Such a transaction has no commit hook, so the relay takes the row immediately."""
    transaction.set_autocommit(False, using=ALIAS)
    try:
        event_id = publish_event(NAME, {"n": 1})
        assert wire.take() == []
        transaction.commit(using=ALIAS)
        publish_event(NAME, {"n": 2})
        transaction.rollback(using=ALIAS)
    finally:
        transaction.set_autocommit(True, using=ALIAS)
    assert relay() == RelayCounts(published=1)
    assert wire.ids() == [event_id]


@POSTGRESQL
def test_a_commit_that_is_a_rollback(wire: Wire):
    """Django does not notice it either. docs/guarantees.md names it."""
    with transaction.atomic(using=ALIAS):
        event_id = publish_event(NAME, {})
        with suppress(DatabaseError), connections[ALIAS].cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
    assert not table().exists()
    assert wire.ids() == [event_id]


def test_a_receiver_of_the_commit_that_raises(wire: Wire):
    """Django drops the callbacks after it, but the row exists."""

    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), transaction.atomic(using=ALIAS):  # noqa: PT012
        transaction.on_commit(broken, using=ALIAS)
        event_id = publish_event(NAME, {})
    assert wire.take() == []
    make_due()
    assert relay() == RelayCounts(published=1)
    assert wire.ids() == [event_id]


def test_more_than_is_kept_in_memory(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("django_amqp_events.publish.publisher.KEPT_EVENTS", 2)
    with transaction.atomic(using=ALIAS):
        ids = [publish_event(NAME, {"n": n}) for n in range(4)]
    assert wire.ids() == ids[:2]
    assert relay() == RelayCounts(published=2)
    assert wire.ids() == ids[2:]


def test_signals(wire: Wire):
    seen: list[tuple[str, str]] = []

    def published(event_id: str, **_: Any) -> None:
        seen.append(("published", event_id))

    def unrouted(event_id: str, **_: Any) -> None:
        seen.append(("unrouted", event_id))

    event_published.connect(published)
    event_unrouted.connect(unrouted)
    try:
        first = publish_event(NAME, {})
        [second] = leave()
        relay()
        wire.unbind()
        third = publish_event(NAME, {})
    finally:
        event_published.disconnect(published)
        event_unrouted.disconnect(unrouted)
    assert seen == [("published", first), ("published", second), ("unrouted", third)]
    assert not table().exists()


@POSTGRESQL
def test_only_the_deletion_itself_does_not_wait_for_the_disk(wire: Wire):
    """Another open transaction and the next one on the connection are unaffected."""
    lazily = "set_config('synchronous_commit', 'off', true)"
    connection = connections[ALIAS]

    def setting() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SHOW synchronous_commit")
            return str(cursor.fetchone()[0])

    with CaptureQueriesContext(connection) as queries:
        publish_many(NAME, [{"n": 1}, {"n": 2}])
    assert [lazily in query["sql"] for query in queries if "DELETE" in query["sql"]] == [True]
    assert setting() == "on"
    assert not table().exists()
    leave()
    taken = outbox_rows.claim(ALIAS, "shop", limit=1, failed=False)
    with CaptureQueriesContext(connection) as queries, rollback():
        outbox_rows.delete_confirmed(ALIAS, taken, lazily=True)
        assert setting() == "on"
        assert not table().exists()
    with CaptureQueriesContext(connection) as queries_of_relay:
        # A relay leases up to 900 rows.
        outbox_rows.delete_confirmed(ALIAS, taken)
    assert not any(lazily in query["sql"] for query in [*queries, *queries_of_relay])


# -- leases ---------------------------------------------------------------------------------------


def test_a_row_that_was_not_tried_is_due_at_once(wire: Wire):
    leave(3)
    taken = outbox_rows.claim(ALIAS, "shop", limit=3, failed=False)
    answers = [Answer(row, BrokerUnavailableError("away")) for row in taken[:2]]
    outbox_rows.record_answers(ALIAS, answers, get_settings())
    again = outbox_rows.claim(ALIAS, "shop", limit=3, failed=False)
    assert [row.id for row in again] == [row.id for row in taken[:2]]


def test_the_leases_of_dead_processes_of_this_machine_are_ended(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    where, pid, started = process_identity.identity().split(".")
    dead, elsewhere = f"{where}.{pid}.{int(started) - 1}", f"elsewhere.{pid}.1"
    leave(3)
    [mine] = outbox_rows.claim(ALIAS, "shop", limit=1, failed=False)
    left = {}
    for holder in (dead, elsewhere):
        with monkeypatch.context() as patch:
            patch.setattr(process_identity, "identity", lambda: holder)  # noqa: B023
            [left[holder]] = outbox_rows.claim(ALIAS, "shop", limit=1, failed=False)
    assert outbox_rows.end_leases_of_dead(ALIAS, "shop") == 1
    assert outbox_rows.end_leases_of_dead(ALIAS, "shop") == 0
    [again] = outbox_rows.claim(ALIAS, "shop", limit=3, failed=False)
    assert again.id == left[dead].id != mine.id


# -- a broker that does not answer ----------------------------------------------------------------


def timed(payload: dict[str, Any]) -> tuple[str, float]:
    began = time.monotonic()
    with transaction.atomic(using=ALIAS):
        event_id = publish_event(NAME, payload)
    return event_id, time.monotonic() - began


class Away:
    """Ways in which a broker does not answer, each with its end."""

    def __init__(self, wire: Wire) -> None:
        self.proxy: Proxy = wire.proxy()

    def begin(self, how: str) -> None:
        if how == "half-open":
            self.proxy.flowing.clear()
        else:
            self.proxy.hold = {ACK}
            for link in self.proxy.links:
                link.write(BLOCKED)

    def end(self, how: str) -> None:
        if how == "half-open":
            self.proxy.flowing.set()
        else:
            for link in self.proxy.links:
                link.write(UNBLOCKED)
            self.proxy.release()


@pytest.mark.parametrize("how", ["half-open", "alarm"])
@POSTGRESQL
def test_publishing_does_not_block(
    wire: Wire, impatient: None, caplog: pytest.LogCaptureFixture, how: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    # Longer than a transaction takes on a busy machine.
    monkeypatch.setattr(direct_publisher, "CONFIRM_WAIT_SECONDS", 1.0)
    away = Away(wire)
    wire.configure(url=away.proxy.url, PUBLISH="outbox", DATABASE=ALIAS, CONFIRM_TIMEOUT=3)
    caplog.set_level(logging.INFO, "django_amqp_events")
    published = [timed({"n": 0})[0]]
    # The first call pays for the connection and may return before its confirm.
    until(lambda: not table().exists(), "the broker was there")
    away.begin(how)
    found = [timed({"n": n}) for n in range(1, 41)]
    published += [event_id for event_id, _ in found]
    # The first waits for the confirm for at most PATIENCE; the others do not wait.
    slow = [seconds for _, seconds in found if seconds > direct_publisher.CONFIRM_WAIT_SECONDS]
    assert len(slow) < 20, slow
    assert table().count() == 40
    until(lambda: "events wait in the outbox" in caplog.text, "it is said")
    away.end(how)
    # Without a restart, and without a relay: what had no confirm yet is still this process's.
    until(lambda: table().filter(attempts=0).count() == 0, "all are published or have failed")
    make_due()
    relay()
    assert not table().exists()
    published.append(timed({"n": 41})[0])
    until(lambda: not table().exists(), "directly")
    counts = Counter(wire.ids())
    assert set(counts) == set(published)
    if how == "alarm":
        assert set(counts.values()) == {1}
    assert caplog.text.count("events wait in the outbox") == 1, "once"
    assert "confirms again" in caplog.text


@ONE
def test_a_broker_that_is_down(wire: Wire, impatient: None, caplog: pytest.LogCaptureFixture):
    seen: list[str] = []

    def postponed(event_id: str, error: str, **_: Any) -> None:
        seen.append(event_id)

    wire.configure(url="amqp://nobody@127.0.0.1:1//", PUBLISH="outbox", DATABASE=ALIAS)
    event_postponed.connect(postponed)
    try:
        found = [timed({"n": n}) for n in range(20)]
        assert max(seconds for _, seconds in found) < SOON
        direct_publisher.close_direct_publishers()
    finally:
        event_postponed.disconnect(postponed)
    assert table().count() == 20
    assert caplog.text.count("events wait in the outbox") == 1
    said: list[str] = []
    stopping = iter([False] * 12 + [True] * 1000)
    broken = Relay(
        app=wire_module.app, settings=get_settings(), alias=ALIAS, tell=said.append,
        stop=lambda: next(stopping),
    )  # fmt: skip
    make_due()
    broken.run()
    assert "RabbitMQ is unreachable" in said[0]
    # No row was taken, and none has failed.
    assert table().filter(attempts=0, claim=None).count() == 20
    wire.configure(PUBLISH="outbox", DATABASE=ALIAS)
    assert relay() == RelayCounts(published=20)
    assert wire.ids() == [event_id for event_id, _ in found]


def test_slow_confirm_reaches_its_process(
    wire: Wire, impatient: None, lease: Callable[[float], None]
):
    """A relay does not publish it a second time."""
    lease(6.0)
    proxy = wire.proxy()
    wire.configure(url=proxy.url, PUBLISH="outbox", DATABASE=ALIAS, CONFIRM_TIMEOUT=30)
    publish_event(NAME, {"n": 0})
    # The first call pays for the connection and may return before its confirm.
    until(lambda: not table().exists(), "the broker was there")
    proxy.hold = {ACK}
    event_id, seconds = timed({"n": 1})
    assert seconds < SOON
    stop = threading.Event()
    counts = RelayCounts()
    watching = Relay(
        app=wire_module.app, settings=get_settings(), alias=ALIAS, stop=stop.is_set,
        relayed=counts.add,
    )  # fmt: skip
    threads = [threading.Thread(target=lambda: in_thread(watching.run))]
    threads[0].start()
    until(lambda: proxy.links[0].held, "the broker has confirmed")
    # Longer than the lease was: it is renewed.
    due = table().get().due_at
    until(lambda: table().get().due_at > due + timedelta(seconds=6.0), "two leases have passed")
    assert counts == RelayCounts()
    proxy.release()
    until(lambda: not table().exists(), "the row is gone")
    stop.set()
    finished(*threads)
    assert counts == RelayCounts()
    assert wire.ids()[1:] == [event_id]


def signalled(proxy: Proxy) -> None:
    """Send SIGUSR1 once a confirm is held back, which its publisher waits for."""
    until(lambda: proxy.links[0].held, "a held confirm")
    os.kill(os.getpid(), signal.SIGUSR1)


@ONE
def test_a_soft_time_limit_before_the_wait(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    """The direct publisher then records the confirm itself."""
    enqueue = DirectPublisher._enqueue

    def limited(self: DirectPublisher, commit: CommittedRows) -> str:
        enqueue(self, commit)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(DirectPublisher, "_enqueue", limited)
    with pytest.raises(SoftTimeLimitExceeded):
        publish_event(NAME, {})
    until(lambda: not table().exists(), "the row is gone")
    assert len(wire.ids()) == 1


def test_a_soft_time_limit_while_a_confirm_is_waited_for(wire: Wire):
    """It is the handler's, whose commit it was. The event comes all the same, once."""
    proxy = wire.proxy()
    wire.configure(url=proxy.url, PUBLISH="outbox", DATABASE=ALIAS, CONFIRM_TIMEOUT=30)
    publish_event(NAME, {"n": 0})
    proxy.hold = {ACK}

    def limit(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGUSR1, limit)
    limiting = threading.Thread(target=signalled, args=(proxy,))
    limiting.start()
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            publish_event(NAME, {"n": 1})
    finally:
        finished(limiting)
        signal.signal(signal.SIGUSR1, before)
    proxy.release()
    until(lambda: not table().exists(), "the row is gone")
    assert [payload["n"] for payload in wire.payloads()] == [0, 1]


def in_thread(work: Callable[[], object]) -> None:
    try:
        work()
    finally:
        connections.close_all()


def test_a_transaction_that_is_longer_than_the_lease(wire: Wire, lease: Callable[[float], None]):
    """Its events are due when it commits: its own process leaves them to the relay."""
    lease(0.4)
    with transaction.atomic(using=ALIAS):
        event_id = publish_event(NAME, {"n": 1})
        began = time.monotonic()
        until(lambda: time.monotonic() > began + 0.5, "the lease is over")
    assert wire.take() == []
    assert table().count() == 1
    assert relay() == RelayCounts(published=1)
    assert wire.ids() == [event_id]


def test_clocks_of_hosts_do_not_matter(
    wire: Wire, impatient: None, monkeypatch: pytest.MonkeyPatch
):
    """A publisher whose clock is a day behind or ahead: a relay waits for the lease as ever."""
    real = time.time_ns
    day = 86_400 * 10**9
    proxy = wire.proxy()
    wire.configure(url=proxy.url, PUBLISH="outbox", DATABASE=ALIAS, CONFIRM_TIMEOUT=30)
    publish_event(NAME, {})
    # Whose confirm takes long is waited for by a thread.
    until(lambda: not table().exists(), "the first one is confirmed")
    proxy.hold = {ACK}
    for offset in (-day, day):
        monkeypatch.setattr(time, "time_ns", lambda offset=offset: real() + offset)
        monkeypatch.setattr(time, "time", lambda offset=offset: (real() + offset) / 1e9)
        publish_event(NAME, {})
    monkeypatch.undo()
    rows = table().annotate(at=Now())
    left = [(row.due_at - row.at).total_seconds() for row in rows]
    assert len(left) == 2
    assert all(outbox_rows.LEASE / 2 < seconds <= outbox_rows.LEASE for seconds in left)
    assert relay() == RelayCounts()
    proxy.release()
    until(lambda: not table().exists(), "both are published")


# -- relays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 4])
def test_relays_share_the_work(wire: Wire, number: int):
    left = leave(2000)
    counts = [RelayCounts() for _ in range(number)]
    relays = [
        Relay(app=wire_module.app, settings=get_settings(), alias=ALIAS, size=50,
              relayed=each.add, tell=lambda text: None)
        for each in counts
    ]  # fmt: skip
    threads = [
        threading.Thread(target=lambda each=each: in_thread(lambda: each.run(until_empty=True)))
        for each in relays
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert sum(each.published for each in counts) == 2000
    found = [message.properties["message_id"] for message in wire.take(about=2000)]
    assert Counter(found) == Counter(left)
    assert not table().exists()


def test_order_is_roughly_that_of_publishing(wire: Wire):
    left = leave(300)
    relay(size=100)
    assert wire.ids() == left


def test_bad_rows_block_no_others(wire: Wire, later: None):
    full = f"{wire.exchange}.full"
    wire.channel.queue_declare(
        full, durable=True, auto_delete=False,
        arguments={"x-max-length": 0, "x-overflow": "reject-publish"},
    )  # fmt: skip
    wire.channel.queue_bind(full, wire.exchange, "shop.full")
    wire.configure(PUBLISH="outbox", DATABASE=ALIAS, UNROUTED="hold")
    wire.channel.queue_unbind(wire.queue, wire.exchange, "#")
    wire.channel.queue_bind(wire.queue, wire.exchange, NAME)
    wire.channel.queue_bind(wire.queue, wire.exchange, "shop.full")
    good = leave(20)
    [nacked] = leave(1, "shop.full")
    [unrouted] = leave(1, "shop.nobody")
    [large] = leave(1)
    many = {"headers": {f"h{n}": "x" * 30_000 for n in range(6)}, "properties": {}}
    table().filter(event_id=large).update(envelope=json.dumps(many))
    good += leave(20)
    assert relay() == RelayCounts(published=40, failed=3)
    rows = {row.event_id: row for row in table()}
    assert {event_id: row.attempts for event_id, row in rows.items()} == dict.fromkeys(
        (nacked, unrouted, large), 1
    )
    assert rows[nacked].error == Reason("nacked")
    assert "no queue is bound" in str(rows[unrouted].error)
    assert "RabbitMQ's frame_max leaves" in str(rows[large].error)
    # The healthy queue has the nacked event, once: it is not sent again and again.
    assert relay() == RelayCounts()
    assert Counter(wire.ids()) == Counter([*good, nacked])
    state = outbox.count_pending(ALIAS, "shop")
    assert (state.total, state.failing, state.held, state.overdue) == (3, 3, 0, 0)
    # Somebody mends it and does not want to wait.
    wire.channel.queue_delete(full)
    wire.channel.queue_bind(wire.queue, wire.exchange, "shop.nobody")
    assert outbox.publish_now([row.pk for row in rows.values()], alias=ALIAS) == 3
    assert relay() == RelayCounts(published=2, failed=1)
    assert sorted(wire.ids()) == sorted([nacked, unrouted])
    assert table().get().attempts == 2
    assert outbox.discard([rows[large].pk], alias=ALIAS) == 1


def test_failed_rows_are_published_now_on_request(wire: Wire):
    """After an outage; leased and discarded rows and those of other services wait."""
    rows = dict(zip(("failed", "leased", "discarded", "foreign"), leave(4), strict=True))
    table().update(attempts=4, claim=None, due_at=Now() + timedelta(hours=6))
    table().filter(event_id=rows["leased"]).update(claim="a process")
    table().filter(event_id=rows["discarded"]).update(discarded_at=Now())
    table().filter(event_id=rows["foreign"]).update(service="billing")
    assert relay() == RelayCounts()
    out = io.StringIO()
    call_command("events_relay", "--now", stdout=out)
    assert f"failed events in database '{ALIAS}' that are due now: 1" in out.getvalue()
    assert wire.ids() == [rows.pop("failed")]
    assert set(table().values_list("event_id", flat=True)) == set(rows.values())


@pytest.mark.parametrize(
    "envelope", ["{", "[]", "null", '{"headers": {}}', '{"headers": [], "properties": {}}']
)
def test_unreadable_row_blocks_no_other(
    wire: Wire, later: None, envelope: str, caplog: pytest.LogCaptureFixture
):
    [bad, *good] = leave(5)
    table().filter(event_id=bad).update(envelope=envelope)
    assert relay(size=1) == RelayCounts(published=4)
    assert sorted(wire.ids()) == sorted(good)
    row = table().get()
    assert (row.event_id, row.attempts, row.claim) == (bad, 1, None)
    assert "is not a valid message" in str(row.error)
    assert f"({bad}) was not published: the outbox row" in caplog.text
    assert outbox.count_pending(ALIAS, "shop").severity == "warning"
    table().update(envelope='{"headers": {}, "properties": {}}')
    assert outbox.publish_now([row.pk], alias=ALIAS) == 1
    assert relay() == RelayCounts(published=1)


def test_row_that_closes_the_connection_delays_others_once(wire: Wire, later: None):
    good = leave(20)
    [bad] = leave(1)
    table().filter(event_id=bad).update(exchange="there-is-none")
    good += leave(20)
    relay()
    # Whoever was under way with it is sent again, alone.
    make_due()
    relay()
    make_due()
    relay()
    row = table().get()
    assert row.event_id == bad
    assert "events_declare" in str(row.error)
    assert row.attempts == 3
    counts = Counter(wire.ids())
    assert set(counts) == set(good)
    assert max(counts.values()) <= 2


def test_each_failure_is_farther_from_the_next(wire: Wire):
    wire.configure(PUBLISH="outbox", DATABASE=ALIAS, UNROUTED="hold")
    wire.unbind()
    leave(1)
    gaps = []
    for _ in range(4):
        make_due()
        relay()
        row = table().annotate(at=Now()).get()
        gaps.append(round((row.due_at - row.at).total_seconds()))
    assert gaps == sorted(set(gaps))
    assert gaps[-1] >= 4 * gaps[0]


def test_a_bad_event_does_not_reach_the_caller(wire: Wire, caplog: pytest.LogCaptureFixture):
    wire.configure(PUBLISH="outbox", DATABASE=ALIAS, UNROUTED="raise")
    wire.unbind()
    seen: list[tuple[str, str]] = []

    def postponed(event_id: str, error: str, **_: Any) -> None:
        seen.append((event_id, error))

    event_postponed.connect(postponed)
    try:
        event_id = publish_event(NAME, {})
    finally:
        event_postponed.disconnect(postponed)
    assert [each for each, _ in seen] == [event_id]
    assert "no queue is bound" in seen[0][1]
    assert "kept in the outbox" in caplog.text
    row = table().get()
    assert (row.attempts, row.claim) == (1, None)
    assert "no queue is bound" in str(row.error)


def test_stopped_relay_records_confirms(wire: Wire):
    left = leave(4)
    table().update(attempts=1)

    def two_are_confirmed() -> bool:
        return len(made._answers) >= 2 or made.total.published >= 2

    made = Relay(app=wire_module.app, settings=get_settings(), alias=ALIAS, stop=two_are_confirmed)
    assert made.run() == RelayCounts(published=2)
    assert table().count() == 2
    make_due()
    assert relay() == RelayCounts(published=2)
    assert sorted(wire.ids()) == sorted(left)


def test_rows_of_other_services_are_left_alone(wire: Wire):
    leave(1)
    table().update(service="billing")
    assert relay() == RelayCounts()
    state = outbox.count_pending(ALIAS, "shop")
    assert (state.total, state.others) == (0, {"billing": 1})


def test_untouched_row_becomes_overdue(wire: Wire):
    leave(2)
    assert outbox.count_pending(ALIAS, "shop").overdue == 0
    table().update(due_at=Now() - timedelta(seconds=outbox.OVERDUE_SECONDS + 5))
    state = outbox.count_pending(ALIAS, "shop")
    assert (state.total, state.overdue, state.held) == (2, 2, 0)
    assert state.oldest is not None


def test_endless_lease_is_reported(wire: Wire):
    leave(2)
    assert len(outbox_rows.claim(ALIAS, "shop", limit=2, failed=False)) == 2
    state = outbox.count_pending(ALIAS, "shop")
    assert (state.held, state.stuck, state.severity) == (2, 0, "ok")
    table().update(created_at=Now() - outbox.STUCK - timedelta(seconds=1))
    state = outbox.count_pending(ALIAS, "shop")
    assert (state.held, state.stuck, state.severity) == (2, 2, "warning")
    assert "more than 10 minutes" in str(state.meaning)


def test_a_lease_is_renewed_before_a_connection_is_made(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    """Which may take half of it."""
    leave(3)
    table().update(attempts=1)
    left: list[float] = []
    publish, reopen = OutboxChannel.publish, OutboxChannel.reopen

    def publishing(self: OutboxChannel, *args: Any, **options: Any) -> list[PublishError | None]:
        errors = publish(self, *args, **options)
        self.close()
        # As if the lease had been used up.
        table().filter(claim__contains="/").update(due_at=Now())
        return errors

    def reopening(self: OutboxChannel) -> None:
        rows = table().filter(claim__contains="/").annotate(at=Now())
        left.extend((row.due_at - row.at).total_seconds() for row in rows)
        reopen(self)

    monkeypatch.setattr(outbox_rows, "RENEW", 0.0)
    monkeypatch.setattr(OutboxChannel, "publish", publishing)
    monkeypatch.setattr(OutboxChannel, "reopen", reopening)
    assert relay() == RelayCounts(published=3)
    assert left
    assert min(left) > outbox_rows.LEASE - 5


def test_expired_lease_is_taken_over(wire: Wire):
    left = leave(3)
    taken = outbox_rows.claim(ALIAS, "shop", limit=10, failed=False)
    assert [row.message.event_id for row in taken] == left
    assert outbox_rows.claim(ALIAS, "shop", limit=10, failed=False) == []
    make_due()
    again = outbox_rows.claim(ALIAS, "shop", limit=10, failed=False)
    assert [row.id for row in again] == [row.id for row in taken]
    # It was only slow: its late updates touch no row leased by another relay.
    before = list(table().values_list("pk", "claim", "due_at", "attempts"))
    outbox_rows.release(ALIAS, taken)
    outbox_rows.renew(ALIAS, taken)
    outbox_rows.record_failures(ALIAS, [Answer(row, PublishTimeoutError("late")) for row in taken])
    assert list(table().values_list("pk", "claim", "due_at", "attempts")) == before
    # But what it says is confirmed, is.
    outbox_rows.delete_confirmed(ALIAS, taken[:1])
    outbox_rows.release(ALIAS, again)
    assert relay() == RelayCounts(published=2)
    assert wire.ids() == left[1:]


def test_events_status(
    service: Callable[..., Service], fresh_vhost: Vhost, archive_database: Database
):
    made = service(fresh_vhost, SERVICE="shop", PUBLISH="outbox", DATABASE=ALIAS)
    made.declare()
    code, out, _ = made.command("events_status")
    assert (code, out.splitlines()[-1]) == (0, "outbox in database 'archive': empty")
    leave(3)
    code, out, _ = made.command("events_status")
    assert code == 0
    assert re.search(r"outbox in database 'archive': 3 events since 20.*: due, for a relay", out)
    # The outbox fills while the broker is down, when visibility matters most.
    made.vhost, there = replace(made.vhost, url="amqp://u:p@127.0.0.1:9/x"), made.vhost
    code, out, err = made.command("events_status")
    assert (code, out.count("3 events since")) == (2, 1)
    assert "no connection" in err
    code, out, err = made.command("events_status", "--format", "json")
    told = json.loads(out)
    assert (code, told["exit_code"], told["result"], told["queues"]) == (2, 2, "unknown", [])
    assert told["error"] in err
    assert told["outbox"][0]["total"] == 3
    made.vhost = there
    table().update(attempts=4, error="a queue is full")
    code, out, _ = made.command("events_status", verbosity=0)
    assert code == 1
    assert "3 events are retried after up to 4 failed attempts: a queue" in out
    table().update(attempts=0, due_at=Now() - timedelta(hours=1))
    code, out, _ = made.command("events_status", "--format", "json")
    [found] = json.loads(out)["outbox"]
    assert (code, found["severity"], found["total"], found["overdue"]) == (1, "error", 3, 3)
    assert "no relay publishes them: run events_relay" in found["meaning"]
    with connections[ALIAS].schema_editor() as editor:
        editor.delete_model(OutboxEvent)
    code, out, _ = made.command("events_status")
    assert code == 2
    assert "cannot be read" in out
    assert "run `manage.py migrate`" in out


# -- an unreachable database ----------------------------------------------------------------------


def test_the_database_goes_and_comes(
    vhost: Vhost,
    private_server: DatabaseServer,
    transactional_db: None,
    django_db_blocker: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    """It is killed between the confirms of a batch and the deletion of its rows."""
    delete, calls = outbox_rows.delete_confirmed, itertools.count()

    def killing(*args: Any, **options: Any) -> None:
        if next(calls) == 4:
            private_server.kill()
        delete(*args, **options)

    monkeypatch.setattr(outbox_rows, "delete_confirmed", killing)
    with (
        django_db_blocker.unblock(),
        archive_in(private_server.kind, private_server.settings()) as database,
    ):
        database.migrate()
        with Wire.on(vhost.url, PUBLISH="outbox", DATABASE=ALIAS) as wire:
            left = leave(3000)
            said: list[str] = []
            stop = threading.Event()
            counts = RelayCounts()
            relaying = Relay(
                app=wire_module.app, settings=get_settings(), alias=ALIAS, size=50,
                tell=said.append, relayed=counts.add, stop=stop.is_set,
            )  # fmt: skip
            thread = threading.Thread(target=lambda: in_thread(relaying.run))
            thread.start()
            until(lambda: any("paused: the database" in text for text in said), "it is said")
            assert counts.published == 200
            connections[ALIAS].close()
            private_server.start_again()
            until(lambda: counts.published >= 3000, "all are published", 120)
            stop.set()
            thread.join(30)
            assert not table().exists()
            found = Counter(wire.ids())
            assert set(found) == set(left)
            # Rows confirmed while the database is down are deleted later, not published again.
            assert sum(found.values()) == 3000


# -- a broker that is killed ----------------------------------------------------------------------


@pytest.fixture
def node_wire(private_node: Node, archive_database: Database) -> Iterator[Wire]:
    with Wire.on(private_node.amqp_url("/"), PUBLISH="outbox", DATABASE=ALIAS) as wire:
        private_node.sync()
        yield wire


@POSTGRESQL
def test_broker_restart_publishes_every_row(
    private_node: Node, node_wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    published = [publish_event(NAME, {"n": 0})]
    monkeypatch.setattr(direct_publisher, "CONFIRM_WAIT_SECONDS", PATIENCE)
    private_node.kill()
    found = [timed({"n": n}) for n in range(1, 21)]
    published += [event_id for event_id, _ in found]
    assert max(seconds for _, seconds in found) < SOON
    assert table().count() == 20
    private_node.start_again()
    # This process continues without a restart.
    monkeypatch.setattr(direct_publisher, "CONFIRM_WAIT_SECONDS", 30.0)
    published += [publish_event(NAME, {"n": n}) for n in range(21, 31)]
    until(
        lambda: not direct_publisher.get_direct_publisher(get_settings())._backlog,
        "it has tried them all",
        60,
    )
    until(
        lambda: direct_publisher.get_direct_publisher(get_settings()).prompt,
        "it has seen a confirm",
        60,
    )
    published.append(timed({"n": 31})[0])
    until(lambda: not table().filter(event_id=published[-1]).exists(), "directly")
    make_due()
    relay()
    assert not table().exists()
    assert set(stored(node_wire)) == set(published)


@pytest.mark.slow
@ONE
def test_a_broker_that_is_killed_while_a_relay_works(private_node: Node, node_wire: Wire):
    left = leave(4000)
    until(private_node._queues_on_disk, "the queue is on disk")
    counts = RelayCounts()
    stop = threading.Event()
    relaying = Relay(
        app=wire_module.app, settings=get_settings(), alias=ALIAS, size=100, relayed=counts.add,
        tell=lambda text: None, stop=stop.is_set,
    )  # fmt: skip
    thread = threading.Thread(target=lambda: in_thread(relaying.run))
    thread.start()
    until(lambda: counts.published >= 500, "some are published")
    private_node.kill(at_once=True)
    until(lambda: relaying._loop.failures, "it has noticed")
    assert table().count() > 0
    private_node.start_again()

    def all_gone() -> bool:
        # Those that were under way when the connection broke wait a little.
        table().filter(claim=None).update(due_at=Now())
        return not table().exists()

    until(all_gone, "all are published", 90)
    stop.set()
    thread.join(30)
    found = Counter(stored(node_wire))
    assert set(found) == set(left)
    assert sum(found.values()) - len(found) <= 100, "only what was under way comes twice"
    assert max(found.values()) <= 2


def stored(wire: Wire) -> list[str]:
    """Ids of all events in the queue, read over a connection that has seen no restart."""
    connection = wire_module.raw_connection(wire.url)
    try:
        channel = connection.channel()
        return [
            message.properties["message_id"] for message in wire_module.drain(channel, wire.queue)
        ]
    finally:
        connection.close()
