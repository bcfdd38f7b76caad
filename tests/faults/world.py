"""A service of its own on a vhost of its own, its processes, and who looks at them."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from broker import Broker, Node
from django_amqp_events.message import headers
from tests.acceptance.harness import (
    Archive,
    Eyes,
    Service,
    Worker,
    until,
)
from tests.acceptance.isolation import Supervisor
from tests.conftest import SERVERS
from tests.integration.wire import Proxy
from tests.service_database import Database
from tests.waiting import NotInTime

from .counts import (
    HANDLERS,
    Counts,
    Ledger,
    Unit,
    count,
    unit,
)

NAME = "shop"
#: Columns of what :func:`.counts.unit` takes.
UNIT = "event_id, handler"
ARCHIVE = f"{NAME}:archive"
QUEUES = tuple(f"{NAME}.testproject.{handler}" for handler in HANDLERS)
#: Seconds between looks at the queues; the management API of our nodes is half a second behind.
SAMPLE = 0.25
#: Seconds in which the processes of a row have to come to an end of their work.
DEADLINE = float(os.environ.get("AMQP_EVENTS_FAULT_SECONDS", "180"))
#: Seconds for which an outbox row stays with a process that may be dead, where relays are started.
LEASE = 6.0
#: Seconds for which a row must be quiet at its end: a message that goes from one queue to another
#: is in neither for as long, by the management API.
QUIET = 2.0


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault, and the work that was in flight when it came.

    Attributes:
        in_flight: what was begun and not settled then: unacked deliveries (as the management API
            had them within a second), and, of publishers, events without an answer; at a point,
            what the process had in hand; of a database, transactions that were open.
    """

    what: str
    at: float
    in_flight: int
    pid: int | None = None
    signal: int | None = None


class Grounds:
    """A broker and a database server, for row after row; a row may kill both.

    Args:
        kind: ``sqlite``, or of a database server.
        node: a broker that rows may kill and that outlives this; None for one of its own.
        disk: a directory for the database, instead of *directory*.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kind: str = "postgresql",
        node: Node | None = None,
        disk: Path | None = None,
    ) -> None:
        self.directory = directory
        self.kind = kind
        directory.mkdir(parents=True, exist_ok=True)
        self.database_disk = disk or directory
        self.node = node or Node.start(directory / "node")
        self._ends_node = node is None
        self.server = None if kind == "sqlite" else SERVERS[kind].start(parent=disk)
        self._template = ""
        self._cluster: list[Node] = []

    def end(self) -> None:
        for node in reversed(self._cluster):
            node.end()
        if self._ends_node:
            self.node.end()
        if self.server is not None:
            self.server.end()

    def ready(self) -> None:
        """See to it that both run, whatever the row before did."""
        if not self.node.alive:
            self.node.start_again()
        else:
            self.node.wait_ready()
        if self.server is not None:
            self.server.start_again()

    def cluster(self) -> list[Node]:
        """Three nodes, all running; a minority that is cut off pauses."""
        config = "cluster_partition_handling = pause_minority"
        while len(self._cluster) < 3:
            peer = self._cluster[0] if self._cluster else None
            directory = self.directory / f"member-{len(self._cluster)}"
            self._cluster.append(Node.start(directory, config_extra=config, peer=peer))
        for node in self._cluster:
            if not node.alive:
                node.start_again()
        for node in self._cluster:
            node.wait_ready()
        return self._cluster

    def database(self) -> Database:
        """A new one with all tables."""
        if not self._template:
            made = Database.new(self.database_disk, self.server)
            self._fill(made)
            self._template = made.name
        return Database.new(self.database_disk, self.server, self._template)

    def _fill(self, database: Database) -> None:
        service = Service(
            url="amqp://nobody@127.0.0.1:1//",
            where=Path(tempfile.mkdtemp(dir=self.directory)),
            name=NAME,
            handlers="faulty",
            environ={"TESTPROJECT_DATABASE": json.dumps(database.settings)},
        )
        service.migrate("faulty")


@dataclass
class World:
    """One row's service. Whatever it starts is gone when :func:`world` ends.

    Attributes:
        events: how many a row publishes, more or less.
        seed: of every choice that is left to chance.
        url: where the service's processes find the broker; a row may put a proxy there.
    """

    grounds: Grounds
    node: Broker
    events: int
    seed: str
    eyes: Eyes
    service: Service
    database: Database
    hits: list[Hit] = field(default_factory=list)
    started: list[Worker] = field(default_factory=list)
    kept: list[Supervisor] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.service.where)
        self._samples: list[tuple[float, int]] = []
        #: How many were started; each says so when it is through.
        self.publishers = 0
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    # -- before

    def arm(self, point: str, *, times: int, of: int = 0, whom: str = "self") -> None:
        """Let processes kill themselves at a point (see testproject's ``points``).

        Args:
            of: how many events will come by; the kills are spread over them.
        """
        points = json.loads(self.service.environ.get("TESTPROJECT_POINTS", "{}"))
        every = max(1, (of or self.events) // (times * 4))
        points[point] = {"times": times, "every": every, "whom": whom, "seed": self.seed}
        self.environ(TESTPROJECT_POINTS=json.dumps(points))

    def environ(self, **more: str) -> None:
        """Add to the environment of processes that are started from now on."""
        self.service.environ = {**self.service.environ, **more}

    def settings(self, **keys: Any) -> None:
        """Add keys to AMQP_EVENTS of processes that are started from now on."""
        self.service.events = {**self.service.events, **keys}

    def proxy(self) -> Proxy:
        """A proxy to the broker, for those who are started with its URL (:meth:`behind`)."""
        proxy = Proxy(self.eyes.url)
        self.proxies.append(proxy)
        return proxy

    @contextmanager
    def behind(self, url: str) -> Iterator[None]:
        """Processes that are started in this block find the broker at *url*."""
        before, self.service.url = self.service.url, url
        try:
            yield
        finally:
            self.service.url = before

    def declare(self) -> None:
        self.service.declare()

    # -- processes

    def worker(self, pool: str = "prefork", concurrency: int = 2, *arguments: str) -> Worker:
        worker = self.service.worker(pool, concurrency, "-Q", ",".join(QUEUES), *arguments)
        self.started.append(worker)
        return worker

    def command(self, *arguments: str, **options: Any) -> Worker:
        """Start ``manage.py`` with these arguments; it is not waited for."""
        started = self.service.start(*arguments, **options)
        self.started.append(started)
        return started

    def reaper(self) -> Worker:
        return self.command("events_reaper")

    def mirror(self) -> Worker:
        return self.command("events_mirror")

    def relay(self) -> Worker:
        """Start a relay, which soon takes over what publishers started from now on leave."""
        self.environ(TESTPROJECT_LEASE=str(LEASE))
        return self.command("events_relay")

    def publisher(self, count: int = 0, **options: Any) -> Worker:
        """Start a process that publishes; options as testproject's ``publishing`` has them."""
        self.publishers += 1
        given = {"count": count or self.events, "seed": f"{self.seed}-{self.publishers}"}
        program = ("-m", "testproject.publishing")
        return self.command(json.dumps({**given, **options}), program=program, name="publisher")

    def keep(self, start: Callable[[], Worker]) -> Supervisor:
        """Start a process, and again whenever it is gone."""
        kept = Supervisor(start)
        self.kept.append(kept)
        return kept

    # -- faults

    def hit(
        self,
        what: str,
        worker: Worker | None = None,
        number: int | None = None,
        *,
        in_flight: int | None = None,
        pid: int | None = None,
    ) -> None:
        """Note a fault that comes now, with what is in flight; send a worker its signal."""
        pid = worker.pid if worker is not None else pid
        if in_flight is None:
            in_flight = self.in_flight()
        self.hits.append(Hit(what, time.time(), in_flight, pid, number))
        if worker is not None and number is not None:
            if number == signal.SIGKILL:
                worker.kill()
            else:
                worker.signal(number)

    def in_flight(self) -> int:
        """Unacked deliveries now, and events that publishers have no answer for."""
        ledger = self.ledger.read()
        pending = len(ledger.intended - ledger.accepted)
        # Running events are unacknowledged, even before the management API shows it.
        return max(self.unacked(time.time()), ledger.in_hand) + pending

    def unacked(self, when: float) -> int:
        """Unacked deliveries in all queues: the most that was seen within a second of a time."""
        samples = list(self._samples)
        first = bisect_right(samples, (when - 1.0, -1))
        return max(
            (number for at, number in samples[first:] if at <= when + 1.0),
            default=0,
        )

    def unacked_in(self, *queues: str) -> int:
        """Return the unacked deliveries of some queues, by the management API."""
        found = self.eyes.http("GET", "/api/queues/{vhost}?columns=name,messages_unacknowledged")
        found = [each for each in found if each and each["name"] in queues]
        return sum(each.get("messages_unacknowledged", 0) for each in found)

    def runs(self) -> int:
        """Return how many runs of handlers have ended."""
        return sum(self.ledger.read().ended.values())

    def _sample(self) -> None:
        path = f"/api/queues/{quote(self.eyes.vhost, safe='')}?columns=messages_unacknowledged"
        while not self._over.wait(SAMPLE):
            with suppress(Exception):
                found = self.node.http("GET", path)
                number = sum(queue.get("messages_unacknowledged", 0) for queue in found if queue)
                self._samples.append((time.time(), number))

    # -- the end

    def progress(self) -> tuple[int, int]:
        """Units that have an end, by the ledgers and the length of the archive, and all."""
        ledger = self.ledger.read()
        return len(ledger.units & ledger.done) + self.archived_number(), len(ledger.units)

    def archived_number(self) -> int:
        """Units in the archive, with copies; 0 where nobody answers."""
        with suppress(Exception):
            return self.eyes.ready(ARCHIVE) + self.rows("archivedevent", "state = 'archived'")
        return 0

    def rows(self, model: str, where: str = "1 = 1") -> int:
        """Count the rows of one of the package's tables."""
        ((number,),) = self.database.rows(model, "count(*)", where)
        return int(number)

    def settle(self, seconds: float = DEADLINE, *, publishers: int | None = None) -> None:
        """Wait until the publishers are through and every unit has an end.

        Raises:
            NotInTime: one of the two takes longer than *seconds*.
        """
        wanted = self.publishers if publishers is None else publishers
        until(lambda: self.ledger.read().through >= wanted, seconds, "everything is published")
        deadline = time.monotonic() + seconds
        busy = time.monotonic()
        while True:
            ended, units = self.progress()
            # Copies in the archive may stand for one unit: what is left shows in the queues.
            if ended < units or self.waiting_number():
                busy = time.monotonic()
            elif time.monotonic() > busy + QUIET:
                return
            if time.monotonic() > deadline:
                raise NotInTime(
                    f"after {seconds:.0f} s {ended} of {units} have an end, "
                    f"{self.waiting_number()} wait"
                )
            time.sleep(0.2)

    def waiting_number(self) -> int:
        """Messages in queues other than the archive, and rows in the outbox."""
        try:
            totals = self.eyes.totals(NAME)
            return sum(number for queue, number in totals.items() if queue != ARCHIVE) + self.rows(
                "outboxevent"
            )
        except Exception:  # noqa: BLE001 - it may be away just now
            return 1

    def count(self) -> Counts:
        """Stop everything and do the sum."""
        self.stop()
        with suppress(AssertionError):
            until(self._back, 30, "what the dead had in hand is back in its queues")
        archived = {*self.archive_messages(), *self.archive_rows()}
        waiting = self.waiting()
        return count(
            self.ledger.read(),
            effects=self.database.effects,
            archived=archived,
            waiting=waiting,
            stuck=self._stuck() if waiting or self.waiting_number() else 0,
        )

    def archive_messages(self) -> list[Unit]:
        """Take the messages off the archive's queue; return the units that failed."""
        found = Archive(self.eyes, NAME).collect()
        return [unit(entry["event_id"], entry["handler"]) for entry in found]

    def archive_rows(self, where: str = "1 = 1") -> list[Unit]:
        """Return the units that rows of the archive are of."""
        return [unit(*row) for row in self.database.rows("archivedevent", UNIT, where)]

    def _stuck(self) -> int:
        """Messages that a queue has and gives to nobody: dead letters without a confirm."""
        time.sleep(2)  # the management API is behind
        return sum(number for queue, number in self.eyes.totals(NAME).items() if queue != ARCHIVE)

    def _back(self) -> bool:
        """Whether nobody consumes and nothing is unacked."""
        columns = "?columns=consumers,messages_unacknowledged"
        # Of a queue of which it has no figures yet the management API says [].
        return not any(
            not queue or queue.get("consumers", 1) or queue.get("messages_unacknowledged", 1)
            for queue in self.eyes.http("GET", f"/api/queues/{{vhost}}{columns}")
        )

    def waiting(self) -> set[Unit]:
        """Take the messages off all queues but the archive; return them and outbox rows."""
        found: set[Unit] = {
            (str(event_id), handler)
            for (event_id,) in self.database.rows("outboxevent", "event_id")
            for handler in HANDLERS
        }
        # First those that messages leave by themselves, at the end those that they go to.
        queues = sorted(self.eyes.totals(NAME), key=lambda queue: ":delay" not in queue)
        for queue in [*queues, *(queue for queue in QUEUES if queue in queues)]:
            # A worker's own queue for remote control goes with it.
            if queue == ARCHIVE or queue.endswith(".pidbox"):
                continue
            for message in self.eyes.take(queue):
                # A dead letter's key is the handler's queue that it comes from.
                home = message.delivery_info["routing_key"] if ":" in queue else queue
                name = str(message.headers.get(headers.EVENT_HANDLER) or home)
                # The message of a copy has its own id.
                own = message.headers.get(headers.EVENT_ID)
                found.add(unit(own or message.properties.get("message_id"), name))
        return found

    def proof(self) -> list[Hit]:
        """All hits: those that the row made, and those at the points."""
        at_points = [
            Hit(
                f"killed, {line['point']}",
                line["at"],
                # An event at a point of the worker is not acknowledged yet.
                max(self.unacked(line["at"]), line["hand"], 1),
                line["pid"],
                line["signal"],
            )
            for line in self.ledger.read().kills
        ]
        return sorted([*self.hits, *at_points], key=lambda hit: hit.at)

    def stop(self) -> None:
        """Kill what still runs."""
        for kept in self.kept:
            kept.end()
        for kept in self.kept:
            for worker in kept.workers:
                worker.kill()
        for worker in self.started:
            worker.kill()
        self.kept.clear()
        self.started.clear()

    def close(self) -> None:
        self._over.set()
        self.stop()
        for proxy in self.proxies:
            proxy.end()
        self._sampler.join(10)
        self.eyes.close()


@contextmanager
def world(
    grounds: Grounds,
    *,
    name: str,
    events: int,
    seed: str,
    nodes: Sequence[Node] = (),
) -> Iterator[World]:
    """A world for one row; on the nodes of a cluster, whose first one the row leaves alone."""
    grounds.ready()
    nodes = nodes or [grounds.node]
    node = nodes[0]
    vhost = f"{name}-{uuid4().hex[:8]}"
    node.add_vhost(vhost)
    database = grounds.database()
    service = Service(
        url=";".join(each.amqp_url(vhost) for each in nodes),
        where=Path(tempfile.mkdtemp(prefix=f"{name}-", dir=grounds.directory)),
        name=NAME,
        handlers="faulty",
        # PUBLISH is testproject's "immediate" only until a publisher says otherwise.
        events={"TOPOLOGY": "verify", "CONFIRM_TIMEOUT": 10},
        celery={"worker_lost_wait": 1, "worker_cancel_long_running_tasks_on_connection_loss": True},
        environ={
            "TESTPROJECT_DATABASE": json.dumps(database.settings),
            "TESTPROJECT_LEASE": "60",
        },
    )
    here = World(
        grounds=grounds,
        node=node,
        events=events,
        seed=seed,
        eyes=Eyes(node, vhost),
        service=service,
        database=database,
    )
    try:
        yield here
    finally:
        here.close()
        with suppress(Exception):
            node.delete_vhost(vhost)
