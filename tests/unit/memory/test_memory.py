"""The in-memory broker and the backends on it, as far as the contract does not say it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import IntegrityError, transaction

from django_amqp_events import (
    ConfigurationError,
    current_event,
    event,
    handler,
    publish_event,
    signals,
)
from django_amqp_events.conf import get_settings
from django_amqp_events.memory import (
    InlineBackend,
    MemoryBackend,
)
from django_amqp_events.memory import backend as memory_backend
from django_amqp_events.memory.backend import EndlessEventsError
from django_amqp_events.publish import publisher
from django_amqp_events.publish.publisher import Options
from django_amqp_events.testing import memory_events, override_events
from tests.doubles.receivers import connected
from tests.integration.wire import in_threads
from tests.waiting import Stopwatch

START = datetime(2026, 1, 1, tzinfo=UTC)
NOW = Options(mode="immediate")


# -- handlers on it -----------------------------------------------------------------------


@pytest.fixture
def declared() -> Iterator[None]:
    """Declarations of a test are forgotten after it."""
    with override_events(handlers=[], events=[], PUBLISH="immediate"):
        yield


@pytest.fixture
def broker(declared: None) -> Iterator[MemoryBackend]:
    with memory_events(START) as backend:
        yield backend


def test_nearly_due_message_is_held(broker: MemoryBackend) -> None:
    """It has no delay queue of its own; a worker holds it for as long, and here the time passes."""
    runs = []

    @handler("a.b", name="t.x", bind=True)
    def x(self: Any) -> None:
        runs.append((broker.now() - START).total_seconds())
        if len(runs) == 1:
            self.retry(countdown=1.0625)

    publish_event("a.b", {})
    broker.advance(0.9375)
    assert len(runs) == 1
    broker.advance(0.0625)
    assert runs == [0, 1.0625]
    assert broker.now() == START + timedelta(seconds=1.0625)


def test_pending_messages_can_be_inspected(broker: MemoryBackend) -> None:
    @handler("a.b", name="t.x")
    def x(number: int) -> None:
        raise ValueError("bad number")

    publish_event("a.b", {"number": 3})
    assert broker.depths == {"testing.t.x": 1}
    broker.run()
    (waits,) = broker.waiting
    assert waits.exception == "ValueError: bad number"
    assert waits.payload == {"number": 3}
    assert broker.depths == {"testing:delay.1s": 1}
    broker.clear()
    assert broker.waiting == []
    assert broker.advance(10) == 0


def test_handlers_that_publish_without_end_are_found_out(broker: MemoryBackend) -> None:
    @handler("a.b", name="t.x")
    def x() -> None:
        publish_event("a.b", {})

    publish_event("a.b", {})
    with pytest.raises(EndlessEventsError, match="50 deliveries"):
        broker.run(limit=50)


def test_signals_are_sent_as_by_a_worker(broker: MemoryBackend) -> None:
    seen: list[tuple[str, Any]] = []

    def on_retry(handler: str, due_at: datetime, **kwargs: Any) -> None:
        seen.append((handler, (due_at - START).total_seconds()))

    def on_archive(handler: str, reason: str, exception: str, **kwargs: Any) -> None:
        seen.append((handler, (reason, exception)))

    @handler("a.b", name="t.x", max_retries=1)
    def x() -> None:
        raise ValueError("no")

    with (
        connected(on_retry, signals.event_retried),
        connected(on_archive, signals.event_archived),
    ):
        publish_event("a.b", {})
        broker.advance(1)
    assert seen == [("t.x", 1.0), ("t.x", ("exhausted", "ValueError: no"))]


def test_a_receiver_that_ends_the_process_runs_no_event_again(broker: MemoryBackend) -> None:
    """As in a worker, whose settlement has a thread of its own."""
    runs: list[str] = []

    @handler("a.b", name="t.bad", max_retries=0)
    def bad() -> None:
        runs.append("bad")
        raise ValueError

    def leave(**_: Any) -> None:
        raise SystemExit(3)

    publish_event("a.b", {})
    with connected(leave, signals.event_archived):
        broker.run()
    broker.run()
    assert (len(runs), len(broker.archived)) == (1, 1)


def test_threads_publish_and_run_together(broker: MemoryBackend) -> None:
    runs: list[int] = []

    @handler("a.b", name="t.x", max_retries=1)
    def x(number: int) -> None:
        runs.append(number)
        if number % 10 == 0:
            raise ValueError

    def work(part: int) -> None:
        for number in range(50 * part, 50 * part + 50):
            publish_event("a.b", {"number": number})
        broker.run()

    assert not in_threads(4, work)
    broker.run()
    assert sorted(runs) == list(range(200))
    broker.advance(1)
    assert len(runs) == 220
    assert len(broker.archived) == 20


# -- inline -------------------------------------------------------------------------------


@pytest.fixture
def inline(declared: None) -> Iterator[InlineBackend]:
    with override_events(BACKEND="inline"):
        backend = publisher.backend(get_settings())
        assert isinstance(backend, InlineBackend)
        yield backend
        backend.failed.clear()


def test_inline_runs_handlers_and_retries_immediately(inline: InlineBackend) -> None:
    runs: list[tuple[str, int, float | None]] = []

    def note(name: str) -> None:
        current = current_event()
        assert current is not None
        assert current.published_at is not None
        due_at = current.due_at
        waited = round((due_at - current.published_at).total_seconds(), 1) if due_at else None
        runs.append((name, current.attempt, waited))

    @handler("a.b", name="t.good")
    def good() -> None:
        note("good")

    @handler("a.b", name="t.bad", max_retries=2)
    def bad() -> None:
        note("bad")
        raise ValueError("no")

    watch = Stopwatch()
    publish_event("a.b", {"number": 1})
    # 1 s and 2 s later, had it waited.
    assert runs == [("good", 1, None), ("bad", 1, None), ("bad", 2, 1.0), ("bad", 3, 3.0)]
    assert watch.seconds < 1
    (failed,) = inline.failed
    assert (failed.reason, failed.handler, failed.attempts) == ("exhausted", "t.bad", 3)
    assert failed.payload == {"number": 1}


def test_inline_an_event_of_a_handler_is_handled_after_it(inline: InlineBackend) -> None:
    order = []

    @handler("a.b", name="t.first")
    def first() -> None:
        order.append("first begins")
        publish_event("a.c", {})
        order.append("first ends")

    @handler("a.c", name="t.second")
    def second() -> None:
        current = current_event()
        assert current is not None
        order.append(f"second, because of {current.causation_id}")

    event_id = publish_event("a.b", {})
    assert order == ["first begins", "first ends", f"second, because of {event_id}"]


def test_inline_stops_endless_events(
    inline: InlineBackend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_backend, "INLINE_RUN_LIMIT", 30)
    runs = []

    @handler("a.b", name="t.loop")
    def loop() -> None:
        runs.append(1)
        publish_event("a.b", {})

    @handler("a.c", name="t.retries", max_retries=None)
    def retries() -> None:
        runs.append(1)
        raise ValueError

    publish_event("a.b", {})
    assert len(runs) == 30
    runs.clear()
    publish_event("a.c", {})
    assert len(runs) == 30
    stopped = [r for r in caplog.records if "inline events stopped" in r.getMessage()]
    assert len(stopped) == 2


@pytest.mark.django_db(transaction=True)
def test_inline_database_error_keeps_the_publishers_transaction(
    inline: InlineBackend,
) -> None:
    @handler("a.b", name="t.x", max_retries=0)
    def x() -> None:
        Group.objects.create(name="same")

    with transaction.atomic():
        Group.objects.create(name="same")
        publish_event("a.b", {}, options=NOW)
        Group.objects.create(name="other")
    assert Group.objects.count() == 2
    assert inline.failed[-1].exception == (f"{IntegrityError.__module__}.IntegrityError")


def test_inline_async_handlers_and_async_publishers(inline: InlineBackend) -> None:
    runs: list[Any] = []

    @event("a.b")
    def happened(number: int) -> None: ...

    @happened.handler(name="t.async", max_retries=1)
    async def x(number: int) -> None:
        await asyncio.sleep(0)
        current = current_event()
        assert current is not None
        runs.append(("async", number, current.attempt))
        if current.attempt == 1:
            raise ValueError

    @happened.handler(name="t.sync")
    def y(number: int) -> None:
        runs.append(("sync", number))

    expected = {("async", 1, 1), ("async", 1, 2), ("sync", 1)}

    # From synchronous code.
    happened.publish(1)
    assert set(runs) == expected
    runs.clear()

    # From an async view.
    async def view() -> None:
        await happened.using(mode="immediate").apublish(1)

    async def adapted_view() -> None:
        await sync_to_async(happened.publish)(1)

    for call in (view, adapted_view):
        asyncio.run(call())
        assert set(runs) == expected, call
        assert len(runs) == 3
        runs.clear()
    with pytest.raises(ConfigurationError, match=r"apublish\(\)"):
        asyncio.run(_publish_in_a_loop(number=1))


def test_inline_lets_a_keyboard_interrupt_through(inline: InlineBackend) -> None:
    @handler("a.b", name="t.x")
    def x() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_event("a.b", {})


async def _publish_in_a_loop(**payload: int) -> None:
    publish_event("a.b", payload)


# -- past events -----------------------------------------------------------------------------------


KEY = "shop.order.created"


@pytest.fixture
def history() -> Any:
    with override_events(HISTORY={"MAX_AGE": "14d"}, PUBLISH="immediate", handlers=[], events=[]):
        yield


def test_a_new_handler_gets_what_its_queue_missed_and_again_everything(history: None) -> None:
    seen: list[int] = []
    with memory_events() as broker:
        publish_event(KEY, {"number": 1})
        publish_event("shop.stock.low", {"number": 9})

        @handler(KEY, name="shop.late")
        def late(number: int) -> None:
            event = current_event()
            assert event is not None
            seen.append(number if event.replay_id else -number)

        publish_event(KEY, {"number": 2})
        assert sum(broker.depths.values()) == 1
        assert broker.backfill("shop.late") == 1
        broker.run()
        assert sorted(seen) == [-2, 1]
        assert broker.backfill("shop.late") == 0
        assert broker.backfill("shop.late", again=True) == 2
        assert broker.backfill("shop.late", "shop.stock.*", again=True) == 0
        broker.run()
        assert sorted(seen) == [-2, 1, 1, 2]


def test_what_is_missing_is_named(history: None) -> None:
    with memory_events() as broker:
        with pytest.raises(ConfigurationError, match="there is no handler 'nobody'"):
            broker.backfill("nobody")
        with (
            override_events(HISTORY=None),
            pytest.raises(ConfigurationError, match="set AMQP_EVENTS"),
        ):
            broker.backfill("nobody")
