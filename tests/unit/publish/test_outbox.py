"""The outbox where no broker is needed: delays, ids, words, checks; and where no table is."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from django.db import DatabaseError, OperationalError

from django_amqp_events import (
    BrokerUnavailableError,
    ExchangeMissingError,
    InvalidEventError,
    Options,
    PublishError,
    PublishInterruptedError,
    PublishNackedError,
    PublishTimeoutError,
    UnroutableError,
    conf,
    publish_event,
)
from django_amqp_events.conf import Settings
from django_amqp_events.message.types import Message
from django_amqp_events.models import OutboxEvent
from django_amqp_events.publish import direct_publisher, outbox, outbox_rows
from django_amqp_events.publish import relay as relay_module
from django_amqp_events.publish.direct_publisher import CommittedRows, DirectPublisher
from django_amqp_events.publish.outbox import UnreachableOutbox
from django_amqp_events.publish.outbox_rows import Answer, Row
from django_amqp_events.publish.relay import NO_OUTBOX_SECONDS, Relay
from django_amqp_events.signals import event_postponed, event_published
from django_amqp_events.testing import override_events
from tests.celery_app import app
from tests.commands import run_python
from tests.doubles.receivers import connected
from tests.integration.wire import in_threads

NAME = "shop.order.created"
MESSAGE = Message(exchange="events", routing_key=NAME, body=b"", headers={}, properties={})


@pytest.mark.parametrize(
    ("error", "delays"),
    [
        (UnroutableError, [5, 10, 20, 40, 80, 160, 320, 600, 600]),
        (ExchangeMissingError, [5, 10, 20, 40, 80, 160, 320, 600, 600]),
        # Queues may have it already: few repeats.
        (PublishTimeoutError, [5, 20, 80, 320, 1280, 5120, 20480, 21600]),
        (PublishInterruptedError, [5, 20, 80, 320, 1280, 5120, 20480, 21600]),
        (PublishNackedError, [5, 20, 80, 320, 1280, 5120, 20480, 21600]),
    ],
)
def test_delays(error: type[PublishError], delays: list[float]):
    assert [outbox_rows.delay(error("no"), n) for n in range(len(delays))] == delays
    assert outbox_rows.delay(error("no"), 2**31) == delays[-1]


@pytest.mark.parametrize(
    ("unrouted", "done"), [("warn", True), ("ignore", True), ("raise", False), ("hold", False)]
)
def test_broker_answers_map_to_states(unrouted: Any, done: bool):
    settings = Settings(unrouted=unrouted)
    row = Row(outbox_rows.new_id(), MESSAGE)
    assert Answer(row, None).done(settings)
    assert Answer(row, UnroutableError("nobody")).done(settings) is done
    assert not Answer(row, PublishNackedError("full")).done(settings)
    assert Answer(row, BrokerUnavailableError("away")).untried
    assert not Answer(row, PublishTimeoutError("late")).untried


def test_ids_of_many_threads():
    found: list[UUID] = []

    def work(_: int) -> None:
        before = time.time_ns() // 10**6
        mine = [outbox_rows.new_id() for _ in range(5000)]
        assert mine == sorted(mine)
        assert before <= mine[0].int >> 80 <= mine[-1].int >> 80 <= time.time_ns() // 10**6
        found.extend(mine)

    assert not in_threads(4, work)
    assert len(set(found)) == 20_000
    assert {(each.version, each.variant) for each in found} == {(7, "specified in RFC 4122")}


@pytest.mark.parametrize("interruption", [SoftTimeLimitExceeded, KeyboardInterrupt, DatabaseError])
def test_an_event_whose_row_is_not_deleted_yet_is_announced(
    monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
):
    """A signal handler may interrupt the committing thread; the row is deleted later."""

    def interrupted(*_: object, **__: object) -> None:
        raise interruption

    def published(event_id: str, **_: Any) -> None:
        seen.append(event_id)

    seen: list[str] = []
    monkeypatch.setattr(outbox_rows, "record_answers", interrupted)
    answers = [Answer(Row(outbox_rows.new_id(), replace(MESSAGE, event_id="a")), None)]
    commit = CommittedRows(rows=[answers[0].row], alias="default", began=time.monotonic())
    commit.answers.set_result(answers)
    publisher = DirectPublisher(app, Settings(service="shop"))
    monkeypatch.setattr(publisher, "_enqueue", lambda _: "")
    with (
        connected(published, event_published),
        suppress(SoftTimeLimitExceeded, KeyboardInterrupt),
    ):
        publisher.deliver(commit)
    assert seen == ["a"]
    assert [found[:2] for found in publisher._unrecorded] == [("default", answers)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("reported", [False, True])
def test_receivers_run_when_all_answers_are_recorded(
    monkeypatch: pytest.MonkeyPatch, late: bool, reported: bool
):
    """They may take longer than a lease: other events would be published twice, or late.

    So may a handler of the log, which records that RabbitMQ is reachable again.
    """
    done: list[str] = []

    def published(event_id: str, **_: Any) -> None:
        done.append(f"receiver of {event_id}")

    def publish(messages: Any, **_: Any) -> list[None]:
        done.append("publish")
        return [None] * len(messages)

    monkeypatch.setattr(outbox_rows, "record_answers", lambda alias, *_, **__: done.append(alias))
    publisher = DirectPublisher(app, Settings(service="shop"))
    publisher._failures = int(reported)
    monkeypatch.setattr(direct_publisher.logger, "warning", lambda _: done.append("log"))
    monkeypatch.setattr(publisher._channel, "publish", publish)
    commits: list[CommittedRows] = []
    for alias in ("a", "b", "c"):
        row = Row(outbox_rows.new_id(), replace(MESSAGE, event_id=alias))
        began = time.monotonic() - (outbox_rows.LEASE if late and alias == "c" else 0)
        commit = CommittedRows(rows=[row], alias=alias, began=began)
        commit.answers.cancel()
        commits.append(commit)
    with connected(published, event_published, event_postponed):
        publisher._publish(commits)
    receivers = [f"receiver of {alias}" for alias in ("a", "b", "c")]
    assert done == ["publish", "a", "b", "c", *["log"] * reported, *receivers]


@pytest.mark.django_db
def test_a_test_case_needs_no_broker():
    """The row is written and rolled back with the test; nothing is published."""
    with override_events(SERVICE="shop", CELERY_APP="tests.celery_app.app"):
        event_id = publish_event(NAME, {"n": 1})
    row = OutboxEvent.objects.get()
    assert (row.event_id, row.name, row.attempts) == (event_id, NAME, 0)
    assert row.claim == outbox_rows.PUBLISHER
    assert row.due_at > row.created_at


def test_unreadable_database_is_reported(monkeypatch: pytest.MonkeyPatch):
    """No database may be used here; only callers that need it get an error."""
    found = outbox.read_status(Settings(service="shop", publish="outbox"))
    assert [type(each) for each in found] == [UnreachableOutbox]
    assert "cannot be read" in str(found[0].meaning)
    assert outbox.read_status(Settings(service="shop", publish="immediate")) == []


def publishing(broker: str = "amqp://nobody@127.0.0.1:1//", **given: Any) -> str:
    """Publish an event in a program with these settings; return what it says."""
    migrated = {"INSTALLED_APPS", "DATABASES"} <= given.keys()
    program = (
        "import django\n"
        "from django.conf import settings\n"
        f"settings.configure(AMQP_EVENTS={{'SERVICE': 'lonely'}}, USE_TZ=True, **{given!r})\n"
        "django.setup()\n"
        "from celery import Celery\n"
        f"{broker!r} and Celery('lonely', broker={broker!r}).set_default()\n"
        "from django.core.management import call_command\n"
        f"{migrated} and call_command('migrate', verbosity=0)\n"
        "from django_amqp_events import AmqpEventsError, publish_event\n"
        "try:\n"
        "    print('published', publish_event('shop.order.created', {}))\n"
        "except AmqpEventsError as exc:\n"
        "    print(type(exc).__name__, exc)\n"
    )
    done = run_python(program)
    return done.stdout + done.stderr


INSTALLED = ["django_amqp_events"]
IN_MEMORY = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}


def test_no_database_at_all() -> None:
    """Its own sentence, where Django would complain of an ENGINE."""
    said = publishing(INSTALLED_APPS=INSTALLED)
    assert said.startswith("OutboxError ")
    assert "needs a database" in said
    assert '"immediate"' in said


def test_an_app_that_is_not_installed() -> None:
    """Its own sentence, where Django would complain of a model without a label."""
    said = publishing(DATABASES=IN_MEMORY)
    assert said.startswith("ConfigurationError ")
    assert "'django_amqp_events' is not in INSTALLED_APPS" in said


def test_celerys_own_fallback_app_is_refused() -> None:
    """It would publish to a broker on localhost; a thread without the project's app gets it."""
    said = publishing("", INSTALLED_APPS=INSTALLED, DATABASES=IN_MEMORY)
    assert "has no Celery app, or none that is current in this thread" in said
    assert "create one as in Celery's guide" in said
    assert "CELERY_APP" in said


def test_invalid_broker_url_is_logged(tmp_path: Path) -> None:
    """The row is safe, and the log says what is wrong, without a traceback."""
    file = {"default": {**IN_MEMORY["default"], "NAME": str(tmp_path / "db")}}
    said = publishing("ampq://nobody@127.0.0.1:1//", INSTALLED_APPS=INSTALLED, DATABASES=file)
    assert "published " in said
    assert "a relay publishes its rows: the transport of the broker URL cannot be used" in said
    assert "Did you mean amqp?" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["event_id", "correlation_id", "causation_id"])
@pytest.mark.parametrize("value", ["a\0b", "\ud800"])
def test_ids_that_no_database_keeps(name: str, value: str) -> None:
    with pytest.raises(InvalidEventError, match=name):
        Options(**{name: value})  # type: ignore[arg-type]


_NO_TABLE = OperationalError("the table is missing")
_NO_TABLE.__cause__ = Exception(1146)  # as MySQL's drivers raise it


@pytest.mark.django_db
@pytest.mark.parametrize("error", [_NO_TABLE, OperationalError("locked"), ImportError("driver")])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("needed", [True, False])
def test_only_a_database_that_needs_no_outbox_is_left_for_a_while(
    monkeypatch: pytest.MonkeyPatch, error: Exception, own: bool, needed: bool
):
    def fail(self: Relay) -> bool:
        raise error

    monkeypatch.setattr(Relay, "_publish_due", fail)
    settings, _ = conf.parse({"SERVICE": "billing", "DATABASE": "default" if own else "orders"})
    relay = Relay(app=app, settings=settings, alias="default", needed=needed)
    if needed or (own and error is not _NO_TABLE):
        with pytest.raises(type(error)):
            relay._step(until_empty=False)
    else:
        assert relay._step(until_empty=False) == NO_OUTBOX_SECONDS


@pytest.mark.parametrize("seconds", [0.0, outbox_rows.BEGIN_WITHIN + 1])
def test_a_relay_leaves_rows_that_it_has_claimed_too_long_ago(
    monkeypatch: pytest.MonkeyPatch, seconds: float
):
    """A handler of the log may hang between the claim and the publish, and outlast the lease."""
    row = Row(outbox_rows.new_id(), MESSAGE, claim="mine")
    now = time.monotonic()
    times = iter([now, now + seconds])
    relay = Relay(app=app, settings=Settings(service="shop"), alias="default")
    monkeypatch.setattr(outbox_rows, "claim", lambda *_, **__: [row])
    monkeypatch.setattr(relay_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert relay._claim(10, failed=False) == ([] if seconds else [row])


def test_rows_that_a_queue_does_not_confirm_stop_no_relay(monkeypatch: pytest.MonkeyPatch):
    """Without a leader, a queue confirms nothing; RabbitMQ takes the events of the others."""
    recorded: list[Answer] = []

    def rows(*_: object, failed: bool, **__: object) -> list[Row]:
        message = replace(MESSAGE, routing_key="late" if failed else "fine")
        return [Row(outbox_rows.new_id(), message, claim="mine") for _ in range(2)]

    def publish(messages: list[Message], **_: object) -> list[PublishTimeoutError | None]:
        return [PublishTimeoutError("") if m.routing_key == "late" else None for m in messages]

    monkeypatch.setattr(outbox_rows, "claim", rows)
    monkeypatch.setattr(outbox_rows, "due", lambda *_: True)
    monkeypatch.setattr(outbox_rows, "record_answers", lambda _, given, *__: recorded.extend(given))
    monkeypatch.setattr(relay_module, "check_commits", lambda _: None)
    relay = Relay(app=app, settings=Settings(service="shop"), alias="default")
    relay._channel = SimpleNamespace(connect=bool, hold=lambda *_: None, publish=publish)  # type: ignore[assignment]
    assert relay._publish_due()
    assert [type(answer.error).__name__ for answer in recorded] == [
        "NoneType", "NoneType", "PublishTimeoutError", "BrokerUnavailableError",
    ]  # fmt: skip
