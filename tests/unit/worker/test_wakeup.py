"""A worker's event loop is woken for a thread and by a signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kombu.asynchronous import Hub

from django_amqp_events.worker.wakeup import Wakeup


class Pool:
    maintained = 0

    def maintain_pool(self) -> None:
        self.maintained += 1


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


@contextmanager
def woken(call: Callable[[], object]) -> Iterator[Wakeup]:
    before = signal.getsignal(signal.SIGCHLD)
    wakeup = Wakeup(call)
    yield wakeup
    wakeup.close()
    wakeup.wake()
    assert signal.getsignal(signal.SIGCHLD) == before
    assert signal.set_wakeup_fd(-1) == -1


def turn(hub: Any, until: Any) -> float:
    """Run the loop until a condition holds; return the seconds. Its polls have no timer."""
    poll = hub.poller.poll
    hub.poller.poll = lambda _timeout: poll(0 if until() else 60)
    began, loop = time.monotonic(), hub.create_loop()
    while not until():
        next(loop)
    return time.monotonic() - began


def test_another_thread_ends_a_poll(hub: Hub) -> None:
    called: list[int] = []
    with woken(lambda: called.append(1)) as wakeup:
        wakeup.register(hub, Pool())
        timer = threading.Timer(0.05, wakeup.wake)
        timer.start()
        assert turn(hub, lambda: called) < 30
        timer.join()


def test_the_end_of_a_child_ends_a_poll_and_replaces_it(hub: Hub) -> None:
    pool = Pool()
    with woken(bool) as wakeup:
        wakeup.register(hub, pool)
        child = os.posix_spawn("/bin/true", ["true"], {})
        assert turn(hub, lambda: pool.maintained) < 30
        os.waitpid(child, 0)


def test_a_thread_that_wakes_often_does_not_block() -> None:
    with woken(bool) as wakeup:
        for _ in range(100_000):
            wakeup.wake()


def test_a_child_has_no_part_in_it() -> None:
    with woken(bool):
        child = os.fork()
        if not child:
            left = signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
            os._exit(0 if left and signal.set_wakeup_fd(-1) == -1 else 1)
        assert os.waitpid(child, 0) == (child, 0)


def test_a_worker_in_another_thread_leaves_the_signals_alone() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    wakeups: list[Wakeup] = []
    thread = threading.Thread(target=lambda: wakeups.append(Wakeup(bool)))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGCHLD) is before
    wakeups[0].close()
