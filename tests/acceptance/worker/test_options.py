"""Celery's configuration: rate limits, turns of queues, connections to databases."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ..conftest import Make
from ..harness import Eyes, Service, until

RATED, QUERY = "options.rated", "options.query"


def make(service: Make, eyes: Eyes, **options: object) -> Service:
    made: Service = service(eyes, "options", handlers="options", **options).declare()
    return made


def test_rate_limit(fresh_eyes: Eyes, service: Make) -> None:
    """Held back, in order to be run once each; a warm shutdown gives back what was not."""
    options = make(service, fresh_eyes)
    worker = options.worker("threads", 8, "-Q", "options.testproject.rated")
    ids = fresh_eyes.events(16, RATED, "ok")
    until(lambda: len(options.ledger(what="end")) >= 10)
    assert worker.stop() == 0
    done = len(options.ledger(what="end"))
    options.worker("threads", 8, "-Q", "options.testproject.rated")
    until(lambda: options.ended(ids, handler="testproject.rated"), 30)
    fresh_eyes.empty("options.testproject.rated")
    lines = options.ledger(what="start")
    assert Counter(line["event"] for line in lines) == dict.fromkeys(ids, 1)
    first = [line["at"] for line in lines[:done]]
    # A bucket of one token: n runs are dispatched in (n - 1) / 5 seconds at least. The first one's
    # thread may start late.
    assert first[-1] - first[0] >= (len(first) - 1) / 5 - 1


@pytest.mark.parametrize(
    ("reuse", "exchange"), [(None, "events"), (4, "events"), (4, "options:replay")]
)
def test_database_connections(
    fresh_eyes: Eyes, service: Make, reuse: int | None, exchange: str
) -> None:
    """Closed after each task, or after CELERY_DB_REUSE_MAX of them, as Celery's fixup does."""
    options = make(service, fresh_eyes, celery={"CELERY_DB_REUSE_MAX": reuse})
    queue = "options.testproject.query"
    worker = options.worker("threads", 2, "-Q", queue).wait_ready()
    for number in range(6):
        message = fresh_eyes.message(QUERY, {"plan": ["ok"]})
        if exchange != "events":
            headers = {**message.headers, "event-replay-id": f"{number:032}"}
            message = replace(message, exchange=exchange, routing_key=queue, headers=headers)
        fresh_eyes.send(message)
        until(lambda: options.ended([message.event_id], handler="testproject.query"))  # noqa: B023
    fresh_eyes.empty(queue)

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


# -- turns of queues -------------------------------------------------------------------------------


pytestmark = pytest.mark.timeout(300)


def test_short_events_do_not_wait_for_a_backlog_of_long_ones(
    core: Service, fresh_eyes: Eyes
) -> None:
    """Queues have their turns, so a short one waits for one long run, not for all."""
    for _ in range(12):
        fresh_eyes.event("core.act", {"plan": ["sleep:2"]})
    short = [fresh_eyes.event("core.act.once", {"plan": ["ok"]}) for _ in range(20)]
    core.worker("prefork", 2)
    until(lambda: all(core.runs(event, "end") for event in short), 60, "the short ones have run")
    assert len(core.ledger(name="core.act", what="start")) <= 6
