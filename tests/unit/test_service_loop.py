"""The loop of the services: steps, retries, reports, stop; and its delays."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from django.db import OperationalError

from django_amqp_events import service_loop
from django_amqp_events.backoff import Backoff
from django_amqp_events.exceptions import (
    BrokerUnavailableError,
    ConfigurationError,
    ExchangeMissingError,
)
from django_amqp_events.monitor.snapshots import SnapshotLoop
from django_amqp_events.service_loop import ServiceLoop

pytestmark = pytest.mark.django_db


def run(*results: float | Exception | None, stop_after: int = 100) -> tuple[list[str], ServiceLoop]:
    """Run a loop whose steps return or raise *results*; return its reports, and the loop."""
    reports: list[str] = []
    answers: Iterator[float | Exception | None] = iter(results)
    left = stop_after

    def step() -> float | None:
        nonlocal left
        left -= 1
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    loop = ServiceLoop(
        work="mirroring",
        tell=reports.append,
        stop=lambda: left <= 0,
    )
    with patch.object(service_loop, "BACKOFF", Backoff(0.001, 0.01)):
        loop.run(step)
    return reports, loop


def test_steps_until_stopped() -> None:
    began = time.monotonic()
    assert run(0.0, 60.0, stop_after=2)[0] == []
    assert time.monotonic() < began + 30


def test_an_error_is_reported_once_and_so_is_its_end() -> None:
    down = BrokerUnavailableError("no connection")
    first, *rest = run(down, down, down, 0.0, 0.0, None)[0]
    assert first == (
        "mirroring is paused: RabbitMQ is unreachable (BrokerUnavailableError: no connection); "
        "nothing is lost, retrying at least every 0.01 s"
    )
    assert rest == ["mirroring has resumed"]


def raised_by(driver: Exception, **attributes: Any) -> OperationalError:
    """Return Django's error over one of a driver."""
    vars(driver).update(attributes)
    error = OperationalError(*driver.args[-1:])
    error.__cause__ = driver
    return error


def test_another_error_is_reported_too() -> None:
    reports, loop = run(
        ExchangeMissingError("there is no exchange"),
        raised_by(Exception("no such table: x\nDETAIL"), sqlstate="42P01"),  # as in psycopg 3
        OperationalError("server closed"),
        # MySQL's during a failover.
        raised_by(Exception(1290, "running with the --read-only option")),
        # SQLITE_BUSY_SNAPSHOT
        raised_by(sqlite3.OperationalError("database is locked"), sqlite_errorcode=517),
        raised_by(sqlite3.OperationalError("no such table: x"), sqlite_errorcode=1),
        stop_after=6,
    )
    assert loop.failures == 6
    assert "an error occurred (ExchangeMissingError: there is no exchange)" in reports[0]
    assert "run `manage.py migrate` (OperationalError: no such table: x)" in reports[1]
    assert "the database is unreachable (OperationalError: server closed)" in reports[2]
    assert "the database is read-only (OperationalError: running with " in reports[3]
    assert "another process has locked the database (OperationalError: database" in reports[4]
    assert "run `manage.py migrate` (OperationalError: no such table: x)" in reports[5]


@pytest.mark.parametrize("error", [ConfigurationError("SERVICE is missing"), ValueError("bug")])
def test_what_no_retry_can_fix_ends_it(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(error)


def test_delays_double_up_to_the_last() -> None:
    backoff = Backoff(0.5, 30.0)
    assert [backoff.delay(failures) for failures in (0, 1, 2, 6, 10_000)] == [0.5, 1, 2, 30, 30]


def test_snapshots_continue_after_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror beside them runs, so the thread must not end with a traceback."""
    taken = threading.Event()
    errors = [ConfigurationError("there is no database 'reports'")]

    def look(_: SnapshotLoop) -> bool:
        if errors:
            raise errors.pop()
        taken.set()
        return True

    monkeypatch.setattr(SnapshotLoop, "look", look)
    reports: list[str] = []
    unused = (None, None, None)
    loop = SnapshotLoop(*unused, every=0.01, tell=reports.append)  # type: ignore[arg-type]
    loop.start()
    try:
        assert taken.wait(30)
    finally:
        loop.stop()
    assert "there is no database 'reports'" in reports[0]
