"""What wakes an event loop: a signal that stops a worker, unless it is the second, and threads."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu.asynchronous import Hub

from django_amqp_events.worker.stop_signals import SIGNALS, StopSignals
from django_amqp_events.worker.wakeup import Wakeup


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What Celery's handlers and the event loop hear."""
    told: list[str] = []
    former = {number: signal.signal(number, lambda *_: told.append("celery")) for number in SIGNALS}
    yield told
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture(params=SIGNALS)
def send(request: pytest.FixtureRequest) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), request.param)


def stop_signals(heard: list[str]) -> StopSignals:
    made = StopSignals(lambda: heard.append("wake"))
    made.install()
    return made


def test_the_first_waits_for_the_loop(heard: list[str], send: Callable[[], None]) -> None:
    made = stop_signals(heard)
    send()
    assert heard == ["wake"]
    assert made.waiting
    made.deliver()
    made.deliver()
    assert heard == ["wake", "celery"]


def test_the_second_is_handled_at_once(heard: list[str], send: Callable[[], None]) -> None:
    made = stop_signals(heard)
    send()
    send()
    assert heard == ["wake", "celery"]
    made.loop_ended()
    assert heard == ["wake", "celery"], "the first is not handled once more"


def test_without_a_loop_none_waits(heard: list[str], send: Callable[[], None]) -> None:
    made = stop_signals(heard)
    send()
    made.loop_ended()
    assert heard == ["wake", "celery"]
    send()
    assert heard == ["wake", "celery", "celery"]
    made.install()  # the next connection
    send()
    assert heard == ["wake", "celery", "celery", "wake"]


# -- another thread --------------------------------------------------------------------------------


def turn(hub: Any, until: Any) -> float:
    """Run the loop until a condition holds; return the seconds. Its polls have no timer."""
    poll = hub.poller.poll
    hub.poller.poll = lambda _timeout: poll(0 if until() else 60)
    began, loop = time.monotonic(), hub.create_loop()
    while not until():
        next(loop)
    return time.monotonic() - began


def test_another_thread_ends_a_poll() -> None:
    called: list[int] = []
    hub = Hub()
    wakeup = Wakeup(lambda: called.append(1))
    wakeup.register(hub)
    timer = threading.Timer(0.05, wakeup.wake)
    timer.start()
    assert turn(hub, lambda: called) < 30
    timer.join()
    wakeup.close()
    reused = socket.socketpair()  # with the same numbers
    wakeup.wake()
    assert select.select(reused, [], [], 0)[0] == []
    for each in reused:
        each.close()
    hub.close()


def test_a_thread_that_wakes_often_does_not_block() -> None:
    wakeup = Wakeup(bool)
    for _ in range(100_000):
        wakeup.wake()
    wakeup.close()
