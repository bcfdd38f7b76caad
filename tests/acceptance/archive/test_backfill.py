"""A handler that is added afterwards gets every event once, while publishing goes on."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.conftest import Vhost

from ..conftest import Make
from ..harness import Archive, Eyes, Service, until

pytestmark = pytest.mark.timeout(3_600)

#: Events before the handler; 200000 for the full run.
EVENTS = int(os.environ.get("BACKFILL_EVENTS", "600"))
HISTORY = {"HISTORY": {"MAX_AGE": "1d"}}
NAME, QUEUE = "late.happened", "core.testproject.count"


def ask(core: Service, query: str) -> Any:
    return json.loads(
        core.python(
            f"import json\nfrom django.db import connection\ncursor = connection.cursor()\n"
            f"cursor.execute({query!r})\nprint(json.dumps(cursor.fetchall()))"
        )
    )


@contextmanager
def publishing(vhost: Vhost, ids: list[str]) -> Iterator[None]:
    """Publish about twenty events a second."""
    stop = threading.Event()

    def publish() -> None:
        eyes = Eyes(vhost.node, vhost.name)
        while not stop.is_set():
            ids.append(eyes.event(NAME, {"number": 0}))
            time.sleep(0.05)
        eyes.close()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_every_event_is_handled_once_although_the_runner_is_killed_three_times(
    empty_database: dict[str, Any], fresh_vhost: Vhost, fresh_eyes: Eyes, service: Make
) -> None:
    eyes = fresh_eyes
    service(eyes, "other", handlers="none", events=HISTORY).declare()
    ids: list[str] = []
    for start in range(0, EVENTS, 1000):
        messages = [
            eyes.message(NAME, {"number": number})
            for number in range(start, min(start + 1000, EVENTS))
        ]
        eyes.send(*messages)
        ids += [message.event_id for message in messages]
    core = service(
        eyes,
        handlers="late",
        events=HISTORY,
        environ={"TESTPROJECT_DATABASE": json.dumps(empty_database)},
        # A killed runner's lease ends after a second.
        constants={"archive.batches.runner.LEASE": -14.0, "archive.replay.LEASE": -14.0},
    )
    core.python(
        "from django.core.management import call_command\n"
        "from django.db import connection\n"
        "from testproject.late import TABLE\n"
        "call_command('migrate', verbosity=0)\n"
        "connection.cursor().execute(TABLE)"
    )
    with publishing(fresh_vhost, ids):
        code, out = core.command("events_declare")
        assert code == 0, out
        core.worker().wait_ready()
        core.start("events_mirror")
        code, out = core.command(
            "events_backfill", "testproject.count", "--comment", "new", "--format", "json"
        )
        assert code == 0, out
        for part in (0.2, 0.4, 0.6):
            runner = core.start("events_batches")
            until(partial(is_read, core, part), 300 + EVENTS / 50, f"{part:.0%} are read")
            runner.kill()
        core.start("events_batches")
        until(
            lambda: ask(core, "SELECT state FROM django_amqp_events_replaybatch") == [["done"]],
            300 + EVENTS / 50,
            "the batch is done",
        )
    until(lambda: not eyes.totals(QUEUE)[QUEUE], 60, "the queue is empty")
    ran = [event for (event,) in ask(core, "SELECT event FROM counted")]
    assert len(ran) == len(ids)
    assert set(ran) == set(ids)
    assert not Archive(eyes).collect()


def is_read(core: Service, part: float) -> bool:
    total = ask(core, "SELECT total FROM django_amqp_events_replaybatch")[0][0]
    return bool(total >= part * EVENTS)
