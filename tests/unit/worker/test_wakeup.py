"""Another thread wakes a worker's event loop."""

from __future__ import annotations

import threading
import time
from typing import Any

from kombu.asynchronous import Hub

from django_amqp_events.worker.wakeup import Wakeup


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
    wakeup.wake()
    hub.close()


def test_a_thread_that_wakes_often_does_not_block() -> None:
    wakeup = Wakeup(bool)
    for _ in range(100_000):
        wakeup.wake()
    wakeup.close()
