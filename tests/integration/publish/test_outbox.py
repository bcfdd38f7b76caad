"""The outbox on a real broker, in SQLite's file and in PostgreSQL: what is published, and when."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from django.core.management import call_command
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from django_amqp_events import (
    ConfigurationError,
    Options,
    OutboxError,
    event,
    handler,
    publish_event,
    publish_many,
)
from django_amqp_events.archive import retention
from django_amqp_events.backoff import Backoff
from django_amqp_events.conf import get_settings
from django_amqp_events.context import ReceivedEvent
from django_amqp_events.databases import Now
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.models import InboxEntry, OutboxEvent, State
from django_amqp_events.publish import direct_publisher, outbox, outbox_rows
from django_amqp_events.publish.outbox_rows import insert, rows
from django_amqp_events.publish.relay import Relay, RelayCounts
from django_amqp_events.signals import event_postponed
from django_amqp_events.testing import override_events
from django_amqp_events.worker import inbox
from tests.celery_app import app
from tests.conftest import ONE, POSTGRESQL, Database, Vhost
from tests.doubles.receivers import connected
from tests.event_messages import published
from tests.integration.archiving import store

from .. import wire as wire_module
from ..conftest import Service
from ..relaying import ALIAS, NAME, leave, make_due, relay, table
from ..wire import (
    ACK,
    Proxy,
    Wire,
    finished,
    until,
)

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
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat what has failed after minutes, so that no relay of the test meets it again."""
    for name in ("_NOWHERE", "_MAYBE_STORED"):
        monkeypatch.setattr(outbox_rows, name, Backoff(120.0, 600.0))


@contextmanager
def rollback(using: str = ALIAS) -> Iterator[None]:
    with suppress(LookupError), transaction.atomic(using=using):
        yield
        raise LookupError


def relay_in_vain() -> str:
    """Run a relay until it says what it waits for."""
    said: list[str] = []
    Relay(
        app=wire_module.app, settings=get_settings(), alias=ALIAS, tell=said.append,
        stop=lambda: bool(said),
    ).run()  # fmt: skip
    return said[0]


# -- with the transaction -------------------------------------------------------------------------


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


def test_many_are_few_statements(wire: Wire, archive_database: Database):
    count = 2 * outbox_rows.INSERT_ROWS + 1
    with CaptureQueriesContext(connections[ALIAS]) as queries:
        publish_many(NAME, [{"n": n} for n in range(count)])
    inserts = [query["sql"] for query in queries if "INSERT" in query["sql"]]
    assert len(inserts) == 3
    until(lambda: not table().exists(), "all are published")
    assert len(wire.take(about=count)) == count


def test_a_transaction_on_another_database(wire: Wire, archive_database: Database):
    created = event.__globals__["Event"](NAME, lambda n: None)
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
    said = relay_in_vain()
    assert "is paused: a table is missing;" in said
    assert "run `manage.py migrate`" in said


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


# -- a broker that does not answer ----------------------------------------------------------------


def timed(payload: dict[str, Any]) -> tuple[str, float]:
    began = time.monotonic()
    with transaction.atomic(using=ALIAS):
        event_id = publish_event(NAME, payload)
    return event_id, time.monotonic() - began


@ONE
def test_a_broker_that_is_down(wire: Wire, impatient: None, caplog: pytest.LogCaptureFixture):
    seen: list[str] = []

    def postponed(event_id: str, error: str, **_: Any) -> None:
        seen.append(event_id)

    wire.configure(url="amqp://nobody@127.0.0.1:1//", PUBLISH="outbox", DATABASE=ALIAS)
    with connected(postponed, event_postponed):
        found = [timed({"n": n}) for n in range(20)]
        assert max(seconds for _, seconds in found) < SOON
        direct_publisher.close_direct_publishers()
    assert table().count() == 20
    assert caplog.text.count("events wait in the outbox") == 1
    make_due()
    assert "RabbitMQ is unreachable" in relay_in_vain()
    # No row was taken, and none has failed.
    assert table().filter(attempts=0, claim=None).count() == 20
    wire.configure(PUBLISH="outbox", DATABASE=ALIAS)
    assert relay() == RelayCounts(published=20)
    assert wire.ids() == [event_id for event_id, _ in found]


@ONE
def test_a_silent_broker_is_waited_for_once(wire: Wire, impatient: None) -> None:
    proxy = wire.proxy()
    wire.configure(url=proxy.url, PUBLISH="outbox", DATABASE=ALIAS, CONFIRM_TIMEOUT=3)
    published = [timed({"n": 0})[0]]
    until(lambda: not table().exists(), "the broker was there")
    proxy.flowing.clear()
    found = [timed({"n": n}) for n in range(1, 41)]
    published += [event_id for event_id, _ in found]
    waited = [seconds for _, seconds in found if seconds > direct_publisher.CONFIRM_WAIT_SECONDS]
    assert len(waited) < 20, waited
    proxy.flowing.set()
    until(lambda: not table().filter(claim__isnull=False).exists(), "no lease is left")
    make_due()
    relay()
    assert set(wire.ids()) == set(published)


def signalled(proxy: Proxy) -> None:
    """Send SIGUSR1 once a confirm is held back, which its publisher waits for."""
    until(lambda: proxy.links[0].held, "a held confirm")
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, TimeoutError, ValueError])
def test_a_time_limit_while_a_confirm_is_waited_for(wire: Wire, error: type[Exception]):
    """It is the caller's, whose commit it was. The event comes all the same, once."""
    proxy = wire.proxy()
    wire.configure(url=proxy.url, PUBLISH="outbox", DATABASE=ALIAS, CONFIRM_TIMEOUT=30)
    publish_event(NAME, {"n": 0})
    proxy.hold = {ACK}

    def limit(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, limit)
    limiting = threading.Thread(target=signalled, args=(proxy,))
    limiting.start()
    try:
        with pytest.raises(error):
            publish_event(NAME, {"n": 1})
    finally:
        finished(limiting)
        signal.signal(signal.SIGUSR1, before)
    proxy.release()
    until(lambda: not table().exists(), "the row is gone")
    assert [payload["n"] for payload in wire.payloads()] == [0, 1]


# -- relays ---------------------------------------------------------------------------------------


def test_failed_rows_are_published_now_on_request(wire: Wire):
    """After an outage; leased and discarded rows and those of other services wait."""
    names = "failed", "leased", "discarded", "foreign"
    rows = {name: row.event_id for name, row in zip(names, leave(4), strict=True)}
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
    [bad, *good] = (row.event_id for row in leave(5))
    table().filter(event_id=bad).update(envelope=envelope)
    assert relay(size=1) == RelayCounts(published=4)
    assert sorted(wire.ids()) == sorted(good)
    row = table().get()
    assert (row.event_id, row.attempts, row.claim) == (bad, 1, None)
    assert "is not a valid message" in str(row.error)
    assert f"({bad}) was not published: the outbox row" in caplog.text
    assert outbox.count_pending(ALIAS, "shop").severity == "warning"
    table().update(envelope='{"headers": {}, "properties": {}}')
    assert outbox.publish_failed_now(ALIAS, "shop") == 1
    assert relay() == RelayCounts(published=1)


def test_rows_that_another_session_has_locked(wire: Wire, later: None):
    leave(2)
    locked, read = threading.Event(), threading.Event()

    def lock() -> None:
        with transaction.atomic(ALIAS):
            list(table().select_for_update())
            locked.set()
            read.wait(60)
        connections[ALIAS].close()

    if connections[ALIAS].features.has_select_for_update_skip_locked:
        with ThreadPoolExecutor() as pool:
            pool.submit(lock)
            locked.wait(60)
            assert relay() == RelayCounts(), "it waits"
            read.set()
    assert relay() == RelayCounts(published=2)


def test_endless_lease_is_reported(wire: Wire):
    leave(2)
    assert len(outbox_rows.claim(ALIAS, "shop", limit=2, failed=False)) == 2
    state = outbox.count_pending(ALIAS, "shop")
    assert (state.held, state.stuck, state.severity) == (2, 0, "ok")
    table().update(created_at=Now() - outbox.STUCK - timedelta(seconds=1))
    state = outbox.count_pending(ALIAS, "shop")
    assert (state.held, state.stuck, state.severity) == (2, 2, "warning")
    assert "more than 10 minutes" in str(state.meaning)


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


# -- autocommit is off -----------------------------------------------------------------------------


REFUSED = "autocommit is off on the database 'archive'"


@pytest.fixture
def manual(archive_database: Database) -> Iterator[None]:
    with override_events(SERVICE="billing", AUTODISCOVER=[], DATABASE=ALIAS):
        message = published("a.b", event_id="1", service="billing")
        insert([message], alias=ALIAS, service="billing", held=False)
        archive_database.close()
        connections[ALIAS].settings_dict["AUTOCOMMIT"] = False
        yield
        archive_database.close()


@pytest.mark.usefixtures("manual")
def test_waiting_publishes_fail_with_the_commit() -> None:
    @handler("a.b", name="t.never", once=True)
    def never() -> None: ...

    called: list[str] = []
    event = ReceivedEvent(id="1", name="a.b", service="shop")
    known = get_registry().handlers["t.never"]
    with pytest.raises(ConfigurationError, match=REFUSED):
        inbox.once(known, event, lambda: called.append("never"))
    assert not called
    with pytest.raises(ConfigurationError, match=REFUSED):
        store([])
    with pytest.raises(ConfigurationError, match=REFUSED):
        # It would never end, so the broker is not even asked.
        Relay(app=app, settings=get_settings(), alias=ALIAS).run(until_empty=True)
    for name in ("outbox", "inbox", State.SUCCEEDED):
        with pytest.raises(ConfigurationError, match=REFUSED):
            retention.prune({name: 31 * 86400}, service="billing")
    assert rows(ALIAS).count() == 1
    assert not InboxEntry.objects.using(ALIAS).exists()
