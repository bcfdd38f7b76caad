"""A coroutine whose waiting thread is interrupted, as by a soft time limit, has ended before."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from celery.exceptions import SoftTimeLimitExceeded

from django_amqp_events import signals
from django_amqp_events.coroutines import wait_for
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
