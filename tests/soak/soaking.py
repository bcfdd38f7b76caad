"""A service under a schedule of faults, from its first event to the check of its history."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from broker import BrokerError, Node
from tests.acceptance.harness import Service, Worker
from tests.acceptance.isolation import Supervisor
from tests.faults.counts import HANDLERS, unit
from tests.faults.world import ARCHIVE, NAME, QUEUES, QUIET, World
from tests.service_database import hex_id
from tests.waiting import NotInTime, Stopwatch, until

from . import history
from .faults import FAULTS, Missed, repair, step_clock
from .history import Discarded, Ended, Failed, Figures, Policy, Replayed, Wrong
from .schedule import Step

#: As testproject's `faulty` declares.
POLICY: Final = Policy(
    handlers=frozenset(HANDLERS), once="effect", attempts=3, delay=1.0, limited=frozenset({"call"}),
    limit=15.0,
)  # fmt: skip
#: Seconds; more than a process is suspended for, and than the database may take before a run.
TIME_LIMIT: Final = 2 * POLICY.limit
#: Of a publishing process, before another one takes its place.
EVENTS: Final = 200
#: Mode and format of each.
PUBLISHERS: Final = (("outbox", "celery"), ("outbox", "cloudevents"), ("immediate", "json"))
#: Users of the admin.
OPERATORS: Final = ("ann", "bob")
#: Shares of the events that fail once, that fail until a fix is released, and that kill their
#: process or hang until then; and of the large ones.
PASSING, LASTING, DEADLY, HANGING, LARGE = 0.15, 0.1, 0.002, 0.002, 0.005
#: Seconds between two transactions of five events.
PAUSE: Final = 0.25
CONFIRM_TIMEOUT, HEARTBEAT, LEASE = 4, 4, 16.0  # seconds
#: Seconds without progress after which something is stuck.
PATIENCE: Final = 300.0
#: Seconds of a warm shutdown. It takes a minute to notice that a connection is half-open.
STOP: Final = 90.0
ROUNDS: Final = 10  # of replays at the end
ALERTED: Final = 90.0  # seconds; the mirror looks for alerts twice a minute
COMMANDS: Final = ("events_mirror", "events_reaper", "events_relay", "events_batches")
#: Of the service, in the order in which they start.
PROCESSES: Final = ("prefork", "threads", "mirror", "reaper", "relay", "batches")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
#: By how much a process may grow. Connections come and go; what leaks comes with each fault.
DESCRIPTORS, MEGABYTES = 20, 64


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a run.

    Attributes:
        wrong: what must not be, the worst first; empty if all is well.
        story: of the event of what is worst.
        came: faults by kind, without those that could not be done.
        sizes: of each process at the beginning and at the end.
    """

    seed: int
    wrong: Sequence[Wrong]
    story: Sequence[str]
    figures: Figures
    came: Counter[str]
    sizes: Sequence[str]


@dataclass
class Soak:
    """One run.

    Attributes:
        fixed: while this file exists, no event fails for good.
        malformed: ids of messages that no handler can read, once they are confirmed.
        sizes: of each process at the beginning and at the end.
    """

    world: World
    nodes: Sequence[Node]
    seed: int
    malformed: set[str] = field(default_factory=set)
    came: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.node = self.nodes[0]
        self.fixed: Path = self.world.service.where / "fixed"
        self.proxy = self.world.proxy()
        self.processes: list[Supervisor] = []
        self.publishers: list[Supervisor] = []
        self.operators: list[Supervisor] = []
        #: Files that step the clocks of processes.
        self.clocks: list[Path] = []
        self.sending = threading.Lock()
        self._commands: list[Worker] = []
        self._numbers = iter(range(1, 1_000_000))
        alone = ("broker", "database", "proxy", "workers")
        self._locks = {name: threading.Lock() for name in alone}
        self._failed: list[str] = []
        self.sizes: list[str] = []

    # -- what runs

    def start(self) -> None:
        """Start the service, half of it behind the proxy, and wait until it handles events.

        What ends is started again.
        """
        world = self.world
        world.settings(CONFIRM_TIMEOUT=CONFIRM_TIMEOUT)
        world.service.celery = {**world.service.celery, "broker_heartbeat": HEARTBEAT}
        world.environ(
            TESTPROJECT_LEASE=str(LEASE),
            TESTPROJECT_HEARTBEAT=str(HEARTBEAT),
            TESTPROJECT_TIME_LIMIT=str(TIME_LIMIT),
            TESTPROJECT_EPOCH=str(time.time() - time.monotonic()),
        )
        world.declare()
        queues = ("-Q", ",".join(QUEUES))
        near, far = world.service, replace(world.service, url=self.proxy.url)
        for start in (
            partial(self._clocked(near).worker, "prefork", 2, *queues),
            partial(self._clocked(far).worker, "threads", 4, *queues),
            *(partial(self._clocked(near).start, command) for command in COMMANDS[:2]),
            *(partial(self._clocked(far).start, command) for command in COMMANDS[2:]),
        ):
            self.processes.append(world.keep(start))
        for number, (mode, form) in enumerate(PUBLISHERS):
            service = self._clocked(near if number % 2 else far)
            service = replace(service, events={**service.events, "FORMAT": form})
            options = {
                "count": EVENTS, "mode": mode, "size": 5, "pause": PAUSE,
                "passing": PASSING, "lasting": LASTING, "deadly": DEADLY, "hanging": HANGING,
                "large": LARGE, "work": 0.02, "patience": 600.0,
            }  # fmt: skip
            publish = partial(self._run, service, "publishing", "publisher", **options)
            self.publishers.append(world.keep(publish))
        office = {**near.environ, "TESTPROJECT_ADMIN": "yes"}
        offices = [
            replace(service, environ=office, events={**service.events, "EDITING": True})
            for service in (near, far)
        ]
        offices[0].python(f"from testproject.operating import prepare\nprepare({OPERATORS!r})")
        for user, service in zip(OPERATORS, map(self._clocked, offices), strict=True):
            operate = partial(self._run, service, "operating", user, user=user)
            self.operators.append(world.keep(operate))
        until(lambda: world.ledger.read().done, "the first event is handled", PATIENCE)
        self._began = self._measure()

    @property
    def workers(self) -> Sequence[Supervisor]:
        return self.processes[:2]

    def _measure(self) -> Sequence[tuple[int, int]]:
        """Return the open descriptors and the memory (MB) of each process of the service."""
        sizes = []
        for kept in self.processes:
            about = Path(f"/proc/{kept.workers[-1].pid}")
            try:
                pages = int((about / "statm").read_text().split()[1])
                sizes.append((len(list((about / "fd").iterdir())), pages * PAGE >> 20))
            except OSError:  # it has just ended
                sizes.append((0, 0))
        return sizes

    def _run(self, service: Service, module: str, name: str, **options: Any) -> Worker:
        """Start a program, each time with another seed: the events of a killed one are its own."""
        options["seed"] = f"{self.seed}-{next(self._numbers)}"
        program = ("-m", f"testproject.{module}")
        return service.start(json.dumps(options), program=program, name=name)

    def _clocked(self, service: Service) -> Service:
        """Return a service whose processes have a clock that can be stepped."""
        file = service.where / f"clock-{len(self.clocks)}"
        step_clock(file, 0)
        self.clocks.append(file)
        return replace(service, environ={**service.environ, "TESTPROJECT_CLOCK": str(file)})

    def command(self, *arguments: str) -> Worker:
        """Run a management command; it may fail while something else is away."""
        started = self.world.service.start(*arguments)
        self._commands.append(started)
        return started

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Let one fault at a time affect a server, the proxy or all workers.

        Raises:
            Missed: another one is.
        """
        if not self._locks[what].acquire(blocking=False):
            raise Missed(f"another fault of the {what} lasts")
        try:
            yield
        finally:
            self._locks[what].release()

    # -- what comes

    def endure(self, steps: Sequence[Step], seconds: float, tell: Callable[[str], None]) -> None:
        """Let the faults come in their time, each in a thread of its own."""
        self.began, began = time.time(), time.monotonic()
        threads: list[threading.Thread] = []
        for step in steps:
            time.sleep(max(0.0, began + step.at - time.monotonic()))
            thread = threading.Thread(target=self._come, args=(step, tell))
            thread.start()
            threads.append(thread)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        self.over.set()
        for thread in threads:
            thread.join()
        try:
            repair(self)
        except (BrokerError, NotInTime) as exc:
            self._failed.append(str(exc))

    def _come(self, step: Step, tell: Callable[[str], None]) -> None:
        try:
            FAULTS[step.fault](self, step)
        except (Missed, BrokerError) as missed:  # what a fault leaves behind, repair() undoes
            tell(f"{step}  missed: {missed}")
        except Exception as exc:  # noqa: BLE001 - the test's own failure is no fault of the product
            self._failed.append(f"{step}: {exc!r}")
            tell(f"{step}  FAILED: {exc!r}")
        else:
            self.came[step.fault] += 1
            tell(str(step))

    # -- the end

    def settle(self) -> None:
        """Let publishers finish, replay what is archived, and wait until nothing is on its way.

        Raises:
            NotInTime: something still is.
        """
        for kept in [*self.publishers, *self.operators]:
            kept.end()
        for kept in self.operators:
            kept.workers[-1].signal(signal.SIGTERM)
        alive = [kept.workers[-1] for kept in self.publishers]
        until(lambda: not any(each.alive for each in alive), "all is published", PATIENCE)
        for _ in range(ROUNDS):
            self._quiet()
            if not self._open():
                return
            with suppress(subprocess.TimeoutExpired):
                self.command("events_replay", "--all").wait(PATIENCE)
        raise NotInTime(f"after {ROUNDS} replays, {self._open()} are still archived")

    def _open(self) -> int:
        """Archived units that a replay could help."""
        return self.world.rows("archivedevent", "state = 'archived' AND reason <> 'malformed'")

    def _quiet(self) -> None:
        """Wait until nothing has been on its way for a while.

        Raises:
            NotInTime: as much is on its way as long before.
        """
        least, since = -1, Stopwatch()
        while least or since.seconds < QUIET:
            left = self._left()
            number = sum(left.values())
            if number < least or least < 1 <= number or least < 0:
                least, since = number, Stopwatch()
            if since.seconds > PATIENCE:
                raise NotInTime(", ".join(f"{n} of {what}" for what, n in left.items() if n))
            time.sleep(0.5)

    def _left(self) -> Mapping[str, int]:
        """Return how much is on its way, by the place where it is."""
        rows = self.world.rows
        try:
            return {
                **self.world.eyes.totals(NAME),
                "outbox": rows("outboxevent"),
                "replays": rows("archivedevent", "state IN ('queued', 'replaying')"),
                "batches": rows("replaybatch", "state = 'running'"),
            }
        except Exception as exc:  # noqa: BLE001 - the broker or the database is down
            return {repr(exc): 1}

    def stop(self) -> list[str]:
        """Stop all processes with a warm shutdown; return what is left behind."""
        left: list[str] = []
        for kept in self.processes:
            kept.end()
            kept.workers[-1].signal(signal.SIGTERM)
        for worker in [*self._commands, *(kept.workers[-1] for kept in self.processes)]:
            try:
                until(lambda: not worker.alive, f"{worker.name} stops", STOP)  # noqa: B023
            except NotInTime:
                left.append(f"{worker.name} does not stop: {worker.log[-2000:]}")
        for kept in [*self.processes, *self.publishers, *self.operators]:
            for worker in kept.workers:
                # What was killed may have children that are about to notice.
                with suppress(ProcessLookupError, NotInTime):
                    until(partial(_is_gone, worker.pid), f"the group of {worker.name} ends", 10)
                    continue
                left.append(f"processes of {worker.name}")
        # Of a half-open connection RabbitMQ hears nothing, and publishers' have no heartbeats.
        self.proxy.end()
        self.world.eyes.close()
        for what in ("connections", "channels"):
            path = f"/api/vhosts/{{vhost}}/{what}"
            with suppress(NotInTime):
                until(lambda: not self.world.eyes.http("GET", path), f"no {what}", 20)  # noqa: B023
            left += [f"{what}: {each.get('name')}" for each in self.world.eyes.http("GET", path)]
        return left

    def _grown(self) -> list[str]:
        """Return the processes that need much more than at the beginning."""
        grown = []
        sizes = zip(PROCESSES, self._began, self._measure(), strict=True)
        for name, (files, memory), (files_now, memory_now) in sizes:
            size = f"{name}: {files} to {files_now} descriptors, {memory} to {memory_now} MB"
            self.sizes.append(size)
            grew = files_now > files + DESCRIPTORS or memory_now > memory + MEGABYTES
            if files and grew:  # it ran when it was measured first
                grown.append(size)
        return grown

    def end(self) -> Result:
        """Stop everything, and check the history."""
        try:
            self.settle()
        except NotInTime as exc:
            self._failed.append(str(exc))
        self._failed += [
            f"{worker.name} ended with {worker.process.returncode}: {worker.log[-1000:]}"
            for kept in [*self.publishers, *self.operators]
            for worker in kept.workers
            if (worker.process.returncode or 0) > 0  # and not by a signal
        ]
        with suppress(NotInTime):
            until(lambda: {key for _, key in self._alerts()} == self._troubled(), "alerts", ALERTED)
        troubled, alerts, told = self._troubled(), self._alerts(), self._told()
        left = [*self._grown(), *self.stop()]
        world = self.world
        query, rows = world.database.query, world.database.rows
        archived = [*world.archive_messages(), *world.archive_rows("state = 'archived'")]
        totals = world.eyes.totals(NAME)
        ended = Ended(
            archived=frozenset(archived),
            waiting=frozenset(world.waiting()),
            effects=world.database.effects,
            sent_malformed=frozenset(self.malformed),
            failures=[
                Failed(*unit(event_id, handler), hex_id(replay) if replay else None, reason)
                for event_id, handler, replay, reason in query(
                    "SELECT e.event_id, e.handler, f.replay_id, f.reason "
                    "FROM django_amqp_events_archivedfailure f "
                    "JOIN django_amqp_events_archivedevent e ON e.id = f.event_id"
                )
            ],
            troubled=frozenset(troubled),
            alerts=frozenset(alerts),
            figures=told,
            replays=[
                Replayed(hex_id(pk), *unit(event_id, handler), state, hex_id(row), version, edit)
                for pk, event_id, handler, state, row, version, edit in query(
                    "SELECT r.id, e.event_id, e.handler, r.state, e.id, r.version, "
                    "COALESCE(v.reason, '') "
                    "FROM django_amqp_events_replay r "
                    "JOIN django_amqp_events_archivedevent e ON e.id = r.event_id "
                    "LEFT JOIN django_amqp_events_revision v ON v.id = r.revision_id "
                    "WHERE r.number IS NOT NULL"
                )
            ],
            discarded=[
                Discarded(hex_id(row), *unit(event_id, handler))
                for row, event_id, handler in rows(
                    "archivedevent", "id, event_id, handler", "state = 'discarded'"
                )
            ],
            actions=[
                (by, token, hex_id(row))
                for by, token, row in rows("archiveaction a", "a.by, a.reason, a.event_id")
                if by in OPERATORS
            ],
            recorded=frozenset(
                hex_id(replay)
                for (replay,) in rows("archiveaction", "replay_id", "replay_id IS NOT NULL")
            ),
            messages={queue: number for queue, number in totals.items() if queue != ARCHIVE},
            failed=self._failed,
            left=left,
        )
        lines = world.service.ledger()
        for line in lines:
            if line.get("replay"):
                line["replay"] = hex_id(line["replay"])
        wrong, figures = history.check(lines, ended, POLICY)
        story = history.story(lines, wrong[0].event, self.began) if wrong else ()
        return Result(self.seed, wrong, story, figures, self.came, self.sizes)

    def _troubled(self) -> set[str]:
        """Return the failure groups that have open events."""
        where = "state = 'archived' AND group_id IS NOT NULL"
        rows = self.world.database.rows("archivedevent", "DISTINCT group_id", where)
        return {hex_id(group) for (group,) in rows}

    def _alerts(self) -> set[tuple[str, str]]:
        """Return the open alerts, without those of growth, which a soak has by design."""
        rows = self.world.database.rows("alert a", "a.kind, a.key", "a.ended IS NULL")
        return {(kind, hex_id(key)) for kind, key in rows if kind != "growth"}

    def _told(self) -> dict[str, tuple[int, int]]:
        """Return figures of ``events_status``, each with what the tables have."""
        _, told = self.world.service.command("events_status", "--format", "json")
        try:
            document = json.loads(told)
        except ValueError:
            self._failed.append(f"events_status: {told[-1000:]}")
            return {}
        return {
            "archived": (
                document["archive"]["open"],
                self.world.rows("archivedevent", "state = 'archived'"),
            ),
            "in the outbox": (
                sum(each["total"] or 0 for each in document["outbox"]),
                self.world.rows("outboxevent"),
            ),
        }


def _is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def soak(
    world: World,
    nodes: Sequence[Node],
    seed: int,
    steps: Sequence[Step],
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Run one schedule on a world of its own."""
    run = Soak(world, nodes, seed)
    run.start()
    run.endure(steps, seconds, tell)
    return run.end()
