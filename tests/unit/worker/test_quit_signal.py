"""SIGQUIT waits for the event loop; a second one does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from django_amqp_events.worker.quit_signal import QuitSignal


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What Celery's handler and the event loop hear."""
    told: list[str] = []
    former = signal.signal(signal.SIGQUIT, lambda *_: told.append("celery"))
    yield told
    signal.signal(signal.SIGQUIT, former)


def send() -> None:
    os.kill(os.getpid(), signal.SIGQUIT)


def quit_signal(heard: list[str]) -> QuitSignal:
    made = QuitSignal(lambda: heard.append("wake"))
    made.install()
    return made


def test_the_first_waits_for_the_loop(heard: list[str]) -> None:
    made = quit_signal(heard)
    send()
    assert heard == ["wake"]
    assert made.waiting
    made.deliver()
    made.deliver()
    assert heard == ["wake", "celery"]


def test_the_second_is_handled_at_once(heard: list[str]) -> None:
    made = quit_signal(heard)
    send()
    send()
    assert heard == ["wake", "celery"]
    made.loop_ended()
    assert heard == ["wake", "celery"], "the first is not handled once more"


def test_without_a_loop_none_waits(heard: list[str]) -> None:
    made = quit_signal(heard)
    send()
    made.loop_ended()
    assert heard == ["wake", "celery"]
    send()
    assert heard == ["wake", "celery", "celery"]
    made.install()  # the next connection
    send()
    assert heard == ["wake", "celery", "celery", "wake"]
