"""Two worlds with one interface: the in-memory broker, and RabbitMQ with a real worker."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from django_amqp_events import publish_event
from django_amqp_events.broker import publisher_pool, topology
from django_amqp_events.broker.provisioning import startup
from django_amqp_events.conf import get_settings
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.exceptions import PublishError
from django_amqp_events.memory import MemoryBackend
from django_amqp_events.message import archive_message
from django_amqp_events.message.archive_message import Archived, Outcome
from django_amqp_events.message.types import Message
from django_amqp_events.publish.publisher import Options
from django_amqp_events.testing import memory_events, override_events
from tests.acceptance.harness import STARTED, Eyes, Worker, until
from tests.celery_app import app
from tests.conftest import Vhost
from tests.event_messages import taken

from . import ledger
from .handlers import AMQP_EVENTS, VERSIONS

ROOT = Path(__file__).resolve().parents[2]


class World(Protocol):
    """The interface of a case, with what both worlds do alike."""

    #: Seconds by which a run may come after its due time.
    late: float

    def now(self) -> datetime: ...
    def send(self, message: Message) -> PublishError | None: ...
    def advance(self, seconds: float) -> None: ...
    def archive(self) -> list[Archived | Outcome]: ...
    def depth(self, queue: str) -> int: ...

    def publish(self, name: str, payload: Mapping[str, Any] | None = None, /, **using: Any) -> str:
        return publish_event(name, payload or {}, options=Options(**using))

    def runs(self, handler: str, event_id: str | None = None) -> list[dict[str, Any]]:
        return ledger.lines(handler, event_id)

    def all_archived(self) -> list[Archived]:
        return [item for item in self.archive() if isinstance(item, Archived)]

    def archived(self, event_id: str) -> list[Archived]:
        return [item for item in self.all_archived() if item.event and item.event.id == event_id]

    def outcomes(self, event_id: str) -> list[Outcome]:
        return [
            item
            for item in self.archive()
            if isinstance(item, Outcome) and item.event.id == event_id
        ]


class MemoryWorld(World):
    late = 0.001

    def __init__(self, backend: MemoryBackend) -> None:
        self.backend = backend

    def now(self) -> datetime:
        return self.backend.now()

    def send(self, message: Message) -> PublishError | None:
        return self.backend.publish([message], mandatory=True)[0]

    def advance(self, seconds: float) -> None:
        self.backend.advance(seconds)

    def archive(self) -> list[Archived | Outcome]:
        return [*self.backend.archived, *self.backend.outcomes]

    def depth(self, queue: str) -> int:
        return self.backend.depths.get(queue, 0)


class RabbitWorld(World):
    late = 15.0
    #: Where messages end; everything else is empty once all is handled.
    ends = ("contract:archive", "contract:graveyard")

    def __init__(self, eyes: Eyes, queues: Iterable[str]) -> None:
        self.eyes = eyes
        self.passed = set(queues) - set(self.ends)
        self._archive: list[Archived | Outcome] = []

    def now(self) -> datetime:
        return datetime.now(UTC)

    def send(self, message: Message) -> PublishError | None:
        return publisher_pool.publisher_pool(get_settings()).publish([message], mandatory=True)[0]

    def advance(self, seconds: float) -> None:
        """Wait until everything came to its end; *seconds* are what its delays add up to.

        Nothing ends before them. Unacknowledged messages are counted by the management API, which
        is a second late or more; ready ones by the queues themselves.
        """
        over = time.monotonic() + seconds
        quiet_since = time.monotonic()

        def quiet() -> bool:
            nonlocal quiet_since
            in_hand = self.eyes.totals()
            if any(in_hand.get(queue) or self.eyes.ready(queue) for queue in self.passed):
                quiet_since = time.monotonic()
            now = time.monotonic()
            return now > over and now - quiet_since > 5.0

        until(quiet, seconds + 60, "all queues but the archive are empty")

    def archive(self) -> list[Archived | Outcome]:
        for message in self.eyes.take("contract:archive"):
            self._archive.append(archive_message.read(taken(message, "contract:archive")))
        return self._archive

    def depth(self, queue: str) -> int:
        return self.eyes.ready(queue)


@contextmanager
def memory_world(where: Path) -> Iterator[World]:
    """The in-memory broker; its clock is the ledger's, and far from the wall's."""
    with _settings(where), memory_events(datetime(2031, 5, 6, tzinfo=UTC)) as backend:
        before, ledger.now = ledger.now, backend.now
        try:
            yield MemoryWorld(backend)
        finally:
            ledger.now = before


@contextmanager
def rabbit_world(where: Path, vhost: Vhost) -> Iterator[World]:
    """A vhost with the topology declared and a prefork worker on it."""
    eyes = Eyes(vhost.node, vhost.name)
    before = app.conf.broker_url
    app.conf.broker_url = vhost.url
    started = len(STARTED)
    try:
        with _settings(where):
            settings = get_settings()
            declared = topology.build(settings, get_registry())
            startup.declare(app, settings, declared)
            _worker(where, vhost.url).wait_ready()
            yield RabbitWorld(eyes, (queue.name for queue in declared.queues))
            STARTED[started].stop()
    finally:
        for worker in STARTED[started:]:
            worker.kill()
        del STARTED[started:]
        publisher_pool.close_pools()
        app.conf.broker_url = before
        eyes.close()


@contextmanager
def _settings(where: Path) -> Iterator[None]:
    before = os.environ.get(ledger.PATH)
    os.environ[ledger.PATH] = str(where / "ledger.jsonl")
    try:
        handlers = list(AMQP_EVENTS["HANDLERS"])
        with override_events(handlers=handlers, events=VERSIONS, **AMQP_EVENTS):
            yield
    finally:
        if before is None:
            del os.environ[ledger.PATH]
        else:
            os.environ[ledger.PATH] = before


def _worker(where: Path, url: str) -> Worker:
    command = [sys.executable, "-m", "celery", "-A", "tests.celery_app", "-b", url, "worker"]
    command += ["--pool", "prefork", "--concurrency", "2", "--loglevel", "INFO"]
    command += ["--hostname", "contract@localhost", "--without-gossip", "--without-mingle"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("AMQP_")}
    env |= {
        "DJANGO_SETTINGS_MODULE": "tests.contract.settings",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]),
        "PYTHONUNBUFFERED": "1",
    }
    return Worker.start(command, env=env, where=where, name="contract")
