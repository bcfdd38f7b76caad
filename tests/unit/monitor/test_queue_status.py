"""What workers say of their queues; tests/integration has what RabbitMQ says."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from django_amqp_events.monitor.queue_status import _paused, _prefetch
from django_amqp_events.monitor.state_texts import PREFETCH_REASONS
from django_amqp_events.worker.prefetch import Why


def worker(paused: list[str], counts: dict[str, list[Any]] | None) -> dict[str, Any]:
    return {"amqp_events": {"paused": paused, "prefetch_counts": counts}}


WORKERS = {
    "one": worker(["b"], {"a": [32, "measured"], "b": [0, "slow"]}),
    "two": worker([], {"a": [16, "measured"], "b": [1, "rate"]}),
    "configured": worker([], {"a": [4, "configured"]}),
    "of other queues": worker(["c"], {"c": [0, "slow"]}),
    "a reaper": worker([], None),
    "without events": {"pool": {}},
}


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        ("a", {"configured": 4, "measured": 48}),
        ("b", {"rate": 1, "slow": 0}),
        ("unknown", {}),
    ],
)
def test_counts_of_all_workers_are_added_by_reason(queue: str, expected: dict[str, int]) -> None:
    assert _prefetch(WORKERS, queue) == expected


def test_paused_queues() -> None:
    assert _paused(WORKERS) == {"b", "c"}


def test_each_reason_has_a_text() -> None:
    assert set(PREFETCH_REASONS) == set(get_args(Why))
