"""Tools for users' tests: capturing, other settings and declarations, fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import product
from typing import Any
from uuid import UUID

import pytest
from celery import Task
from django.conf import settings as django_settings
from django.contrib.auth.models import Group
from django.db import transaction
from django.test import SimpleTestCase, TestCase, override_settings

from django_amqp_events import (
    ConfigurationError,
    event,
    handler,
    publish_event,
    publish_many,
)
from django_amqp_events.conf import get_settings
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.publish import publisher
from django_amqp_events.publish.publisher import Options
from django_amqp_events.testing import (
    capture_events,
    memory_events,
    override_events,
)

NOW = Options(mode="immediate")
ON_COMMIT = Options(mode="on_commit")


@pytest.fixture(autouse=True)
def no_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever would reach a broker fails, and declarations of a test are forgotten."""

    def reached(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a broker was reached")

    monkeypatch.setattr(publisher.AmqpBackend, "publish", reached)
    with override_events(handlers=[], events=[]):
        yield


class Undone(Exception):
    """Rolls a transaction back."""


@contextmanager
def rolled_back() -> Iterator[None]:
    """A transaction that does not end well."""
    with suppress(Undone), transaction.atomic():
        yield
        raise Undone


# -- capture_events -----------------------------------------------------------------------


def test_a_captured_event() -> None:
    payload = {
        "number": 1,
        "total": Decimal("9.90"),
        "day": date(2026, 1, 2),
        "key": UUID(int=1),
        "list": (1, None),
    }
    options = Options(
        mode="immediate",
        event_id="e-1",
        correlation_id="c-1",
        causation_id="d-1",
        headers={"tenant": "x"},
    )
    before = datetime.now(UTC)
    with capture_events() as events:
        assert publish_event("shop.order.created", payload, options=options) == "e-1"
        found = events.one()
    assert found.name == "shop.order.created"
    assert found.payload == {
        "number": 1,
        "total": "9.90",
        "day": "2026-01-02",
        "key": "00000000-0000-0000-0000-000000000001",
        "list": [1, None],
    }
    assert (found.event_id, found.correlation_id, found.causation_id) == ("e-1", "c-1", "d-1")
    assert (found.mode, found.headers) == ("immediate", {"tenant": "x"})
    assert found.published_at is not None
    assert before <= found.published_at <= datetime.now(UTC)


def test_the_captured_events_are_a_sequence() -> None:
    declared = event("a.c")(lambda n: None)
    with capture_events() as events:
        assert not events
        assert events == []
        publish_many("a.b", [{"n": 1}, {"n": 2}], options=NOW)
        declared.using(mode="immediate").publish(3)
    assert len(events) == 3
    assert events.one(declared).payload == {"n": 3}
    assert events.names == ["a.b", "a.b", "a.c"]
    assert [item.payload for item in events[:2]] == [{"n": 1}, {"n": 2}]
    assert events[-1].name == "a.c"
    assert events[-1] in events
    assert repr(events) == "<captured events: a.b, a.b, a.c>"
    assert [item.name for item in events.named("a.*")] == ["a.b", "a.b", "a.c"]
    assert len(events.named("a.b")) == 2
    assert events.named("nothing") == []
    with pytest.raises(AssertionError, match=r"2 events named 'a\.b'.*captured: a\.b, a\.b, a\.c"):
        events.one("a.b")
    with pytest.raises(AssertionError, match=r"0 events named 'x'"):
        events.one("x")
    events.clear()
    assert events.names == []
    assert repr(events) == "<captured events: none>"


def test_the_inner_of_two_blocks_captures() -> None:
    with capture_events() as outer:
        publish_event("a.first", {}, options=NOW)
        with capture_events() as inner:
            publish_event("a.second", {}, options=NOW)
        publish_event("a.third", {}, options=NOW)
    assert (outer.names, inner.names) == (["a.first", "a.third"], ["a.second"])


class CaptureInsideTestCase(TestCase):
    """Django's TestCase: the commit never comes."""

    def test_rolled_back_event_was_not_published(self) -> None:
        with capture_events() as events:
            with transaction.atomic():
                publish_event("a.committed", {}, options=ON_COMMIT)
            with rolled_back():
                publish_event("a.outer", {}, options=ON_COMMIT)
                with transaction.atomic():
                    publish_event("a.inner", {}, options=ON_COMMIT)
                publish_event("a.immediate", {}, options=NOW)
                assert "a.inner" in events.names
            assert "a.inner" not in events.names
            with transaction.atomic():
                publish_event("a.kept", {}, options=ON_COMMIT)
                with rolled_back():
                    publish_event("a.lost", {}, options=ON_COMMIT)
        assert events.names == ["a.committed", "a.immediate", "a.kept"]

    def test_callbacks_executed_after_the_block_reach_no_broker(self) -> None:
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            with capture_events() as events:
                publish_event("a.b", {}, options=ON_COMMIT)
            assert events.names == ["a.b"]
        assert len(callbacks) == 1
        assert events.names == ["a.b"]

    def test_callbacks_that_publish(self) -> None:
        with capture_events() as events:
            with self.captureOnCommitCallbacks(execute=True):
                transaction.on_commit(lambda: publish_event("a.late", {}, options=ON_COMMIT))
                publish_event("a.b", {}, options=ON_COMMIT)
            assert sorted(events.names) == ["a.b", "a.late"]
        assert sorted(events.names) == ["a.b", "a.late"]

    def test_events_of_before_the_block_are_not_in_it(self) -> None:
        with capture_events():
            publish_event("a.setup", {}, options=ON_COMMIT)
        with capture_events() as events:
            publish_event("a.b", {}, options=ON_COMMIT)
        assert events.names == ["a.b"]

    async def test_async_code(self) -> None:
        @event("a.b")
        def happened() -> None: ...

        with capture_events() as events:
            first = await happened.using(mode="on_commit").apublish()
            second = await happened.using(mode="immediate").apublish()
            assert [item.event_id for item in events] == [first, second]
        assert [item.mode for item in events] == ["on_commit", "immediate"]


# -- memory_events ------------------------------------------------------------------------


class MemoryInsideTestCase(TestCase):
    """run() publishes what only TestCase holds back."""

    def setUp(self) -> None:
        self.seen = seen = []  # type: list[Any]

        @handler("a.#", name="t.x")
        def x(**payload: Any) -> None:
            seen.append(payload)
            if payload.get("again"):
                with transaction.atomic(durable=True):
                    Group.objects.create(name="made by a handler")
                    publish_event("a.again", {}, options=ON_COMMIT)

    def test_test_case_commit_releases_events(self) -> None:
        with memory_events() as broker:
            publish_event("a.b", {"n": 1}, options=ON_COMMIT)
            with transaction.atomic():
                publish_event("a.b", {"n": 2}, options=ON_COMMIT)
                assert broker.run() == 1  # the test's own transaction is not through
            assert broker.run() == 1
            with rolled_back():
                publish_event("a.b", {"n": 3}, options=ON_COMMIT)
            assert broker.run() == 0
        assert self.seen == [{"n": 1}, {"n": 2}]

    def test_the_backend_of_a_whole_suite_too(self) -> None:
        with override_events(BACKEND="memory"):
            publish_event("a.b", {"n": 1})
            with override_settings(DEBUG=True):
                publish_event("a.b", {"n": 2}, options=NOW)
            backend: Any = publisher.backend(get_settings())
            assert backend.run() == 2
        assert self.seen == [{"n": 2}, {"n": 1}]

    def test_callbacks_are_not_executed_twice(self) -> None:
        with memory_events() as broker:
            with self.captureOnCommitCallbacks(execute=True):
                publish_event("a.b", {"n": 1}, options=ON_COMMIT)
                assert broker.run() == 1
            with self.captureOnCommitCallbacks(execute=True):
                publish_event("a.b", {"n": 2}, options=ON_COMMIT)
            assert broker.run() == 1
        assert self.seen == [{"n": 1}, {"n": 2}]

    def test_events_published_by_handlers_are_captured(self) -> None:
        with memory_events() as broker:
            publish_event("a.b", {"again": 1}, options=NOW)
            with capture_events() as events:
                assert broker.run() == 1
        assert events.names == ["a.again"]

    def test_callbacks_are_those_of_their_block(self) -> None:
        for backend, mode in product(("inline", "memory"), (ON_COMMIT, Options(mode="outbox"))):
            with self.subTest(backend=backend, mode=mode), override_events(BACKEND=backend):
                self.seen.clear()
                publish_event("a.before", {"n": 1}, options=mode)
                for n in (2, 3):
                    with self.captureOnCommitCallbacks(execute=True):
                        publish_event("a.b", {"n": n}, options=mode)
                        publish_event("a.b", {"n": 10 * n}, options=mode)
                if backend == "memory":
                    memory: Any = publisher.backend(get_settings())
                    assert list(memory.depths.values()) == [4]
                    memory.clear()
                else:
                    assert [payload["n"] for payload in self.seen] == [2, 20, 3, 30]


# -- override_events ----------------------------------------------------------------------


def test_keys_go_over_the_setting_and_back() -> None:
    before = get_settings()
    with override_events(UNROUTED="raise", DEFAULTS={"MAX_RETRIES": 1}):
        assert get_settings().unrouted == "raise"
        assert get_settings().service == before.service
        with override_events(UNROUTED="ignore"):
            assert get_settings().unrouted == "ignore"
            assert get_settings().defaults == {"max_retries": 1}
        assert get_settings().unrouted == "raise"
    assert get_settings().unrouted == "warn"
    assert django_settings.AMQP_EVENTS == {
        "SERVICE": "testing",
        "HANDLERS": {},
        "EVENTS": {},
    }


def test_a_choice_of_handlers_and_events() -> None:
    @event("a.b")
    def happened(number: int) -> None: ...

    @event("a.c")
    def other(number: int) -> None: ...

    @happened.handler(name="t.function")
    def function(number: int) -> None: ...

    @handler("a.#", name="t.task")
    class TaskClass(Task):
        def run(self, number: int) -> None: ...

    @handler("a.#")
    def unnamed(number: int) -> None: ...

    settings = {
        "t.settings": {"EVENTS": ["a.b"], "HANDLER": f"{__name__}.at_the_top"},
        "t.function": {"MAX_RETRIES": 3},
        "t.other": {"EVENTS": ["a.b"], "HANDLER": f"{__name__}.at_the_top"},
    }
    with override_events(HANDLERS=settings):
        for given, expected in (
            ([function], {"t.function"}),
            ([TaskClass, "t.settings"], {"t.task", "t.settings"}),
            ([unnamed, "t.function"], {unnamed.name, "t.function"}),
            ([], set()),
        ):
            with override_events(handlers=given):
                assert set(get_registry().handlers) == expected
        with override_events(handlers=[function]):
            assert get_registry().handlers["t.function"].policy.max_retries == 3
        with override_events(events=[happened]):
            assert set(get_registry().events) == {"a.b"}
        with override_events(events=["a.c"], handlers=["t.task"]):
            assert set(get_registry().events) == {"a.c"}
            assert set(get_registry().handlers) == {"t.task"}
        assert len(get_registry().handlers) == 5


def at_the_top(number: int) -> None: ...


def test_unknown_names_and_lower_case_keys() -> None:
    with pytest.raises(ConfigurationError, match=r"handlers=….*t\.missing"):
        override_events(handlers=["t.missing"]).enable()
    with pytest.raises(ConfigurationError, match=r"events=….*a\.missing"):
        override_events(events=["a.missing"]).enable()
    with override_events(unrouted="raise"), pytest.raises(ConfigurationError, match="'UNROUTED'"):
        get_settings()
    assert get_settings().unrouted == "warn"


def test_as_a_decorator_of_async_functions() -> None:
    @override_events(UNROUTED="ignore")
    async def work() -> str:
        return get_settings().unrouted

    assert asyncio.run(work()) == "ignore"
    assert get_settings().unrouted == "warn"


@override_events(UNROUTED="raise")
class OverriddenClass(SimpleTestCase):
    def test_the_class(self) -> None:
        assert get_settings().unrouted == "raise"

    @override_events(UNROUTED="ignore")
    def test_the_method_is_nearer(self) -> None:
        assert get_settings().unrouted == "ignore"
