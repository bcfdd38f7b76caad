"""The thread that publishes for verdicts; workers have the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Task
from celery import signals as celery_signals
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool

from django_amqp_events import signals
from django_amqp_events.exceptions import BrokerUnavailableError, PublishError
from django_amqp_events.message.types import Message, Received
from django_amqp_events.worker import outgoing, settlement
from django_amqp_events.worker.dispatch import Delivery
from django_amqp_events.worker.settlement import Settler
from django_amqp_events.worker.task import HandlerTask
from django_amqp_events.worker.verdict import HANDLED, REQUEUE, Verdict
from tests.waiting import until

MESSAGE = Message(exchange="", routing_key="", body=b"", headers={}, properties={})


class Channel:
    """Confirms what it publishes, or answers with an error."""

    def __init__(self, error: PublishError | None = None) -> None:
        self.published: list[Message] = []
        self.error = error

    def publish(self, messages: Sequence[Message], **_: Any) -> list[PublishError | None]:
        self.published += messages
        return [self.error] * len(messages)

    def reopen(self) -> None: ...

    def close(self) -> None: ...


class Acks:
    ahead = 8

    def __init__(self) -> None:
        self.acked: list[Any] = []
        self.requeued: list[Any] = []
        self.error: Exception | None = None
        self.writing, self.may_write = threading.Event(), threading.Event()
        self.may_write.set()

    def ack(self, messages: Sequence[Any]) -> None:
        self.writing.set()
        assert self.may_write.wait(30)
        if self.error is not None:
            raise self.error
        self.acked += messages

    def reject(self, message: Any) -> None:
        self.requeued.append(message)


def fail(*_: object, **__: object) -> None:
    raise LookupError("no such field")


def leave(**_: object) -> None:
    raise SystemExit(3)


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Channel:
    made = Channel()
    monkeypatch.setattr(settlement, "ConfirmChannel", lambda *_, **__: made)
    return made


def settling(acks: Acks, build: Callable[..., Any] = lambda *_: MESSAGE) -> Settler:
    known = {"service": "billing", "confirm_timeout": 1, "consumer_timeout": 1800}
    made: Any = SimpleNamespace(settings=SimpleNamespace(**known), build=build)
    return Settler(app=None, outgoing=made, acks=acks, call_soon=bool)  # type: ignore[arg-type]


def delivery(*, redelivered: bool = False) -> Delivery:
    received = Received(
        queue="q", exchange="events", routing_key="a.b", body=b"", headers={}, properties={},
        redelivered=redelivered,
    )  # fmt: skip
    message: Any = SimpleNamespace(channel=SimpleNamespace(connection=object()))
    return Delivery(received=received, message=message)


@pytest.mark.parametrize("logs", [True, False])
def test_an_unreachable_broker_is_tried_once_for_all_that_is_held(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, logs: bool
) -> None:
    """Whether a filter of logging raises or not."""
    if not logs:
        monkeypatch.setattr(settlement.logger, "filter", fail)
    channel.error = BrokerUnavailableError("down")
    settler = settling(Acks())
    jobs = [settlement.Job(delivery(), None, MESSAGE, failures=1) for _ in range(3)]
    settler._publish(jobs)
    assert len(channel.published) == 1
    assert list(settler._jobs) == jobs
    assert [job.failures for job in jobs] == [2] * 3


@pytest.mark.parametrize("broken", ["logging", "all logging", "signal"])
def test_an_error_after_the_confirm_settles_nothing_again(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A second ack would close the channel, and a second publish double the event."""
    if broken != "signal":
        monkeypatch.setattr(outgoing.logger, "filter", fail)
    if broken == "all logging":
        monkeypatch.setattr(settlement.logger, "filter", fail)
    if broken == "signal":
        signals.event_archived.connect(leave)
    acks = Acks()
    settler = settling(acks)
    try:
        for _ in range(2):
            settler.settle(delivery(), Verdict(kind="archive", reason="malformed"))
        assert settler.drain(5)
    finally:
        signals.event_archived.disconnect(leave)
    assert len(channel.published) == len(acks.acked) == 2
    assert not settler._jobs


def test_an_event_whose_message_cannot_be_built_is_requeued() -> None:
    """Unsettled, it would occupy the prefetch count until the worker ends."""
    acks, bad = Acks(), delivery()
    settler = settling(acks, fail)
    settler.settle(bad, Verdict(kind="archive", reason="malformed"))
    settler.flush()
    assert (acks.acked, acks.requeued) == ([], [bad.message])


def test_a_stop_waits_for_a_publish(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in the queue of jobs any more, and RabbitMQ has not confirmed yet."""
    publishing, confirmed = threading.Event(), threading.Event()

    def publish(messages: Sequence[Message], **_: Any) -> list[None]:
        publishing.set()
        assert confirmed.wait(30)
        return [None] * len(messages)

    monkeypatch.setattr(channel, "publish", publish)
    acks, archived = Acks(), delivery()
    settler = settling(acks)
    settler.settle(archived, Verdict(kind="archive", reason="malformed"))
    assert publishing.wait(30)
    with ThreadPoolExecutor(1) as threads:
        drained = threads.submit(settler.drain, 30)
        with pytest.raises(TimeoutError):
            drained.result(0.3)
        confirmed.set()
        assert drained.result(30)
    assert acks.acked == [archived.message]


def test_a_stop_waits_for_acks_that_another_thread_writes() -> None:
    """Celery's timer thread may run a flush when the main thread is about to close the channel."""
    acks, handled = Acks(), delivery()
    acks.may_write.clear()
    settler = settling(acks, lambda *_: None)
    settler.settle(handled, HANDLED)
    timer = threading.Thread(target=settler.flush)
    timer.start()
    assert acks.writing.wait(30)
    main = threading.Thread(target=settler.drain, args=(5,))
    main.start()
    main.join(0.2)
    assert main.is_alive()
    acks.may_write.set()
    main.join(30)
    timer.join(30)
    assert acks.acked == [handled.message]


@pytest.mark.parametrize(
    ("quick", "redelivered", "ahead"),
    [
        (quick, redelivered, ahead)
        for quick in (False, True)
        for redelivered in (False, True)
        for ahead in (0, Acks.ahead)
        if (quick, redelivered, ahead) != (True, False, Acks.ahead)
    ],
)
def test_a_thread_waits_until_its_event_is_acked(
    monkeypatch: pytest.MonkeyPatch, quick: bool, redelivered: bool, ahead: int
) -> None:
    """Its next run may kill the worker, and this event would run again."""
    monkeypatch.setattr(settlement, "SETTLE_TIMEOUT", 600)
    acks, handled = Acks(), delivery(redelivered=redelivered)
    acks.ahead = ahead
    acks.may_write.clear()
    settler = settling(acks, lambda *_: None)
    settler.runs_in(object.__new__(ThreadPool))
    settler.settle(handled, HANDLED)
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(settler.wait_for, handled, quick=quick)
        flush = threads.submit(settler.flush)
        assert acks.writing.wait(30)
        with pytest.raises(TimeoutError):
            waits.result(0.2)
        acks.may_write.set()
        waits.result(30)
        flush.result(30)
    assert acks.acked == [handled.message]


@pytest.mark.parametrize("message", [None, MESSAGE])
def test_only_what_publishes_nothing_may_wait_for_its_ack(
    message: Message | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry, or the outcome of a replay, would be published again if the event ran again."""
    settler = settling(Acks(), lambda *_: message)
    monkeypatch.setattr(settler, "_add", bool)
    handled = delivery()
    assert settler.settle(handled, HANDLED) is (message is None)
    assert settler.settle(handled, HANDLED) is False, "it has a verdict"
    assert settler.settle(delivery(), REQUEUE) is False


def test_the_main_thread_does_not_wait_for_its_own_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It settles what is revoked before a run."""
    monkeypatch.setattr(settlement, "SETTLE_TIMEOUT", 600)
    acks, revoked = Acks(), delivery()
    settler = settling(acks, lambda *_: None)
    settler.runs_in(object.__new__(ThreadPool))
    settler.settle(revoked, HANDLED)
    settler.wait_for(revoked, quick=False)
    settler.flush()
    assert acks.acked == [revoked.message]


def test_a_thread_goes_on_after_a_few_quick_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads there are: each has its own."""
    monkeypatch.setattr(settlement, "SETTLE_TIMEOUT", 600)
    acks = Acks()
    settler = settling(acks, lambda *_: None)
    settler.runs_in(object.__new__(ThreadPool))

    def run(thread: ThreadPoolExecutor) -> Future[None]:
        handled = delivery()
        settler.settle(handled, HANDLED)
        return thread.submit(settler.wait_for, handled, quick=True)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for _ in range(Acks.ahead):
            run(one).result(30)
        waits = run(one)
        run(other).result(30)
        with pytest.raises(TimeoutError):
            waits.result(0.2)
        settler.flush()
        waits.result(30)
        for _ in range(Acks.ahead):
            run(one).result(30)
    assert len(acks.acked) == Acks.ahead + 2


@pytest.mark.parametrize("redelivered", [False, True])
def test_a_thread_acks_before_it_runs_a_redelivered_event(
    redelivered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have ended a worker before."""
    monkeypatch.setattr(settlement, "SETTLE_TIMEOUT", 600)
    settler = settling(Acks(), lambda *_: None)
    settler.runs_in(object.__new__(ThreadPool))
    handled = delivery()
    settler.settle(handled, HANDLED)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(settler.wait_for, handled, quick=True).result(30)
        waits = thread.submit(settler.catch_up, delivery(redelivered=redelivered))
        if redelivered:
            with pytest.raises(TimeoutError):
                waits.result(0.2)
            settler.flush()
        waits.result(30)


@pytest.mark.parametrize("ahead", [0, Acks.ahead])
@pytest.mark.parametrize("redelivered", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_a_solo_worker_acks_before_it_goes_on(
    quick: bool, redelivered: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but a few quick new events, and these too if the next is not new, or a task."""
    monkeypatch.setattr(settlement, "QUICK", 600)
    for following, waits in (
        (delivery(), True),
        (delivery(redelivered=True), False),
        (None, False),
    ):
        acks, handled = Acks(), delivery(redelivered=redelivered)
        acks.ahead = ahead
        settler = settling(acks, lambda *_: None)
        settler.runs_in(object.__new__(SoloPool))
        settler.settle(handled, HANDLED)
        settler.wait_for(handled, quick=quick)
        left = quick and not redelivered and ahead > 0
        assert bool(acks.acked) is not left
        settler.catch_up(following)
        assert bool(acks.acked) is not (left and waits)


def test_a_solo_worker_leaves_no_more_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlement, "QUICK", 600)
    acks = Acks()
    settler = settling(acks, lambda *_: None)
    settler.runs_in(object.__new__(SoloPool))
    for number in range(3 * acks.ahead):
        handled = delivery()
        settler.catch_up(handled)
        settler.settle(handled, HANDLED)
        settler.wait_for(handled, quick=True)
        assert number + 1 - len(acks.acked) <= acks.ahead


@pytest.mark.parametrize("build", [lambda *_: None, lambda *_: MESSAGE], ids=["ack", "retry"])
def test_a_solo_worker_acks_what_had_no_run(build: Callable[..., Any], channel: Channel) -> None:
    """Such as a malformed message, whose copy in the archive would double."""
    acks, malformed = Acks(), delivery()
    settler = settling(acks, build)
    settler.runs_in(object.__new__(SoloPool))
    settler.settle(malformed, HANDLED)
    settler.catch_up(delivery())
    assert acks.acked == [malformed.message]


def test_a_long_run_of_a_solo_worker_acks_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the run, when the main thread does not use the connection; also after an error."""
    monkeypatch.setattr(settlement, "QUICK", 0.0)
    acks = Acks()
    settler = settling(acks, lambda *_: None)
    settler.runs_in(object.__new__(SoloPool))
    acks.error = OSError("the connection is lost")
    for number in range(3):
        handled = delivery()
        settler.settle(handled, HANDLED)
        settler.wait_for(handled, quick=True)
        settler.catch_up(delivery())
        settler._left.set()  # by a run that has ended
        assert not acks.writing.wait(0.05)
        with settler.running():
            assert acks.writing.wait(30)
            settler.catch_up()  # the handler calls a task
        until(lambda: not settler._open, "the ack is written, or its error has been handled")
        assert len(acks.acked) == number
        acks.error = None
        acks.writing.clear()


def test_a_solo_worker_acks_a_retry_that_is_confirmed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run may end the worker, and the retry would double."""
    monkeypatch.setattr(settlement, "SETTLE_TIMEOUT", 0.02)
    acks, retried = Acks(), delivery()
    settler = settling(acks, lambda *_: None)
    settler.runs_in(object.__new__(SoloPool))
    settler._open.add(retried)
    settler.wait_for(retried, quick=False)
    assert not acks.acked
    settler._answer(retried, ack=True)
    settler.catch_up(delivery())
    assert acks.acked == [retried.message]


def test_a_task_within_a_run_waits_for_no_ack(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the thread that acks late writes, it has the lock that the main thread had."""
    monkeypatch.setattr(settlement, "QUICK", 0.0)
    monkeypatch.setattr(settlement, "SETTLE_TIMEOUT", 600)
    acks, handled, retried = Acks(), delivery(), delivery()
    settler = settling(acks, lambda *_: None)
    settler.runs_in(object.__new__(SoloPool))
    settler.settle(handled, HANDLED)
    settler._open.add(retried)
    acks.may_write.clear()
    with settler.running():
        assert acks.writing.wait(30)
        celery_signals.task_prerun.send(sender=object.__new__(Task))
        acks.may_write.set()
    settler._close(retried)


@pytest.mark.parametrize("elsewhere", ["process", "thread"])
def test_only_the_worker_itself_acks_before_a_task(
    elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a child or a thread of a task, which calls another: the worker uses the connection."""
    monkeypatch.setattr(settlement, "QUICK", 600)
    acks, handled = Acks(), delivery()
    settler = settling(acks, lambda *_: None)
    settler.runs_in(object.__new__(SoloPool))
    settler.settle(handled, HANDLED)
    settler.wait_for(handled, quick=True)
    what = "os.getpid" if elsewhere == "process" else "threading.get_ident"
    with monkeypatch.context() as there:
        there.setattr(f"django_amqp_events.worker.settlement.{what}", lambda: -1)
        celery_signals.task_prerun.send(sender=object.__new__(Task))
    assert not acks.acked
    celery_signals.task_prerun.send(sender=object.__new__(Task))
    assert acks.acked == [handled.message]


@pytest.mark.parametrize("in_run", [False, True])
@pytest.mark.parametrize("of", ["task", "handler"])
def test_a_solo_worker_acks_before_a_task(
    of: str, in_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take an hour, and of which the thread that acks later does not know."""
    monkeypatch.setattr(settlement, "QUICK", 600)
    acks, handled = Acks(), delivery()
    settler = settling(acks, lambda *_: None)
    settler.runs_in(object.__new__(SoloPool))
    settler.settle(handled, HANDLED)
    settler.wait_for(handled, quick=True)
    sender = object.__new__(HandlerTask if of == "handler" else Task)
    with settler.running() if in_run else nullcontext():
        celery_signals.task_prerun.send(sender=sender)
    assert bool(acks.acked) is (of == "task" and not in_run)


def test_a_solo_worker_goes_on_as_soon_as_a_retry_is_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settlement, "SETTLE_TIMEOUT", 600)
    acks, retried = Acks(), delivery()
    settler = settling(acks)
    settler.runs_in(object.__new__(SoloPool))
    settler._open.add(retried)
    with ThreadPoolExecutor(1) as threads:
        solo = threads.submit(settler.catch_up)
        with pytest.raises(TimeoutError):
            solo.result(0.2)
        settler._answer(retried, ack=True)
        try:
            solo.result(30)
        finally:
            settler._close(retried)
    assert acks.acked == [retried.message]
