"""One path of an event, and its crash points.

A path runs once to count the effects of its process (see testproject's ``crash_point``), and then
once for each crash point: the process dies there, is started again without one until nothing is
left to do, and the broker and the database are compared with what the path says. Each run has a
database of its own, a copy of what the path prepared, and events of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path as File
from typing import Any, ClassVar

from database_server import DatabaseServer
from django_amqp_events.message import headers
from tests.service_database import Database

from ..harness import STARTED, Eyes, Service, Worker, until

#: Seconds in which a process has to come to its end.
PATIENCE = 60.0
#: Seconds in which a process that has done its work comes to its last effects.
LAST_EFFECT = 5.0
#: Seconds in which RabbitMQ routes what a process sent before it died.
ROUTING = 0.5


@dataclass(frozen=True, slots=True)
class Point:
    """Where a process dies; 0 is nowhere."""

    number: int = 0
    when: str = ""


@dataclass(slots=True)
class Outcome:
    """What became of a path.

    Attributes:
        effects: of the process without a crash, each with its kind and its first words.
        reached: the crash points at which the process died.
        wrong: what was found, by point.
    """

    effects: list[str] = field(default_factory=list)
    reached: list[Point] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)


class Scene:
    """A service on a vhost, with a database of its own for each run."""

    def __init__(self, service: Service, eyes: Eyes, server: DatabaseServer | None) -> None:
        self.service, self.eyes, self.server = service, eyes, server
        self.base = service.where
        self._runs = 0
        self._template = ""
        self.database = Database({"NAME": ""})
        self.crash: dict[str, Any] = {}
        self._started: list[Worker] = []

    # -- databases and runs

    def begin(self, point: Point | None = None, **crash: Any) -> None:
        """Begin a run: a new directory, a copy of the database, and where the process dies."""
        self._runs += 1
        where = self.base / f"run-{self._runs}"
        where.mkdir()
        if self.server is not None and self.database.name not in ("", self._template):
            self.server.drop(self.database.name)
        self.database = Database.new(where, self.server, self._template)
        self.service.where = where
        self.service.environ = {
            **self.service.environ, "TESTPROJECT_DATABASE": json.dumps(self.database.settings),
        }  # fmt: skip
        self.crash = {}
        if point is not None:
            log = str(where / "effects")
            self.crash = {"log": log, "at": point.number, "when": point.when, **crash}

    def migrate(self) -> None:
        """Make the tables, for all runs."""
        self.begin()
        self.service.migrate("paired")
        self.keep()

    def keep(self) -> None:
        """Let the following runs begin with copies of this run's database."""
        self._template = self.database.name

    def rows(self, table: str, columns: str = "*", where: str = "1 = 1") -> list[tuple[Any, ...]]:
        return self.database.rows(table, columns, where)

    @property
    def effects(self) -> list[str]:
        log = File(self.crash["log"])
        return log.read_text().splitlines() if log.exists() else []

    @property
    def died(self) -> bool:
        return File(f"{self.crash['log']}.died").exists()

    # -- processes

    def start(self, *arguments: str, crash: bool = False, **options: Any) -> Worker:
        environ: dict[str, Any] = {"TESTPROJECT_CRASH": json.dumps(self.crash)} if crash else {}
        worker = self.service.start(*arguments, **options, **environ)
        self._started.append(worker)
        return worker

    def command(self, *arguments: str, crash: bool = False, **options: Any) -> str:
        """Run a command to its end, or to its crash; return what it printed."""
        worker = self.start(*arguments, crash=crash, **options)
        code = worker.wait(PATIENCE)
        assert code == (-9 if crash and self.died else 0), worker.log
        return worker.log

    def serve(
        self, ended: Callable[[], bool], *arguments: str, crash: bool = False, **options: Any
    ) -> None:
        """Run a process that does not end by itself until *ended* is true, or it dies."""
        worker = self.start(*arguments, crash=crash, **options)
        until(lambda: not worker.alive or ended(), PATIENCE, f"{worker.name} has done its work")
        if crash and self.crash["at"]:
            # The last effects may come after what *ended* looks at.
            deadline = time.monotonic() + LAST_EFFECT
            while not self.died and worker.alive and time.monotonic() < deadline:
                time.sleep(0.02)
            # If a process of its pool has died, the worker lives.
            until(lambda: not worker.alive or ended(), PATIENCE, f"{worker.name} continues")
        assert worker.alive or (crash and self.died), worker.log
        if worker.alive:
            worker.stop()

    def worker(
        self, pool: str, ended: Callable[[], bool], *arguments: str, crash: bool = False
    ) -> None:
        """Run a worker of the two handlers until *ended* is true, or it dies."""
        self.serve(
            ended, "--pool", pool, "--concurrency", "1", "--loglevel", "INFO",
            "--without-gossip", "--without-mingle", "-Q", ",".join(self.handlers), *arguments,
            crash=crash, program=("-m", "celery", "-A", "testproject", "worker"), name=pool,
        )  # fmt: skip

    def end(self) -> None:
        """Kill what a run has left, such as processes of a killed worker's pool."""
        for worker in self._started:
            worker.kill()
            STARTED.remove(worker)
        self._started.clear()

    # -- the broker

    @property
    def handlers(self) -> list[str]:
        return [f"{self.service.name}.testproject.{name}" for name in ("call", "effect")]

    @property
    def archive(self) -> str:
        return f"{self.service.name}:archive"

    @cached_property
    def _queues(self) -> list[str]:
        found = self.eyes.http("GET", "/api/queues/{vhost}?columns=name")
        return sorted({queue["name"] for queue in found} - {self.archive})

    def ready(self) -> dict[str, int]:
        """Return the ready messages of each queue that has some, except the archive."""
        ready = {name: self.eyes.ready(name) for name in self._queues}
        return {name: number for name, number in ready.items() if number}

    def copies(self) -> dict[str, list[Any]]:
        """Take the messages off the handlers' queues; return them by event id and handler."""
        found: dict[str, list[Any]] = {}
        more = True
        while more:
            if self.died:
                time.sleep(ROUTING)
            taken = [(name, message) for name in self.handlers for message in self.eyes.take(name)]
            for name, message in taken:
                event_id = message.headers.get(headers.EVENT_ID) or message.properties["message_id"]
                found.setdefault(f"{event_id} {name.rpartition('.')[2]}", []).append(message)
            more = self.died and bool(taken)
        return found

    def empty(self) -> None:
        """Drop what a wrong run has left."""
        for name in [*self._queues, self.archive]:
            self.eyes.take(name)


class Path:
    """A path of an event, of which one process dies.

    Attributes:
        kinds: of the effects that are counted.
        child: count those of a process of the pool.
        settings: of AMQP_EVENTS.
        environ: of all processes.
        varies: the number of effects does, with what arrives together.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ("sql", "commit", "publish", "ack", "reject")
    child: ClassVar[bool] = False
    settings: ClassVar[Mapping[str, Any]] = {}
    environ: ClassVar[Mapping[str, str]] = {}
    varies: ClassVar[bool] = False

    def make(self, scene: Scene) -> None:
        """Prepare the database of all runs."""

    def prepare(self, scene: Scene) -> None:
        """Prepare one run."""

    def act(self, scene: Scene, *, crash: bool) -> None:
        """Run the process of the path to its end, or to its crash."""
        raise NotImplementedError

    def finish(self, scene: Scene) -> None:
        """Run the other processes that bring this to its end."""

    def is_over(self, scene: Scene) -> bool:
        """Return True if nothing is left to do."""
        return True

    def check(self, scene: Scene) -> None:
        """Compare the broker, the database and the ledger with what the path promises."""
        raise NotImplementedError


def explore(path: Path, scene: Scene) -> Outcome:
    """Run a path at its crash points: before and after each effect."""
    outcome = Outcome()
    scene.service.events = {**scene.service.events, **path.settings}
    scene.service.environ = {**scene.service.environ, **path.environ}
    scene.migrate()
    path.make(scene)
    _run(path, scene, Point(), outcome)
    for number, when in product(range(1, len(outcome.effects) + 1), ("before", "after")):
        _run(path, scene, Point(number, when), outcome)
    return outcome


def _run(path: Path, scene: Scene, point: Point, outcome: Outcome) -> None:
    scene.begin(point, kinds=path.kinds, child=path.child)
    crashed = False
    try:
        path.prepare(scene)
        path.act(scene, crash=True)
        crashed = scene.died
        again, deadline = crashed and not path.child, time.monotonic() + PATIENCE
        while True:
            if again:
                path.act(scene, crash=False)
            path.finish(scene)
            if path.is_over(scene):
                break
            assert time.monotonic() < deadline, f"it is not over: {scene.ready()}"
            again = True
        path.check(scene)
        assert not (left := scene.ready()), f"queues are not empty: {left}"
    except AssertionError as exc:
        what = scene.effects[point.number - 1] if point.number else "no crash"
        outcome.wrong[f"{point.when} {what}".strip()] = str(exc)[-4000:]
        scene.empty()
    finally:
        scene.end()
    if not point.number:
        outcome.effects = scene.effects
    elif crashed:
        outcome.reached.append(point)
