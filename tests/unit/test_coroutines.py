"""Coroutines that are interrupted have ended before; what ran nothing counts as done nowhere."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from celery.exceptions import SoftTimeLimitExceeded

from django_amqp_events import ConfigurationError, checks, event, signals
from django_amqp_events.archive.redaction import redact
from django_amqp_events.callables import deferred, unrun
from django_amqp_events.coroutines import wait_for
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.publish import publisher
from django_amqp_events.reasons import Reason
from tests.doubles.receivers import connected

#: Seconds until the interruption, and longer than the test waits for an end.
LIMIT, LONG = 0.1, 30.0

effects: list[str] = []


@pytest.fixture(autouse=True)
def _no_effects() -> None:
    effects.clear()


@pytest.fixture
def interrupted() -> Iterator[Callable[..., None]]:
    """Let a signal raise an exception in this thread, as billiard does for a soft time limit."""
    before = signal.getsignal(signal.SIGALRM)

    def arm(exc: BaseException, seconds: float = LIMIT) -> None:
        def strike(*_: Any) -> None:
            raise exc

        signal.signal(signal.SIGALRM, strike)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def record(effect: str) -> None:
    """Record an effect, and that it is in the thread of the handler."""
    assert threading.current_thread() is threading.main_thread()
    effects.append(effect)


async def waits() -> None:
    await asyncio.sleep(LONG)


async def starts_a_task() -> None:
    task = asyncio.create_task(cleans_up())
    try:
        await waits()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def cleans_up() -> None:
    try:
        await asyncio.sleep(LONG)
    finally:
        await asyncio.sleep(0.05)
        effects.append("cleaned up")


async def blocks_this_thread() -> None:
    await sync_to_async(time.sleep)(LONG)


async def calls_this_thread() -> None:
    try:
        await waits()
    finally:
        await sync_to_async(record)("cleaned up")


async def handles_it() -> None:
    with suppress(asyncio.CancelledError):
        await waits()
    effects.append("handled")


@pytest.mark.parametrize(
    ("work", "before"),
    [
        (waits, []),
        (cleans_up, ["cleaned up"]),
        (starts_a_task, ["cleaned up"]),
        (blocks_this_thread, []),
        (calls_this_thread, ["cleaned up"]),
        (handles_it, ["handled"]),
    ],
)
@pytest.mark.parametrize("exc", [SoftTimeLimitExceeded(), SystemExit(-241)])
def test_it_has_ended_before_the_interruption_is_raised(
    work: Callable[[], Awaitable[Any]], before: list[str], exc: BaseException,
    interrupted: Callable[[BaseException], None],
) -> None:  # fmt: skip
    interrupted(exc)
    with pytest.raises(type(exc)):
        wait_for(work())
    assert effects == before


def test_results_errors_and_synchronous_functions() -> None:
    async def work(error: Exception | None) -> str:
        await sync_to_async(record)("here")
        if error:
            raise error
        return "done"

    assert wait_for(work(None)) == "done"
    with pytest.raises(ValueError, match="no"):
        wait_for(work(ValueError("no")))
    assert effects == ["here", "here"]


def test_all_receivers_of_a_signal_run(interrupted: Callable[..., None]) -> None:
    def blocks(**_: Any) -> None:
        try:
            time.sleep(LONG)
        finally:
            record("cleaned up")

    def ordinary(**_: Any) -> None:
        record("ordinary")

    with connected(blocks, signals.event_skipped), connected(ordinary, signals.event_skipped):
        interrupted(SoftTimeLimitExceeded(), 10 * LIMIT)
        with pytest.raises(SoftTimeLimitExceeded):
            signals.event_skipped.send_robust("shop")
    assert effects == ["cleaned up", "ordinary"]


# -- every kind of callable ------------------------------------------------------------------------


ran: list[str] = []


def plain(*args: Any, **kwargs: Any) -> None:
    ran.append("plain")


async def coroutine(*args: Any, **kwargs: Any) -> None:
    ran.append("coroutine")


def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    ran.append("generator")
    yield


async def stream(*args: Any, **kwargs: Any) -> Any:
    ran.append("stream")
    yield


class AsyncCall:
    async def __call__(self, *args: Any, **kwargs: Any) -> None:
        ran.append("object")


@wraps(coroutine)
def hidden(*args: Any, **kwargs: Any) -> Any:
    """Only the result shows it: a user's decorator around an async function."""
    return coroutine(*args, **kwargs)


def hidden_generator(*args: Any, **kwargs: Any) -> Any:
    return generator(*args, **kwargs)


async_object = AsyncCall()
async_partial = partial(async_object, 1)
KINDS = (
    "coroutine", "generator", "stream", "async_object", "async_partial", "hidden",
    "hidden_generator",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(settings: Any) -> None:
    settings.AMQP_EVENTS = {
        "SERVICE": "shop", "AUTODISCOVER": [], "PUBLISH": "immediate", "BACKEND": "memory",
    }  # fmt: skip
    ran.clear()


def as_contract(kind: str, settings: Any) -> None:
    event("shop.order.created")(globals()[kind])(order_id=1)


def as_contract_in_settings(kind: str, settings: Any) -> None:
    events = {"shop.paid": {"CONTRACT": f"{__name__}.{kind}"}}
    settings.AMQP_EVENTS = {**settings.AMQP_EVENTS, "EVENTS": events}
    publisher.publish_event("shop.paid", {"order_id": 1})


def as_redaction(kind: str, settings: Any) -> None:
    settings.AMQP_EVENTS = {**settings.AMQP_EVENTS, "REDACT": f"{__name__}.{kind}"}
    if isinstance(redact("shop.paid", {"order_id": 1}), Reason):
        raise ConfigurationError
    checks.check()


@pytest.mark.parametrize("place", [as_contract, as_contract_in_settings, as_redaction])
@pytest.mark.parametrize("kind", KINDS)
def test_what_would_not_run_is_refused(kind: str, place: Any, settings: Any) -> None:
    with pytest.raises(ConfigurationError):
        place(kind, settings)
    assert ran == []


def test_an_async_receiver_does_not_fail_a_publisher_in_an_event_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The event is published by then."""

    async def publish() -> None:
        publisher.publish_event("shop.paid", {"order_id": 1})

    with connected(coroutine, signals.event_unrouted):
        asyncio.run(publish())
        assert "publish with apublish()" in caplog.text
        publisher.publish_event("shop.paid", {"order_id": 1})
    assert ran == ["coroutine"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "hidden" not in kind])
def test_the_registry_and_decorators_refuse_them(kind: str, settings: Any) -> None:
    target = globals()[kind]
    newer = event("shop.order.paid.v2")(plain)
    with pytest.raises(ConfigurationError, match="is not an ordinary function"):
        newer.upcast_from("shop.order.paid")(target)
    if deferred(target) == "a generator":  # async handlers are awaited
        handlers = {"shop.pay": {"EVENTS": ["shop.order.paid"], "HANDLER": f"{__name__}.{kind}"}}
        settings.AMQP_EVENTS = {**settings.AMQP_EVENTS, "HANDLERS": handlers}
        with pytest.raises(ConfigurationError, match="is a generator"):
            get_registry()


@pytest.mark.django_db
def test_what_runs_is_accepted(settings: Any) -> None:
    wrapped = async_to_sync(coroutine)
    for target in (plain, wrapped, partial(plain, 1), dict):
        assert deferred(target) == ""
    as_contract("plain", settings)
    assert ran == ["plain"]
    assert unrun(object()) == unrun(None) == ""
