"""Running a handler in the pool: what Celery's tracer does not decide."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import os
import pickle
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded
from billiard.pool import SIG_SOFT_TIMEOUT, soft_timeout_sighandler
from celery import Celery, Task, signals
from celery.app import trace
from celery.backends.filesystem import FilesystemBackend
from celery.exceptions import Reject, Retry, WorkerShutdown
from django.db import connection, transaction

from django_amqp_events.context import ReceivedEvent
from django_amqp_events.declare.registry import Handler
from django_amqp_events.declare.retry_policy import RetryPolicy
from django_amqp_events.exceptions import DirectCallError
from django_amqp_events.message.archive_message import MAX_TRACEBACK
from django_amqp_events.models import InboxEntry
from django_amqp_events.worker import task as task_module
from django_amqp_events.worker.binding import bind
from django_amqp_events.worker.celery_internals import hear_soft_limit
from django_amqp_events.worker.task import (
    HandlerTask,
    _EventTask,
    new_task,
    register,
    task_class,
    utc_now,
)
from django_amqp_events.worker.tracing import trace as traced
from django_amqp_events.worker.verdict import (
    REQUEUE,
    InvalidArguments,
    Verdict,
    decide,
    describe,
)
from tests.doubles.receivers import connected

calls: list[int] = []


def count(order_id: int) -> None:
    calls.append(order_id)


HANDLER = Handler(
    name="shop.count",
    key="shop.shop.count",
    queue="shop.shop.count",
    patterns=("shop.order.created",),
    target=count,
    ignore_result=False,
)


class PersistentBackend(FilesystemBackend):
    persistent = True
    down = False

    def set(self, *args: Any) -> Any:
        self._fail_if_down()
        return super().set(*args)

    def get(self, *args: Any) -> Any:
        self._fail_if_down()
        return super().get(*args)

    def process_cleanup(self) -> None:
        self._fail_if_down()

    def _fail_if_down(self) -> None:
        if self.down:
            raise ConnectionError("the result store is down")


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    calls.clear()
    app = Celery("deduplicating", set_as_current=False)
    app.conf.update(
        result_backend=f"{__name__}:PersistentBackend+file://{tmp_path}",
        worker_deduplicate_successful_tasks=True,
    )
    app.set_current()
    register(app, {HANDLER.name: HANDLER})
    yield app
    app.close()
    Celery("nobody").set_current()


class Observed(Task):
    """It writes down which hooks are called."""

    def run(self, how: str, **payload: object) -> object:
        self.update_state(state="PROGRESS")
        ran.append("run")
        if how == "unencodable":
            return object()
        if how == "retry":
            self.retry(countdown=50)
        if how == "archive":
            raise ZeroDivisionError
        return how

    def _hook(self, name: str, *args: Any) -> None:
        ran.append(name)

    on_success = functools.partialmethod(_hook, "on_success")
    on_failure = functools.partialmethod(_hook, "on_failure")
    on_retry = functools.partialmethod(_hook, "on_retry")
    before_start = functools.partialmethod(_hook, "before_start")
    after_return = functools.partialmethod(_hook, "after_return")


@pytest.mark.parametrize("ignore_result", [True, False])
@pytest.mark.parametrize("how", ["handled", "retry", "archive", "unencodable"])
def test_the_result_store_decides_nothing(app: Celery, how: str, ignore_result: bool) -> None:
    """Whether it is up, down, or says that the event was handled; with every write of Celery's."""
    app.conf.update(task_track_started=True, result_extended=True)
    sent = {
        name: functools.partial(lambda name, **_: ran.append(name), name)
        for name in ("task_prerun", "task_postrun", "task_success", "task_failure", "task_retry",
                     "task_internal_error")
    }  # fmt: skip
    for name, hear in sent.items():
        getattr(signals, name).connect(hear, weak=False)
    try:
        seen = []
        for down, redelivered in itertools.product([False, True], [False, True]):
            PersistentBackend.down = down
            options: dict[str, Any] = {
                "ignore_result": ignore_result,
                "policy": RetryPolicy(max_retries=5, dont_autoretry_for=(ZeroDivisionError,)),
            }
            verdict = verdict_of(app, Observed, {"how": how}, redelivered=redelivered, **options)
            seen.append((verdict.kind, verdict.reason, [*ran]))
    finally:
        PersistentBackend.down = False
        for name, hear in sent.items():
            getattr(signals, name).disconnect(hear)
    assert seen == seen[:1] * 4
    kind, _, called = seen[0]
    assert kind == ("handled" if how == "unencodable" else how)
    ending = {"retry": "retry", "archive": "failure"}.get(how, "success")
    assert {"run", f"task_{ending}", f"on_{ending}"} < set(called)
    assert "task_internal_error" not in called


def test_a_handler_is_not_run_like_a_task(app: Celery) -> None:
    task = app.tasks[HANDLER.name]
    for call in (task.delay, task.apply_async, task.s(order_id=1).apply_async):
        with pytest.raises(DirectCallError, match="Publish its event"):
            call()
    assert task(order_id=3) is None
    assert calls == [3]
    # What decides a verdict, and whether a result is stored, is the handler's.
    other = Celery("annotating", set_as_current=False)
    other.conf.task_annotations = {"*": {"max_retries": 0, "ignore_result": True, "priority": 7}}
    annotated = new_task(other, HANDLER)
    annotated.bind(other)
    assert annotated.priority == 7
    assert (annotated.max_retries, annotated.ignore_result) == (HANDLER.policy.max_retries, False)


ran: list[object] = []


class Slow(Task):
    async def run(self, **payload: object) -> None:
        ran.append(payload)


def behind_a_decorator(**payload: object) -> object:
    return Slow.run(Slow(), **payload)


def generator(**payload: object) -> Iterator[None]:
    ran.append(payload)
    yield


def verdict_of(
    app: Celery,
    target: Any,
    payload: dict[str, Any],
    *,
    redelivered: bool = False,
    error: BaseException | None = None,
    **options: Any,
) -> Verdict:
    """Run a handler in the tracer, as a pool does, with the same task id for each call."""
    fields = {name: getattr(HANDLER, name) for name in HANDLER.__slots__}
    handler = Handler(**{**fields, "name": "shop.other", "target": target, **options})
    ran.clear()
    register(app, {handler.name: handler})
    request: dict[str, Any] = {
        "id": "4f0e0e0c-6d4a-5d0e-8a51-8f3f8a2f2d11",
        "task": handler.name,
        "amqp_event": ReceivedEvent(id="1", name="shop.order.created"),
        "args": [],
        "kwargs": payload,
        "delivery_info": {"redelivered": redelivered},
        "ignore_result": handler.ignore_result,
        "hostname": "worker@here",
    }
    return traced(app.tasks[handler.name], request, now=utc_now, error=error, observed=False)


def test_an_event_whose_process_was_ended_has_a_verdict_and_its_hooks(app: Celery) -> None:
    """The handler does not run again to get them."""
    heard: list[Any] = []

    def hear(exception: Any, **_: Any) -> None:
        heard.append(exception)

    policy = RetryPolicy(max_retries=0)
    with connected(hear, signals.task_failure):
        verdict = verdict_of(
            app, Observed, {"how": "ok"}, error=TimeLimitExceeded(3), policy=policy
        )
    assert (verdict.kind, verdict.reason) == ("archive", "exhausted")
    assert verdict.failure is not None
    assert verdict.failure.exception == "billiard.exceptions.TimeLimitExceeded"
    assert [repr(error) for error in heard] == ["TimeLimitExceeded(3)"]
    assert ran == ["before_start", "on_failure", "after_return"]


@pytest.mark.parametrize("countdown", [-1, 0.5, float("nan"), 1e12, float("inf")])
def test_a_delay_that_is_impossible(app: Celery, countdown: float) -> None:
    def impatient(self: Task, **payload: object) -> None:
        self.retry(countdown=countdown)

    verdict = verdict_of(app, impatient, {}, bind=True)
    assert verdict.kind == "retry"
    assert verdict.failure is not None
    assert "a delay is at least 1 s, and at most ten years" in verdict.failure.message


class Hasty(Task):
    """It asks for a retry before it runs, without a current event."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.retry(countdown=50)

    def run(self, **payload: object) -> None:
        ran.append(payload)


@pytest.mark.parametrize("ignore_result", [True, False])
def test_a_retry_that_is_asked_for_before_the_run(app: Celery, ignore_result: bool) -> None:
    verdict = verdict_of(app, Hasty, {}, ignore_result=ignore_result)
    assert verdict.kind == "retry"
    assert verdict.due_at is not None
    assert verdict.due_at - datetime.now(UTC) > timedelta(seconds=40)
    assert not ran


@pytest.mark.parametrize("target", [Slow, behind_a_decorator, functools.partial(Slow.run, Slow())])
def test_a_coroutine_that_does_not_show_is_run_before_it_counts(app: Celery, target: Any) -> None:
    assert verdict_of(app, target, {"order_id": 7}).kind == "handled"
    assert ran == [{"order_id": 7}]


def test_a_generator_does_not_count_as_handled(app: Celery) -> None:
    verdict = verdict_of(app, generator, {})
    assert (verdict.kind, verdict.reason) == ("archive", "unsupported")
    assert not ran


def leaving(**payload: object) -> None:
    raise WorkerShutdown(3)


def test_a_handler_that_ends_its_process_leaves_no_event_of_a_thread_open(app: Celery) -> None:
    """Celery's thread pool drops the exception, after which no other pool has a process."""
    assert verdict_of(app, leaving, {}) is REQUEUE


# -- binding


def keywords(order_id: int, note: str = "", *, sent: float = 0.0) -> None: ...
def everything(order_id: int, **more: Any) -> None: ...
def positional(order_id: int, /, note: str = "") -> None: ...
def optional_positional(order_id: int = 0, /, note: str = "") -> None: ...
def variable(*args: Any, note: str) -> None: ...


PAYLOADS: tuple[dict[str, Any], ...] = (
    {},
    {"order_id": 5},
    {"note": "n"},
    {"order_id": 5, "note": "n", "sent": 1.5},
    {"order_id": 5, "surplus": 1, "self": 2, "args": 3, "more": 4},
)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "target", [keywords, everything, positional, optional_positional, variable, count]
)
def test_a_payload_is_bound_as_the_signature_says(target: Any, strict: bool) -> None:
    handler = Handler(
        name="shop.h", key="k", queue="q", patterns=("a.b",), target=target, strict=strict
    )
    signature = inspect.signature(target)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for args, payload in itertools.product([(), (5,), (5, 6, 7)], PAYLOADS):
        kept = {
            key: value
            for key, value in payload.items()
            if strict or takes_all or key in signature.parameters
        }
        try:
            signature.bind(*args, **kept)
        except TypeError as exc:
            with pytest.raises(InvalidArguments, match=re.escape(str(exc))):
                bind(handler, args, payload)
        else:
            assert bind(handler, args, payload) == (args, kept)
            target(*args, **kept)


def test_an_event_travels_to_a_pool_process() -> None:
    event = ReceivedEvent(
        id="e",
        name="shop.order.created",
        service="shop",
        published_at=datetime.now(UTC),
        due_at=datetime.now(UTC),
        attempt=3,
        replay_id="r",
        replay_forced=True,
        correlation_id="c",
        causation_id="d",
        subject="s",
        extensions={"tenant": "t"},
        headers={"traceparent": "00"},
    )
    assert all(getattr(event, name) for name in event.__slots__), "a loss would not be noticed"
    assert pickle.loads(pickle.dumps(event, protocol=5)) == event  # noqa: S301 - made here
    assert copy.deepcopy(event) == event


# -- the user's class -------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*vars(HandlerTask), *vars(_EventTask)}))
def test_the_users_class_keeps_its_names(app: Celery, name: str) -> None:
    """Ours are Celery's own, which ours call, or begin with ``amqp_``."""
    if not name.startswith(("__", "amqp_", "_abc")):
        task = task_class(HANDLER)()
        setattr(task, name, "theirs")
        assert name == "backend" or getattr(task, name) == "theirs"
    celerys = name.startswith("__") or hasattr(Task, name)
    if name in vars(_EventTask):
        assert celerys or name.startswith("amqp_")
        return
    own = type("Own", (Task,), {"run": lambda _: None, name: lambda _: "theirs"})
    fields = {key: getattr(HANDLER, key) for key in HANDLER.__slots__}
    made = task_class(Handler(**{**fields, "name": "shop.own", "target": own}))
    if not name.startswith(("__", "amqp_", "abstract")):
        assert getattr(made, name)(made) == "theirs"


class Base(Task):
    """What a project's tasks have in common."""

    handler = event = _call = _handle = _failed = _span = _stored = _run = run_of = "theirs"

    def retry(self, *args: Any, **options: Any) -> Any:
        ran.append("retry")
        return super().retry(*args, **options)


class BySuper(Base):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ran.append("before")
        try:
            return super().__call__(*args, **kwargs)
        finally:
            ran.append("after")


class ByRun(Base):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ran.append("before")
        try:
            return self.run(*args, **kwargs)
        finally:
            ran.append("after")


class Twice(BySuper):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("base", [BySuper, ByRun, Twice])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize(
    ("how", "kind"), [("return", "handled"), ("raise", "retry"), ("retry", "retry")]
)
def test_a_base_class_is_called_as_by_celery(
    app: Celery, base: type[Task], is_async: bool, protected: bool, how: str, kind: str
) -> None:
    """In a pool process, Celery protects the stack of requests."""

    def work(self: Task, order_id: int) -> None:
        assert self.request.amqp_event.id == "1"
        assert (self.event, self._call, self.handler) == ("theirs",) * 3
        ran.append(f"run {order_id}")
        if how == "raise":
            raise ValueError("no")
        if how == "retry":
            self.retry(countdown=60)

    async def later(self: Task, order_id: int) -> None:
        work(self, order_id)

    target = type("Target", (base,), {"run": later if is_async else work})
    if protected:
        trace._install_stack_protection()
    try:
        verdict = verdict_of(app, target, {"order_id": 5})
    finally:
        if protected:
            trace.reset_worker_optimizations(app)
    assert verdict.kind == kind
    expected = ["before", "run 5", *(["retry"] if how == "retry" else []), "after"]
    assert Counter(ran) == Counter(expected)
    assert is_async or ran == expected
    if how == "retry":
        assert verdict.due_at is not None
        assert (verdict.due_at - datetime.now(UTC)).total_seconds() > 50


# -- a soft time limit that comes late -----------------------------------------------------------


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("where", ["handler", "check", "before commit", "after commit", "span"])
def test_a_run_that_has_ended_is_handled(
    app: Celery, monkeypatch: pytest.MonkeyPatch, where: str, once: bool
) -> None:
    """With ``once``, if its transaction is committed."""

    def limit(*_: Any, **__: Any) -> Any:
        raise SoftTimeLimitExceeded

    def work() -> None:
        if where == "handler":
            limit()

    commit: Any = connection._commit  # type: ignore[attr-defined]

    def late() -> None:
        commit()
        limit()

    if where == "check":
        monkeypatch.setattr(transaction, "get_rollback", limit)
    elif where == "before commit":
        monkeypatch.setattr(connection, "_commit", limit)
    elif where == "after commit":
        monkeypatch.setattr(connection, "_commit", late)
    elif where == "span":
        stack = contextlib.ExitStack()
        stack.callback(limit)
        monkeypatch.setattr(task_module, "_span", lambda *_: stack)
    verdict = verdict_of(app, work, {}, once=once, policy=RetryPolicy(max_retries=0))
    monkeypatch.undo()
    committed = InboxEntry.objects.exists()
    if where != "before commit":  # SQLite commits when Django switches autocommit on
        assert committed == (once and where in ("after commit", "span"))
    ended = committed if once else where != "handler"
    assert (verdict.kind == "handled") is ended


def test_a_late_soft_time_limit_is_of_no_run(app: Celery) -> None:
    """Behind the run, its verdict would be lost; the next one has its own limit."""

    def limit() -> None:
        os.kill(os.getpid(), SIG_SOFT_TIMEOUT)

    before = signal.signal(SIG_SOFT_TIMEOUT, soft_timeout_sighandler)
    try:
        for _ in range(2):
            assert verdict_of(app, calls.clear, {}).kind == "handled"
            limit()
            verdict = verdict_of(app, limit, {}, policy=RetryPolicy(max_retries=0))
            assert verdict.failure is not None
            assert verdict.failure.exception.endswith("SoftTimeLimitExceeded")
    finally:
        hear_soft_limit()
        signal.signal(SIG_SOFT_TIMEOUT, before)


@dataclass(frozen=True)
class OutOfStock(Exception):
    sku: str = "A-1"


def raise_frozen() -> None:
    raise OutOfStock


async def raise_frozen_async() -> None:
    raise OutOfStock


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("target", [raise_frozen, raise_frozen_async])
def test_an_exception_that_accepts_no_attribute_stays_itself(
    app: Celery, target: Any, once: bool
) -> None:
    """Such as a frozen dataclass; contextlib would assign its traceback."""
    verdict = verdict_of(app, target, {}, once=once, policy=RetryPolicy(max_retries=0))
    assert verdict.failure is not None
    assert verdict.failure.exception == f"{__name__}.OutOfStock"


# -- the text of an exception ----------------------------------------------------------------------


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def raised(exc: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise exc from cause
    except type(exc) as caught:
        return caught


@pytest.mark.parametrize(
    "exc",
    [raised(Retry(), ValueError("never raised")), raised(Reject(ValueError("never raised")))],
    ids=["retry(exc=…)", "Reject(…)"],
)
def test_unraised_exception_gets_the_carriers_location(
    exc: BaseException,
) -> None:
    verdict = decide(exc, RetryPolicy(max_retries=0), attempt=1, now=NOW, random=0.5)
    assert verdict.failure is not None
    assert verdict.failure.exception == "ValueError"
    assert [frame["function"] for frame in verdict.failure.frames] == ["raised"]
    assert "in raised" in verdict.failure.traceback


def test_a_long_message_does_not_push_the_frames_out() -> None:
    failure = describe(raised(ValueError("x" * 1_000_000)))
    assert failure.traceback.startswith("Traceback")
    assert "in raised" in failure.traceback
    assert len(failure.traceback) <= MAX_TRACEBACK
