"""How many events a worker takes in advance, and that none waits longer than it may."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from amqp.serialization import dumps
from hypothesis import given
from hypothesis import strategies as st
from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from django_amqp_events.worker.celery_internals import ProcessSemaphore
from django_amqp_events.worker.prefetch import (
    HOLDING,
    MOST,
    RUNNING,
    WAITING,
    Load,
    Window,
    longest_wait,
    window,
)

#: Of a consumer timeout of 30 minutes.
WAIT = 300.0


def load(
    processes: int = 2,
    queues: int = 1,
    multiplier: int = 4,
    free: int = 2,
    spare: int | None = None,
    calm: bool = True,
) -> Load:
    return Load(
        budget=multiplier * processes,
        configured=multiplier != 4,
        processes=processes,
        free=free,
        spare=processes if spare is None else spare,
        queues=queues,
        wait=WAIT,
        calm=calm,
    )


@pytest.mark.parametrize(
    ("worker", "seconds", "rate", "expected"),
    [
        (load(), None, None, Window(8, "default")),
        (load(), 0.001, None, Window(64, "measured")),
        (load(), 0.01, None, Window(52, "measured")),
        (load(calm=False), 0.001, None, Window(8, "default")),
        (load(calm=False), 0.1, None, Window(7, "measured")),
        (load(multiplier=5), 0.001, None, Window(10, "configured")),
        (load(), 0.1, None, Window(7, "measured")),
        (load(), 10, None, Window(2, "measured")),
        (load(), 3600, None, Window(2, "measured")),
        (load(queues=8), None, None, Window(1, "default")),
        (load(queues=8), 0.001, None, Window(8, "measured")),
        (load(queues=100), 0.001, None, Window(2, "measured")),
        (load(queues=8), 600, None, Window(1, "slow")),
        (load(queues=8, free=0), 600, None, Window(0, "slow")),
        (load(queues=8, free=-3), 600, None, Window(0, "slow")),
        (load(16, queues=100), 0.001, None, Window(16, "measured")),
        (load(16, multiplier=1, queues=100), 0.001, None, Window(16, "measured")),
        (load(16, queues=100), 10, None, Window(2, "measured")),
        (load(queues=100), 1, None, Window(2, "measured")),
        (load(queues=100), 4, None, Window(1, "slow")),
        (load(4, queues=2), None, None, Window(1, "default")),
        (load(4, queues=2, multiplier=8), None, None, Window(16, "configured")),
        (load(4, queues=2), 5, None, Window(4, "measured")),
        (load(4, queues=2, spare=2), 5, None, Window(2, "slow")),
        (load(4, queues=2, spare=-1), 5, None, Window(0, "slow")),
        (load(4, queues=2, spare=2), 0.5, None, Window(6, "measured")),
        (load(4, queues=2, multiplier=8, spare=2), 5, None, Window(16, "configured")),
        (load(queues=8, free=2, spare=0), 600, None, Window(0, "slow")),
        (load(multiplier=32), None, None, Window(64, "configured")),
        (load(multiplier=32), 1, None, Window(64, "configured")),
        (load(multiplier=32), 10, None, Window(32, "measured")),
        (load(multiplier=1), 3600, None, Window(2, "configured")),
        (load(16), 0.001, 100 / 3600, Window(8, "rate")),
        (load(16), None, 10 / 3600, Window(0, "rate")),
        (load(), 0.001, 5, Window(64, "measured")),
        (load(queues=8, free=0), 600, 1 / 3600, Window(0, "slow")),
        (load(16, queues=8, free=16), 600, 10 / 3600, Window(0, "rate")),
    ],
)
def test_table(worker: Load, seconds: float | None, rate: float | None, expected: Window) -> None:
    assert window(worker, seconds=seconds, rate=rate) == expected


@pytest.mark.parametrize(
    ("size", "queues", "expected"),
    [(500, 1, 64), (100_000, 1, 64), (1 << 20, 1, 8), (200_000, 1, 41), (16 << 20, 1, 8),
     (200_000, 2, 20), (16 << 20, 8, 2)],
)  # fmt: skip
def test_large_bodies_are_not_held(size: int, queues: int, expected: int) -> None:
    assert window(load(queues=queues), seconds=0.001, rate=None, size=size).count == expected


@given(
    multiplier=st.integers(-(2**20), 2**40),
    processes=st.integers(1, 1000),
    queues=st.integers(0, 1000),
    busy=st.integers(0, 2000),
    spare=st.integers(-1000, 1000),
    seconds=st.none() | st.floats(0, 1000),
    rate=st.none() | st.floats(1e-6, 1),
)
def test_what_is_taken_begins_in_time(
    multiplier: int, processes: int, queues: int, busy: int, spare: int, seconds: float | None,
    rate: float | None,
) -> None:  # fmt: skip
    """Unless it is consumed for a free process only, a full pool works it off in time."""
    worker = load(processes, queues, multiplier, processes - busy, min(spare, processes))
    found = window(worker, seconds=seconds, rate=rate)
    share = max(1, worker.budget // max(1, queues))
    held = 0 if worker.configured else MOST * processes // max(1, queues)
    most = share if seconds is None else max(share, processes, held)
    assert 0 <= found.count <= most
    assert dumps("lBb", (0, min(found.count, 65535), False))
    if rate is not None:
        assert found.count <= rate * WAIT
    if found.why == "slow":
        assert found.count <= max(0, worker.free, worker.spare)
    elif seconds is not None and found.count > worker.free:
        behind = max(0, found.count * max(1, queues) - processes)
        assert behind * seconds / processes <= WAIT / 2 * 1.001
        if rate is None:
            longest = 1 + WAIT / 2 / max(seconds, 1e-6)
            fits = int(processes * longest) // max(1, queues)
            assert found.count >= min(processes, fits), "one queue can fill the pool"


@given(
    timeout=st.floats(1, 86_400),
    part=st.none() | st.floats(0.001, 1.5),
    patient=st.booleans(),
)
def test_a_run_within_its_limit_ends_in_time(
    timeout: float, part: float | None, patient: bool
) -> None:
    limit = part and part * timeout
    wait = longest_wait(timeout, limit, patient=patient)
    assert WAITING * timeout <= wait <= timeout / 2
    if part is not None and part <= RUNNING:
        assert wait + (limit or 0) <= HOLDING * timeout * 1.000001


@given(st.lists(st.sampled_from(["acquire", "release", "grow"]), max_size=30))
def test_a_growing_pool_has_no_more_runs_than_processes(steps: list[str]) -> None:
    worker = SimpleNamespace(semaphore=LaxBoundedSemaphore(1))
    ProcessSemaphore.replace(worker)
    running: list[int] = []
    processes = 1
    for step in steps:
        if step == "acquire":
            worker.semaphore.acquire(running.append, 1)
        elif step == "grow":
            processes += 1
            worker.semaphore.grow()
        elif running:
            running.pop()
            worker.semaphore.release()
        assert len(running) <= processes
