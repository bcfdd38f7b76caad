"""A signal that stops a worker waits for the event loop; a second one does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from django_amqp_events.worker.stop_signals import SIGNALS, StopSignals


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
