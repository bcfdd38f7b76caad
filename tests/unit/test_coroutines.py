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
from asgiref.current_thread_executor import CurrentThreadExecutor
from asgiref.sync import sync_to_async
from celery.exceptions import SoftTimeLimitExceeded

from django_amqp_events import coroutines, signals
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


async def gathers() -> None:
    await asyncio.gather(waits(), waits())


async def starts_a_task() -> None:
    task = asyncio.create_task(cleans_up())
    await waits()
    await task


async def cleans_up() -> None:
    try:
        await asyncio.sleep(LONG)
    finally:
        await asyncio.sleep(0.05)
        await sync_to_async(record)("cleaned up")


async def blocks_this_thread() -> None:
    await sync_to_async(time.sleep)(LONG)


async def blocks_a_thread() -> None:
    def block() -> None:
        time.sleep(5 * LIMIT)
        effects.append("the thread")

    await asyncio.to_thread(block)


async def handles_it() -> str:
    with suppress(asyncio.CancelledError):
        await waits()
    return "handled"


async def handles_it_in_this_thread() -> str:
    with suppress(SoftTimeLimitExceeded):
        await blocks_this_thread()
    return "handled"


async def fails() -> None:
    try:
        await waits()
    except asyncio.CancelledError:
        raise ValueError("no") from None


@pytest.mark.parametrize(
    ("work", "result", "before"),
    [
        (waits, SoftTimeLimitExceeded, []),
        (gathers, SoftTimeLimitExceeded, []),
        (cleans_up, SoftTimeLimitExceeded, ["cleaned up"]),
        (starts_a_task, SoftTimeLimitExceeded, ["cleaned up"]),
        (blocks_this_thread, SoftTimeLimitExceeded, []),
        (blocks_a_thread, SoftTimeLimitExceeded, ["the thread"]),
        (handles_it, "handled", []),
        (handles_it_in_this_thread, "handled", []),
        (fails, ValueError, []),
    ],
)
def test_it_has_ended_before_the_interruption_is_raised(
    work: Callable[[], Awaitable[Any]], result: Any, before: list[str],
    interrupted: Callable[[BaseException], None],
) -> None:  # fmt: skip
    ended = threading.Event()

    async def watched() -> Any:
        try:
            return await work()
        finally:
            ended.set()

    interrupted(SoftTimeLimitExceeded())
    if isinstance(result, str):
        assert wait_for(watched()) == result
    else:
        with pytest.raises(result):
            wait_for(watched())
    assert ended.is_set()
    assert effects == before


def test_the_end_of_the_process_waits_for_the_coroutine_but_not_for_its_threads(
    interrupted: Callable[[BaseException], None],
) -> None:
    release = threading.Event()

    async def work() -> None:
        try:
            await asyncio.to_thread(release.wait, LONG)
        finally:
            await sync_to_async(record)("cleaned up")

    interrupted(SystemExit(-241))
    try:
        with pytest.raises(SystemExit):
            wait_for(work())
        assert effects == ["cleaned up"]
    finally:
        release.set()


@pytest.mark.parametrize("moment", ["before its thread", "before its loop", "when it has ended"])
def test_an_interruption_at_either_end(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has not begun never does, and a result is not lost."""
    interrupted = threading.Event()
    threads: list[threading.Thread] = []

    class Interrupted(CurrentThreadExecutor):
        def run_until_future(self, future: Any) -> None:
            if not interrupted.is_set():
                if moment == "when it has ended":
                    super().run_until_future(future)
                interrupted.set()
                raise SoftTimeLimitExceeded
            super().run_until_future(future)

    class Late(threading.Thread):
        def start(self) -> None:
            if moment == "before its thread":
                raise SoftTimeLimitExceeded
            threads.append(self)
            super().start()

        def run(self) -> None:
            if moment == "before its loop":
                assert interrupted.wait(LONG)
            super().run()

    async def work() -> str:
        effects.append("ran")
        return "done"

    monkeypatch.setattr(coroutines, "CurrentThreadExecutor", Interrupted)
    monkeypatch.setattr(coroutines, "Thread", Late)
    if moment == "when it has ended":
        assert wait_for(work()) == "done"
        return
    with pytest.raises(SoftTimeLimitExceeded):
        wait_for(work())
    for thread in threads:
        thread.join(LONG)
    assert effects == []


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
