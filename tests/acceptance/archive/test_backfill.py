"""A handler that is added afterwards gets every event once, while further ones are published."""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from broker import Node
from tests.conftest import _vhost

from ..conftest import Make
from ..harness import Archive, Eyes, Service, until
from ..worker.test_reaper import LOSSES, lose

pytestmark = pytest.mark.timeout(3_600)

#: Events before the handler; 200000 for the full run.
EVENTS = int(os.environ.get("BACKFILL_EVENTS", "600"))
HISTORY = {"HISTORY": {"MAX_AGE": "1d"}}
DOCUMENTED = Path(__file__).parents[3] / "docs" / "history.md"
NAME, QUEUE = "late.happened", "core.testproject.count"


def ask(core: Service, query: str) -> Any:
    """Run a query in a process of its own, which is not cheap."""
    time.sleep(EVENTS / 40_000)
    return json.loads(
        core.python(
            f"import json\nfrom django.db import connection\ncursor = connection.cursor()\n"
            f"cursor.execute({query!r})\nprint(json.dumps(cursor.fetchall()))"
        )
    )


@contextmanager
def publishing(eyes: Eyes, ids: list[str]) -> Iterator[None]:
    """Publish about twenty events a second."""
    stop = threading.Event()

    def publish() -> None:
        own = Eyes(eyes.node, eyes.vhost)
        while not stop.is_set():
            ids.append(own.event(NAME, {"number": 0}))
            time.sleep(0.05)
        own.close()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[Node]]:
    """Three nodes."""
    nodes: list[Node] = []
    try:
        for number in range(3):
            peer = nodes[0] if nodes else None
            nodes.append(Node.start(tmp_path / f"member-{number}", peer=peer))
        yield nodes
    finally:
        for node in reversed(nodes):
            node.stop()


def test_every_event_is_handled_once_although_the_runner_is_killed_three_times(
    empty_database: dict[str, Any], fresh_eyes: Eyes, service: Make
) -> None:
    service(fresh_eyes, "other", handlers="none", events=HISTORY).declare()
    backfilled(fresh_eyes, service, empty_database, [None] * 3)


def test_each_role_may_do_its_part(
    empty_database: dict[str, Any], fresh_eyes: Eyes, service: Make
) -> None:
    """With the permissions of docs/history.md, each a user of its own."""
    eyes = fresh_eyes
    permissions = dict(permissions_of_roles())

    def acting(role: str, handlers: str = "late") -> Service:
        user, (configure, write, read) = f"{role}-{uuid4().hex[:8]}", permissions[role]
        eyes.http("PUT", f"/api/users/{user}", {"password": "secret", "tags": ""})
        allowed = {"configure": configure, "write": write, "read": read}
        eyes.http("PUT", f"/api/permissions/{{vhost}}/{user}", allowed)
        made = late(service, eyes, empty_database, handlers)
        made.events = {**HISTORY, "TOPOLOGY": "external"}
        given = urlsplit(eyes.url)
        netloc = f"{user}:secret@{given.hostname}:{given.port}"
        made.url = given._replace(netloc=netloc).geturl()
        return made

    def done(core: Service, name: str, *arguments: str) -> None:
        code, out = core.command(name, *arguments)
        assert code == 0, out

    acting("declare").migrate("late")
    done(acting("declare", "none"), "events_declare")
    publish = "from django_amqp_events import publish_many\nprint(publish_many({!r}, {!r}))"
    acting("publish").python(publish.format(NAME, [{"number": n} for n in range(20)]))
    done(acting("declare"), "events_declare")
    worker = acting("work")
    worker.celery = {"worker_enable_remote_control": False}
    running = worker.worker("prefork", 1, "-Q", QUEUE).wait_ready()
    operator = acting("operate")
    operator.start("events_mirror")
    done(operator, "events_history", "--since", "1h")
    done(operator, "events_backfill", "testproject.count", "--comment", "new")
    operator.start("events_batches")
    until(lambda: state(operator) == "done", 60, "the batch is done")
    ((count,),) = ask(operator, "SELECT count(*) FROM counted")
    assert count == 20
    running.stop()
    isolator = acting("isolate")
    isolator.celery = {"worker_enable_remote_control": False}
    eyes.event(NAME, {"number": 20})
    for _ in range(LOSSES):
        lose(eyes, QUEUE)
    isolator.start("events_reaper")
    until(lambda: ask(operator, "SELECT count(*) FROM counted") == [[21]], 60, "it ran alone")
    unread = eyes.message(NAME, {"number": 21})
    eyes.send(replace(unread, exchange="core:abyss", routing_key=QUEUE))
    done(isolator, "events_recover")
    assert not eyes.ready("core:abyss")


def permissions_of_roles() -> Iterator[tuple[str, list[str]]]:
    """Yield the user of each role with what the documentation lets it configure, write and read."""
    for line in DOCUMENTED.read_text().splitlines():
        if line.startswith("$ rabbitmqctl set_permissions "):
            user, *patterns = shlex.split(line)[3:]
            yield user, [pattern.replace("billing", "core") for pattern in patterns]


@pytest.mark.slow
def test_every_event_is_handled_once_although_the_leader_of_the_history_is_killed(
    cluster: list[Node], service: Make, tmp_path: Path
) -> None:
    with _vhost(cluster[0], "history") as vhost:
        first = Eyes(cluster[0], vhost.name)
        service(first, "other", handlers="none", events=HISTORY).declare()
        until(lambda: led(first), 20, "the history has a leader")
        leader = next(node for node in cluster if node.nodename == led(first))
        first.close()
        # All connections are to a node that stays.
        eyes = Eyes(next(node for node in cluster if node is not leader), vhost.name)

        def lose() -> None:
            leader.kill()
            until(lambda: led(eyes) not in ("", leader.nodename), 60, "another node leads")
            leader.start_again()

        database = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(tmp_path / "backfill.sqlite3"),
        }
        backfilled(eyes, service, database, [lose, None])
        eyes.close()


def led(eyes: Eyes) -> str:
    return str(eyes.queue("events:history").get("node", ""))


def backfilled(
    eyes: Eyes,
    service: Make,
    database: dict[str, Any],
    faults: Sequence[Callable[[], None] | None],
) -> None:
    """Backfill a handler while events are published, and count its runs.

    Args:
        faults: what happens while the history is read; ``None`` kills the runner.
    """
    ids: list[str] = []
    for start in range(0, EVENTS, 1000):
        messages = [
            eyes.message(NAME, {"number": number})
            for number in range(start, min(start + 1000, EVENTS))
        ]
        eyes.send(*messages)
        ids += [message.event_id for message in messages]
    core = late(service, eyes, database)
    core.migrate("late")
    with publishing(eyes, ids):
        code, out = core.command("events_declare")
        assert code == 0, out
        for worker in [core.worker() for _ in range(2)]:
            worker.wait_ready()
        core.start("events_mirror")
        code, out = core.command(
            "events_backfill", "testproject.count", "--comment", "new", "--format", "json"
        )
        assert code == 0, out
        for number, fault in enumerate(faults, 1):
            part = 0.2 * number
            runner = core.start("events_batches")
            until(partial(is_read, core, part), 300 + EVENTS / 50, f"{part:.0%} are read")
            if fault is not None:
                fault()
            runner.kill()
        core.start("events_batches")
        until(lambda: state(core) == "done", 300 + EVENTS / 50, "the batch is done")
    until(lambda: not eyes.totals(QUEUE)[QUEUE], 60, "the queue is empty")
    ran = [event for (event,) in ask(core, "SELECT event FROM counted")]
    assert len(ran) == len(ids)
    assert set(ran) == set(ids)
    assert not Archive(eyes).collect()


def late(service: Make, eyes: Eyes, database: dict[str, Any], handlers: str = "late") -> Service:
    return service(
        eyes,
        handlers=handlers,
        events=HISTORY,
        environ={"TESTPROJECT_DATABASE": json.dumps(database)},
        # Celery would close the database connection after each task.
        celery={"CELERY_DB_REUSE_MAX": 1_000_000},
        # A killed runner's lease ends after a second.
        constants={"archive.batches.runner.LEASE": -14.0, "archive.replay.LEASE": -14.0},
    )


def state(core: Service) -> str:
    return str(ask(core, "SELECT state FROM django_amqp_events_replaybatch")[0][0])


def is_read(core: Service, part: float) -> bool:
    total = ask(core, "SELECT total FROM django_amqp_events_replaybatch")[0][0]
    return bool(total >= part * EVENTS)
