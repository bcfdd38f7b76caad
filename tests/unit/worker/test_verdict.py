"""The text of an exception: bounded, with the location in the handler."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from celery.exceptions import Reject, Retry

from django_amqp_events.declare.retry_policy import RetryPolicy
from django_amqp_events.message.archive_message import MAX_TRACEBACK
from django_amqp_events.worker.verdict import (
    decide,
    describe,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def raised(exc: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise exc from cause
    except type(exc) as caught:
        return caught


@pytest.mark.parametrize(
    "exc",
    [raised(Retry(), ValueError("never raised")), raised(Reject(ValueError("never raised")))],
    ids=["retry(exc=…)", "Reject(…)"],
)
def test_unraised_exception_gets_the_carriers_location(
    exc: BaseException,
) -> None:
    verdict = decide(exc, RetryPolicy(max_retries=0), attempt=1, now=NOW, random=0.5)
    assert verdict.failure is not None
    assert verdict.failure.exception == "ValueError"
    assert [frame["function"] for frame in verdict.failure.frames] == ["raised"]
    assert "in raised" in verdict.failure.traceback


def test_a_long_message_does_not_push_the_frames_out() -> None:
    failure = describe(raised(ValueError("x" * 1_000_000)))
    assert failure.traceback.startswith("Traceback")
    assert "in raised" in failure.traceback
    assert len(failure.traceback) <= MAX_TRACEBACK
