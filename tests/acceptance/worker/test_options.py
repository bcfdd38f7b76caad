"""Celery's configuration: annotations, limits, results, databases."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from ..conftest import Make
from ..harness import Eyes, Service, until

ACT, RATED, QUERY = "options.act", "options.rated", "options.query"


def make(service: Make, eyes: Eyes, **options: object) -> Service:
    made: Service = service(eyes, "options", handlers="options", **options)
    made.declare()
    return made


def test_nothing_in_the_configuration_changes_settlement(fresh_eyes: Eyes, service: Make) -> None:
    """Annotations and task_* settings that would ack a lost event; time limits still work."""
    eyes = fresh_eyes
    danger = {
        "acks_late": False,
        "reject_on_worker_lost": False,
        "acks_on_failure_or_timeout": True,
        "acks_on_timeout": True,
        "autoretry_for": [],
        "Request": "celery.worker.request:Request",
        "Strategy": "celery.worker.strategy:default",
    }
    options = make(
        service, eyes,
        celery={
            "task_annotations": {"*": danger, "testproject.act": {**danger, "time_limit": 8}},
            "task_acks_late": False,
            "task_reject_on_worker_lost": False,
            "task_acks_on_failure_or_timeout": True,
            "task_retry_on_worker_lost": True,
            "task_ignore_result": True,
        },
    )  # fmt: skip
    # The limit is longer than Celery takes to notice that a child was killed (5 s): otherwise
    # the killed run may count as one that ran out of time.
    options.worker("prefork", 4, "-Q", "options.testproject.act")
    (lost,) = eyes.events(1, ACT, "kill_once:x")
    (failed,) = eyes.events(1, ACT, "fail", "ok")
    (late,) = eyes.events(1, ACT, "deaf:60", "ok")
    until(lambda: options.ended([lost, failed, late], handler="testproject.act"), 30)
    assert [line["attempt"] for line in options.runs(lost)] == [1, 1]
    assert [line["attempt"] for line in options.runs(failed)] == [1, 2]
    assert [line["attempt"] for line in options.runs(late)] == [1, 2]
    eyes.empty("options.testproject.act")
    # Retries bypass the shared exchange: the other handler has one copy of each event.
    assert eyes.ready("options.testproject.kept") == 3


def test_rate_limit(fresh_eyes: Eyes, service: Make) -> None:
    """Held back, in order to be run once each; a warm shutdown gives back what was not."""
    eyes = fresh_eyes
    options = make(service, eyes)
    worker = options.worker("threads", 8, "-Q", "options.testproject.rated")
    ids = eyes.events(16, RATED, "ok")
    until(lambda: len(options.ledger(what="end")) >= 10)
    assert worker.stop() == 0
    done = len(options.ledger(what="end"))
    options.worker("threads", 8, "-Q", "options.testproject.rated")
    until(lambda: options.ended(ids, handler="testproject.rated"), 30)
    eyes.empty("options.testproject.rated")
    lines = options.ledger(what="start")
    assert Counter(line["event"] for line in lines) == dict.fromkeys(ids, 1)
    first = [line["at"] for line in lines[:done]]
    # A bucket of one token: n runs are dispatched in (n - 1) / 5 seconds at least. The first one's
    # thread may start late.
    assert first[-1] - first[0] >= (len(first) - 1) / 5 - 1


@pytest.mark.parametrize("reuse", [None, 4])
def test_database_connections(fresh_eyes: Eyes, service: Make, reuse: int | None) -> None:
    """Closed after each task, or after CELERY_DB_REUSE_MAX of them, as Celery's fixup does."""
    eyes = fresh_eyes
    options = make(service, eyes, celery={"CELERY_DB_REUSE_MAX": reuse})
    worker = options.worker("threads", 2, "-Q", "options.testproject.query").wait_ready()
    for _ in range(6):
        (event_id,) = eyes.events(1, QUERY, "ok")
        until(lambda: options.ended([event_id], handler="testproject.query"))  # noqa: B023
    eyes.empty("options.testproject.query")

    def open_files() -> int:
        count = 0
        for link in Path(f"/proc/{worker.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                count += str(link.readlink()).endswith("db.sqlite3")
        return count

    if reuse is None:
        until(lambda: open_files() == 0, 5, "every connection is closed")
    else:
        # SQLite closes the file of a closed connection only when its last cursor is collected.
        assert open_files(), "connections stay open for the next task"
