"""How many events a worker takes in advance."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_amqp_events.worker.prefetch import (
    HOLDING,
    MAX_PREFETCH,
    QUICK_SECONDS,
    RUNNING,
    WAITING,
    Durations,
    Window,
    events_per_second,
    run_limit,
    window,
)

#: Of a consumer timeout of 30 minutes.
WAIT = 300.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Window(4, "default")),
        ({"seconds": 75.0}, Window(4, "default")),
        ({"seconds": 76.0}, Window(1, "slow")),
        ({"stuck": True, "quick": True}, Window(1, "slow")),
        ({"stuck": True, "multiplier": 32}, Window(1, "slow")),
        ({"quick": True}, Window(64, "measured")),
        ({"quick": True, "processes": 3}, Window(96, "measured")),
        ({"multiplier": 0}, Window(4, "default")),
        ({"multiplier": 1}, Window(2, "configured")),
        ({"multiplier": 10, "quick": True}, Window(20, "configured")),
        ({"rate": 1.0}, Window(4, "default")),
        ({"rate": 0.02}, Window(3, "rate")),
        ({"multiplier": 100_000}, Window(MAX_PREFETCH, "configured")),
    ],
)
def test_window(given: dict[str, Any], expected: Window) -> None:
    usual = {"processes": 2, "multiplier": 4, "quick": False, "seconds": 0.0, "rate": 0.0}
    assert window(**{**usual, "wait": WAIT, **given}) == expected


@given(
    processes=st.integers(1, 1000),
    multiplier=st.integers(0, 1000),
    quick=st.booleans(),
    seconds=st.floats(0, 1e6),
    stuck=st.booleans(),
    rate=st.floats(0, 1e6),
)
def test_a_window_is_a_prefetch_count(**given: Any) -> None:
    """0 would mean no limit to RabbitMQ."""
    assert 1 <= window(wait=WAIT, **given).count <= MAX_PREFETCH


def test_what_waits_and_then_runs_is_done_before_the_consumer_timeout() -> None:
    assert WAITING + RUNNING <= HOLDING < 1


@given(runs=st.lists(st.floats(0, 3600), min_size=1))
def test_a_handler_is_quick_by_its_average(runs: list[float]) -> None:
    durations, was = Durations(), False
    for seconds in runs:
        changed = durations.ended("a", seconds)
        quick = durations.is_quick("a")
        assert changed is (quick is not was)
        assert min(runs) <= durations.average["a"] <= max(runs)
        if quick:
            assert durations.average["a"] <= 2 * QUICK_SECONDS
        was = quick
    assert not durations.is_quick("b")


def test_a_handler_at_the_border_does_not_change_with_each_run() -> None:
    durations = Durations()
    runs = [0.5 * QUICK_SECONDS, *[1.5 * QUICK_SECONDS] * 50, *[3 * QUICK_SECONDS] * 50]
    assert [durations.ended("a", seconds) for seconds in runs].count(True) == 2


@pytest.mark.parametrize(
    ("limit", "rate"),
    [(None, 0), ("", 0), ("10/s", 10), ("6/m", 0.1), (5, 5), ("rubbish", 0), (object(), 0)],
)
def test_rates(limit: Any, rate: float) -> None:
    assert events_per_second(limit) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("own", "worker", "expected"),
    [((5, 3), (9, 8), 5), ((None, 3), (9, 8), 9), ((None, 3), (None, 8), 3),
     ((None, None), (None, 8), 8), ((None, None), (None, None), None)],
)  # fmt: skip
def test_the_limit_that_ends_a_run(own: Any, worker: Any, expected: float | None) -> None:
    class Limited:
        time_limit, soft_time_limit = own

    assert run_limit(Limited, *worker) == expected
