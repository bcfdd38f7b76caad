"""The retry schedule, and the hops through delay queues that make it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from django_amqp_events.broker.topology import POWER_DELAYS
from django_amqp_events.declare.retry_policy import (
    MINIMUM_DELAY,
    RetryPolicy,
    hop,
)
from django_amqp_events.options import LONGEST_TTL, MAX, POLICY_OPTIONS, Problem, read_options
from django_amqp_events.worker.reading import HOLD_SECONDS

policies = st.builds(
    RetryPolicy,
    max_retries=st.one_of(st.none(), st.integers(0, 200)),
    retry_backoff=st.integers(0, 60),
    retry_backoff_max=st.integers(60, 10_000),
    default_retry_delay=st.integers(1, 10_000),
)


def test_the_default_doubles_from_one_second_to_512() -> None:
    assert RetryPolicy().schedule() == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def test_booleans_are_seconds_as_in_celery() -> None:
    read = POLICY_OPTIONS["retry_backoff"]
    assert (read(True), read(False)) == (1, 0)


@pytest.mark.parametrize(
    ("retries", "seconds"),
    [(0, 0), (3, 1 + 2 + 4), (5, 3 + 3 * 4), (1000, 3 + 998 * 4), (MAX - 1, LONGEST_TTL)],
)
def test_the_total_is_that_of_all_retries(retries: int, seconds: float) -> None:
    assert RetryPolicy(max_retries=retries, retry_backoff=1, retry_backoff_max=4).total() == seconds


@given(policy=policies, attempt=st.integers(1, 10**9), random=st.floats(0, 1))
def test_delay_follows_the_formula(policy: RetryPolicy, attempt: int, random: float) -> None:
    delay = policy.delay(attempt, random)
    if policy.retry_backoff:
        exponent = min(attempt - 1, 20)  # the largest cap here is reached by then
        expected = min(policy.retry_backoff * 2**exponent, policy.retry_backoff_max)
        assert delay == expected
    else:
        assert delay == policy.default_retry_delay
    assert isinstance(delay, float)


@given(policy=policies)
def test_the_schedule_never_falls_and_its_delays_have_queues(policy: RetryPolicy) -> None:
    schedule = policy.schedule()
    assert list(schedule) == sorted(schedule)
    assert len(schedule) == (64 if policy.max_retries is None else min(policy.max_retries, 64))
    assert {int(delay) for delay in schedule} == policy.distinct_delays()
    # Attempts after the end of a long schedule have a queue too.
    if policy.max_retries != 0:
        assert int(policy.delay(10_000)) in policy.distinct_delays() | {policy.retry_backoff_max}


@given(policy=policies, attempt=st.integers(1, 100), random=st.floats(0, 1))
def test_jitter_is_bounded(policy: RetryPolicy, attempt: int, random: float) -> None:
    whole = policy.delay(attempt)
    delay = replace(policy, retry_jitter=True).delay(attempt, random)
    assert MINIMUM_DELAY <= delay <= whole
    assert delay == max(MINIMUM_DELAY, whole * random)


def test_exhausted_counts_the_first_run_as_attempt_one() -> None:
    policy = RetryPolicy(max_retries=3)
    assert [policy.exhausted(attempt) for attempt in (1, 2, 3, 4, 5)] == [False] * 3 + [True] * 2
    assert RetryPolicy(max_retries=0).exhausted(1)
    assert not RetryPolicy(max_retries=None).exhausted(10**9)
    assert policy.exhausted(2, max_retries=1)
    assert not policy.exhausted(4, max_retries=10)


def test_retried_exceptions() -> None:
    policy = RetryPolicy(autoretry_for=(OSError, LookupError), dont_autoretry_for=(KeyError,))
    assert policy.retries(ConnectionResetError())
    assert policy.retries(IndexError())
    assert not policy.retries(KeyError())
    assert not policy.retries(ValueError())
    # These say something about the process, not about the event.
    assert policy.retries(SystemExit())
    assert policy.retries(KeyboardInterrupt())
    assert not RetryPolicy(dont_autoretry_for=(SystemExit,)).retries(SystemExit())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_retries": -1}, "max_retries"),
        ({"max_retries": MAX}, "max_retries"),
        ({"max_retries": True}, "max_retries"),
        ({"max_retries": 1.5}, "max_retries"),
        ({"max_retries": "3"}, "max_retries"),
        ({"retry_backoff": -1}, "retry_backoff"),
        ({"retry_backoff": 0.5}, "retry_backoff"),
        ({"retry_backoff": "1"}, "retry_backoff"),
        ({"retry_backoff": None}, "retry_backoff"),
        ({"retry_backoff": float("nan")}, "retry_backoff"),
        ({"retry_backoff": float("inf")}, "retry_backoff"),
        ({"retry_backoff_max": 0}, "retry_backoff_max"),
        ({"retry_backoff_max": LONGEST_TTL + 1}, "retry_backoff_max"),
        ({"default_retry_delay": 0}, "default_retry_delay"),
        ({"default_retry_delay": 10**30}, "default_retry_delay"),
        ({"retry_jitter": 1}, "retry_jitter"),
        ({"autoretry_for": (5,)}, "autoretry_for"),
        ({"dont_autoretry_for": (int,)}, "dont_autoretry_for"),
    ],
)
def test_policies_that_make_no_sense(options: dict[str, Any], word: str) -> None:
    problems: list[Problem] = []
    assert read_options(POLICY_OPTIONS, options, "here", problems) == {}
    [problem] = problems
    assert f": {word} is " in problem.what


def test_the_longest_delay_is_allowed() -> None:
    assert RetryPolicy(retry_backoff_max=LONGEST_TTL).delay(1000) == LONGEST_TTL


@given(
    delay=st.floats(0.001, 20_000),
    exact=st.frozensets(st.integers(1, 5_000), max_size=4),
)
def test_hops_are_never_early_and_less_than_a_second_late(
    delay: float, exact: frozenset[int]
) -> None:
    delays = tuple(sorted(exact.union(POWER_DELAYS)))
    waited, hops = 0.0, 0
    while delay - waited > 0:
        waited += hop(delay - waited, delays)
        hops += 1
        assert hops <= 20
    assert delay <= waited < delay + 1


@given(
    delay=st.floats(MINIMUM_DELAY, 20_000),
    clocks=st.lists(st.floats(-3_600, 3_600), min_size=2, max_size=20),
)
@example(delay=1_000, clocks=[0, 3_600])  # early: the broker has held it for 512 s
@example(delay=512, clocks=[0, 3_600])  # a declared delay is not
def test_clocks_that_differ(delay: float, clocks: list[float]) -> None:
    """A retry is early, or late, by no more than the difference of two hosts' clocks.

    Each hop is chosen by the host that the event returns to; RabbitMQ holds it by its own clock.
    """
    due_at, now = clocks[0] + delay, 0.0
    remaining, met = delay, clocks[:1]
    while remaining > HOLD_SECONDS:
        now += hop(remaining, POWER_DELAYS)
        met.append(clocks[len(met) % len(clocks)])
        remaining = due_at - (now + met[-1])
    now += max(0, remaining)  # the worker holds it
    fast, slow = max(met) - met[0], met[0] - min(met)
    assert delay - fast - 0.001 <= now < delay + slow + 1
    if delay in POWER_DELAYS:
        assert now >= delay


@given(policy=policies)
def test_a_declared_delay_takes_one_hop(policy: RetryPolicy) -> None:
    delays = tuple(sorted(policy.distinct_delays().union(POWER_DELAYS)))
    for delay in policy.schedule():
        assert hop(delay, delays) == delay
        # The failure travels from the pool before its copy is built.
        assert hop(delay - 0.2, delays) == delay
