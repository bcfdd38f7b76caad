"""Replays with a scripted broker: taken, skipped and released events."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import InterfaceError, InternalError, OperationalError, connection
from django.test.utils import CaptureQueriesContext
from psycopg.errors import ReadOnlySqlTransaction

from django_amqp_events import conf, service_loop, signals
from django_amqp_events.archive import eligibility, replay, states, tables
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.exceptions import (
    BrokerUnavailableError,
    ConfigurationError,
    ExchangeMissingError,
    PublishError,
    PublishInterruptedError,
    PublishNackedError,
    PublishTimeoutError,
    UnroutableError,
)
from django_amqp_events.models import ArchivedEvent, Replay, State
from django_amqp_events.reasons import Reason
from django_amqp_events.testing import capture_events
from tests import archive_rows
from tests.archive_rows import NOW, Clock, again, build, make, seen
from tests.commands import run_command
from tests.doubles.broker import Broker
from tests.doubles.receivers import connected
from tests.services import BILLING, handling

# A replay works in the transaction of a TestCase, which is never committed.
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("broker")]


@pytest.fixture(autouse=True)
def billing(settings: Any) -> Any:
    slow = {"MAX_RETRIES": 2, "RETRY_BACKOFF": 400, "RETRY_BACKOFF_MAX": 400}
    settings.AMQP_EVENTS = {
        **BILLING,
        "MAX_BODY": 1000,
        "RENAMED_HANDLERS": {"older": "send_invoice", "old": "send_invoice"},
        "HANDLERS": {
            "send_invoice": handling("shop.order.created"),
            "slow": handling("shop.slow", **slow),
        },
    }
    return settings


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(replay, "time", made)
    monkeypatch.setattr(service_loop, "time", made)
    return made


def run(*rows: ArchivedEvent, **options: Any) -> replay.Report:
    return replay.replay(seen(*rows), by="ada", **options)


def why(report: replay.Report) -> Reason:
    (skipped,) = report.skipped
    return skipped.why


# -- who is taken -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"handler": "gone"}, Reason("unknown-handler", name="'gone'", old="gone")),
        (
            {"handler": "", "queue": "billing.other"},
            Reason("unknown-event", name="'shop.order.created'", queue="'billing.other'"),
        ),
        ({"service": "stock"}, Reason("other-service", service="'stock'")),
        ({"body_size": 1001}, Reason("body-too-large", size=1001, most=1000)),
        ({"reason": "malformed", "body": b"\xff"}, Reason("body-unreadable")),
        ({"state": State.QUEUED}, Reason("state", state=Reason("state-queued"))),
        ({"state": State.SUCCEEDED}, Reason("state", state=Reason("state-succeeded"))),
        ({"version": 8}, Reason("changed", state=Reason("state-archived"))),
    ],
)
def test_unreplayable_event_has_a_reason(
    broker: Broker, fields: dict[str, Any], reason: Reason
) -> None:
    row, other = make(1, **fields), make(2)
    before = again(row)
    wanted = {row.pk: 0, other.pk: 0}
    examined = eligibility.examine(wanted, eligibility.REPLAY)
    assert list(examined.events) == [other.pk]
    report = replay.replay(wanted, by="ada")
    assert report.skipped == examined.skipped
    assert why(report) == reason
    assert report.published == [other.pk], "one that cannot go keeps nobody"
    assert (again(row).version, again(row).state) == (before.version, before.state)
    assert len(broker.messages) == 1


def test_deleted_row_is_reported() -> None:
    nobody = uuid4()
    report = replay.replay({nobody: 0}, by="ada")
    assert (report.skipped[0].id, why(report)) == (nobody, Reason("deleted"))


def discarded(row: ArchivedEvent) -> None:
    states.discard(seen(row), by="bob", reason="by hand", now=NOW)


@pytest.mark.parametrize(
    ("faster", "reason"),
    [
        (discarded, Reason("changed", state=Reason("state-discarded"))),
        (ArchivedEvent.delete, Reason("deleted")),
    ],
)
def test_lost_race_is_reported(
    monkeypatch: pytest.MonkeyPatch, broker: Broker, faster: Callable[..., Any], reason: Reason
) -> None:
    """Between the selection and the claim."""
    row = make()
    claim = states.claim

    def late(*args: Any, **options: Any) -> Any:
        faster(again(row))
        return claim(*args, **options)

    monkeypatch.setattr(states, "claim", late)
    assert why(run(row)) == reason
    assert not broker.windows


# -- force --------------------------------------------------------------------------------


def replaying(minutes: float, **fields: Any) -> ArchivedEvent:
    return archive_rows.replaying(datetime.now(UTC) - timedelta(minutes=minutes), **fields)


def test_force_replays_only_overdue_events(broker: Broker) -> None:
    """A replay is overdue 15 minutes after its last retry."""
    fresh = replaying(10)
    waiting = replaying(20, handler="slow", name="shop.slow", queue="billing.slow")
    late = replaying(60)
    late_too = replaying(60, handler="slow", name="shop.slow", queue="billing.slow")
    archived = make()
    report = run(fresh, waiting, late, late_too, archived, force=True)
    assert report.published == sorted([late.pk, late_too.pk])
    assert {each.id for each in report.skipped} == {fresh.pk, waiting.pk, archived.pk}
    assert Reason("not-overdue") in [each.why for each in report.skipped if each.id == fresh.pk]
    ids = {message.headers["event-replay-id"] for message in broker.messages}
    assert ids == {str(r.pk) for r in Replay.objects.filter(number=2)}, "new replay ids"
    assert again(late).action_set.get().action == "force"


def test_resolve_discards_only_overdue_events() -> None:
    fresh, late, archived = replaying(1), replaying(60), make()
    gone, foreign = replaying(60, handler="gone"), replaying(60, service="stock")
    wanted = seen(fresh, late, archived, gone, foreign)
    report = replay.decide(wanted, eligibility.RESOLVE, by="ada", reason="booked by hand")
    resolved, skipped = report.published, report.skipped
    assert set(resolved) == {late.pk, gone.pk}
    assert {each.id for each in skipped} == {fresh.pk, archived.pk, foreign.pk}
    assert again(late).state == State.DISCARDED
    action = again(late).action_set.get()
    assert (action.action, action.reason) == ("resolve", "booked by hand")
    states.finish({again(late).replay_set.get().pk: NOW}, now=NOW)
    assert again(late).state == State.DISCARDED


# -- what the broker says -----------------------------------------------------------------


def away(kind: type[PublishError]) -> list[PublishError | None]:
    return [None, None, kind("no"), kind("no")]


def some(kind: type[PublishError]) -> list[PublishError | None]:
    return [kind("no"), kind("no"), None, None, BrokerUnavailableError("hm"), None]


@pytest.mark.parametrize(
    ("errors", "published", "returned"),
    [
        (away(BrokerUnavailableError), 2, 2),
        (away(ExchangeMissingError), 2, 2),
        (away(PublishTimeoutError), 2, 2),
        (away(PublishInterruptedError), 2, 2),
        # A queue that confirms nothing is waited for once.
        ([None, PublishTimeoutError("no")], 1, 1),
        # An error of some events does not keep the others.
        (some(UnroutableError), 3, 3),
        (some(PublishNackedError), 3, 3),
    ],
)
def test_unreachable_broker_leaves_the_rest_untouched(
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    errors: list[PublishError | None],
    published: int,
    returned: int,
) -> None:
    monkeypatch.setattr(replay, "CHUNK", 2)
    rows = [make(number) for number in range(6)]
    broker.errors = [*errors]
    report = run(*rows)
    assert (len(report.published), len(report.returned)) == (published, returned)
    assert report.done == published + returned
    assert str(report.stopped) == ("None" if report.done == 6 else "no")
    assert [again(row).version for row in rows[report.done :]] == [0] * (6 - report.done)


def test_unencodable_row_blocks_no_other(broker: Broker) -> None:
    odd, good = make(1, headers_raw=b"\x00\x00\xff\xff no table"), make(2)
    report = run(odd, good)
    assert report.published == [good.pk]
    assert "its message cannot be built" in str(report.returned[0].why)
    assert again(odd).state == State.ARCHIVED


# -- the database is unreachable -----------------------------------------------------------------


def during_a_failover(text: str) -> InternalError:
    """PostgreSQL's error in a read-only transaction."""
    error = InternalError(text)
    error.__cause__ = ReadOnlySqlTransaction(text)
    return error


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Make a function of the state machine raise, the first *times* times."""

    def make_flaky(
        name: str, times: int, exc: Callable[[str], Exception] = OperationalError
    ) -> list[int]:
        calls: list[int] = []
        real = getattr(states, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) <= times:
                raise exc("the server closed the connection")
            return real(*args, **options)

        monkeypatch.setattr(states, name, call)
        return calls

    return make_flaky


@pytest.mark.parametrize(
    ("function", "exc"),
    [
        ("published", OperationalError),
        ("published", InterfaceError),
        ("published", during_a_failover),
        ("returned", OperationalError),
    ],
)
def test_a_note_is_tried_again(
    flaky: Callable[..., list[int]],
    broker: Broker,
    clock: Clock,
    function: str,
    exc: Callable[[str], Exception],
) -> None:
    calls = flaky(function, 3, exc)
    row = make()
    if function == "returned":
        broker.answer = lambda _: UnroutableError("no")
    report = run(row)
    assert len(calls) == 4
    assert report.stopped is None
    assert again(row).state == (State.REPLAYING if function == "published" else State.ARCHIVED)
    assert 1 < clock.slept < 10, "a web request waits for this"


def test_unrecorded_publish_is_repeated(
    flaky: Callable[..., list[int]], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "CHUNK", 2)
    flaky("published", 4)
    rows = [make(number) for number in range(4)]
    report = run(*rows)
    assert len(report.published) == 2, "the broker has them"
    assert report.stopped is not None
    assert report.stopped.code == "database-unreachable"
    assert str(report.stopped.params["error"]).startswith("OperationalError")
    assert [again(row).state for row in rows] == ["queued", "queued", "archived", "archived"]
    assert replay.resume() == 0, "its time is not over"
    # PostgreSQL's clock stands still in the test's transaction.
    assert replay.resume(lease=-1) == 2
    assert [again(row).state for row in rows[:2]] == ["replaying", "replaying"]
    ids = [message.headers["event-replay-id"] for message in broker.messages]
    assert set(ids[:2]) == set(ids[2:]), "the same replay ids, in the order of the database"
    assert {found.publishes for found in Replay.objects.all()} == {2}


# -- resume -------------------------------------------------------------------------------


def left_queued(*rows: ArchivedEvent, handler: str = "send_invoice") -> None:
    states.claim(
        seen(*rows), handlers={row.pk: handler for row in rows}, by="ada", reason="", now=NOW
    )


def test_resume_publishes_all_in_bounded_portions(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "CHUNK", 3)
    rows = [make(number) for number in range(7)]
    left_queued(*rows)
    assert replay.resume() == 7
    assert [len(window) for window in broker.windows] == [3, 3, 1]
    monkeypatch.setattr(replay, "CHUNK_BYTES", 50)
    more = [make(number) for number in range(10, 15)]
    left_queued(*more)
    broker.windows.clear()
    assert replay.resume() == 5
    assert [len(window) for window in broker.windows] == [2, 2, 1]


def test_resume_releases_events_without_a_handler(broker: Broker) -> None:
    row, renamed = make(1), make(2)
    left_queued(row, handler="gone")
    left_queued(renamed, handler="older")
    assert replay.resume() == 1
    now = again(row)
    assert (now.state, now.error) == (State.ARCHIVED, Reason("handler-missing", name="'gone'"))
    assert now.unconfirmed, "it may have been published before its process died"
    assert broker.messages[0].headers["event-handler"] == "send_invoice"


def test_resume_that_finds_no_broker_keeps_the_replay_id(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That this try was in vain says nothing about the one of the process that died."""
    monkeypatch.setattr(replay, "CHUNK", 2)
    rows = [make(number) for number in range(4)]
    left_queued(*rows)
    broker.answer = lambda _: BrokerUnavailableError("no")
    assert replay.resume() == 0
    assert len(broker.windows) == 1, "it does not go on where the broker is away"
    back = [row for row in map(again, rows) if row.state == State.ARCHIVED]
    assert [row.unconfirmed for row in back] == [True, True]
    broker.answer = lambda message: None
    run(*back)
    assert Replay.objects.count() == 4


# -- how much -----------------------------------------------------------------------------


def test_bodies_are_read_chunk_by_chunk(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than CHUNK_BYTES of them at a time, and none before the claim."""
    monkeypatch.setattr(replay, "CHUNK_BYTES", 2000)
    rows = [make(number, body=b'[[],{"x":"%s"},{}]' % (b"x" * 600)) for number in range(10)]
    with CaptureQueriesContext(connection) as captured:
        eligibility.examine(seen(*rows), eligibility.REPLAY)
    assert not [query for query in captured if '"body"' in query["sql"]]
    run(*rows)
    sizes = [sum(len(message.body) for message in window) for window in broker.windows]
    assert max(sizes) <= 2000
    assert len(broker.messages) == 10


# -- where it cannot be done --------------------------------------------------------------


def test_a_limit_takes_the_oldest_of_many_ids() -> None:
    """The ids of one statement are ordered by the database, all of them are not."""
    rows = [build(number, at=NOW - timedelta(seconds=number)) for number in range(501)]
    ArchivedEvent.objects.bulk_create(rows)
    ids = [row.event_id for row in rows]
    code, _, _ = run_command("events_replay", *ids, "--limit", "2", "--discard", "--comment", "old")
    assert code == 0
    discarded = ArchivedEvent.objects.filter(state=State.DISCARDED)
    assert set(discarded.values_list("event_id", flat=True)) == {"order-499", "order-500"}


def test_a_backend_without_a_broker_is_refused(billing: Any) -> None:
    """Its outcome would never arrive."""
    row = make()
    for backend in ("memory", "inline"):
        billing.AMQP_EVENTS = {**billing.AMQP_EVENTS, "BACKEND": backend}
        with pytest.raises(ConfigurationError, match="to be 'amqp'"):
            run(row)
    assert again(row).state == State.ARCHIVED
    with capture_events():
        assert run(row).published == [row.pk], "the backend of the block publishes it"


def test_the_lease_is_longer_than_a_publish_may_take() -> None:
    row = make()
    left_queued(row)
    confirm = conf.get_settings().confirm_timeout
    ArchivedEvent.objects.update(state_since=datetime.now(UTC) - timedelta(seconds=3 * confirm))
    assert replay.resume() == 0


@pytest.mark.parametrize(
    ("name", "handler"),
    [("old", "send_invoice"), ("older", "slow"), ("slow", "slow"), ("", "slow"), ("nobody", None)],
)
def test_a_replay_is_overdue_after_the_retries_of_its_handler(
    settings: Any, monkeypatch: pytest.MonkeyPatch, name: str, handler: str | None
) -> None:
    monkeypatch.setattr(tables, "clock", lambda: NOW)
    settings.AMQP_EVENTS["RENAMED_HANDLERS"] |= {"older": "slow"}
    limit = eligibility.patience(*([get_registry().handlers[handler]] if handler else []))
    ages = [limit - timedelta(seconds=1), limit]
    row, late = (
        make(number, State.REPLAYING, handler=name, queue="billing.slow", state_since=NOW - age)
        for number, age in enumerate(ages)
    )
    # Only its own service knows the retries of its handlers.
    other = make(99, State.REPLAYING, handler=name, service="other", state_since=NOW - limit)
    assert set(ArchivedEvent.objects.filter(eligibility.overdue(NOW))) == {late}
    assert [eligibility.is_overdue(each) for each in (row, late, other)] == [False, True, False]


def test_receivers_run_when_all_answers_are_recorded(broker: Broker) -> None:
    """They may outlast the lease: another process would publish again what is still queued."""
    left: list[int] = []

    def hear(**_: Any) -> None:
        left.append(Replay.objects.filter(state=Replay.State.QUEUED).count())

    broker.errors = [UnroutableError("no"), None, PublishNackedError("no"), None]
    with connected(hear, signals.event_replayed):
        report = run(*(make(number) for number in range(4)))
    assert (len(report.published), left) == (2, [0, 0])
