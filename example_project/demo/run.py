"""One run of the demo, from an empty broker to the verdict, and its end whatever happens."""

from __future__ import annotations

import json
import queue
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from . import evidence, keeping
from .evidence import Ledger, Result, Shape
from .place import RUN, Place, node_processes, shown
from .processes import ROOT, DemoError, Service, Worker, stop, until
from .report import report
from .screen import BOLD, DIM, GREEN, RED, YELLOW, Screen

from broker import Node  # isort: skip - processes.py has its path

ORDERS = ROOT / "example_project" / "orders.jsonl"
SERVICES = ("shop", "billing")
#: Seconds without anything happening after which the demo gives up waiting.
PATIENCE = 30.0
#: Seconds between looks at ledgers and queues.
LOOK = 0.4


class Demo:
    """One run.

    Args:
        orders: how many lines of orders, all where it is ``None``.
        keep: leave broker and workers running.
    """

    def __init__(self, screen: Screen, *, orders: int | None, keep: bool) -> None:
        self.screen = screen
        self.limit = orders
        self.keep = keep
        self.place: Place | None = None
        self.workers: list[Worker] = []
        self.reports: list[dict[str, Any]] = []
        self.shapes: list[Shape] = []
        self.refused: list[dict[str, Any]] = []
        self.begun = self.kept = False
        self.ledgers = {name: Ledger(RUN / f"{name}.sqlite3") for name in SERVICES}

    def run(self) -> int:
        """Run it and return the exit code.

        Raises:
            DemoError, BrokerError: it cannot go on.
        """
        for path in RUN.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (RUN / "log").mkdir()
        self.screen.write(self.screen.paint("A shop and its billing, on one RabbitMQ", BOLD))
        self.screen.write()
        self.prepare()
        self.start_workers()
        with self.broker() as broker:
            self.watch(broker)
            if not self.keep:
                # Without workers nothing is in anybody's hands, so the counts are exact.
                self.screen.status("stopping the workers …")
                stop(self.workers)
            result = self.take_stock(broker)
        if self.keep:
            assert self.place is not None  # noqa: S101 - prepared
            keeping.write(self.place, self.workers, self.reports)
            keeping.explain(self.screen, self.place, self.services[0])
            self.kept = True
        return self.verdict(result)

    def prepare(self) -> None:
        """Broker, databases, topology."""
        screen = self.screen
        with ThreadPoolExecutor(2) as pool:
            # The databases need no broker.
            migrations = [
                pool.submit(service(name).manage, "migrate", "--verbosity", "0")
                for name in SERVICES
            ]
            screen.status("starting RabbitMQ …")
            self.begun = True
            self.place = Place.find(keep=self.keep)
            screen.step("broker", self.place.text)
            for migration in migrations:
                migration.result()
            screen.step("databases", f"SQLite, one per service, in {shown(RUN)}")
            self.services = [service(name, self.place) for name in SERVICES]
            screen.status("manage.py events_declare …")
            declared = [pool.submit(one.manage_json, "events_declare") for one in self.services]
            self.reports = [each.result() for each in declared]
        self.shapes = [Shape.of(each) for each in self.reports]
        sizes = [f"{s.service} {len(s.handlers)} handlers" for s in self.shapes]
        queues = sum(len(shape.queues) for shape in self.shapes)
        screen.step("topology", f"{', '.join(sizes)}, {queues} queues, by events_declare")

    def start_workers(self) -> None:
        shop, billing = self.services
        # Two services on one vhost: without a name of its own the second worker of a machine
        # finds the remote control queue of the first one locked.
        pool = ("--pool", "prefork", "--concurrency", "1", "--loglevel", "WARNING")
        commands: list[tuple[Service, *tuple[str, ...]]] = [
            (shop, "manage.py", "events_worker", "--hostname", "shop@%h", *pool),
            # An ordinary worker has the ordinary tasks too.
            (billing, "-m", "celery", "--app", "example_project", "worker",
             "--hostname", "billing@%h", *pool),
        ]  # fmt: skip
        self.screen.status("starting the workers …")
        for each, *command in commands:
            self.workers.append(Worker.start(each, *command, keep=self.keep))
        with self.broker() as broker:
            queues = [name for shape in self.shapes for name in shape.handlers]

            def ready() -> bool:
                for worker in self.workers:
                    worker.complain()
                return all(broker.depth(name)[1] for name in queues)

            until(ready, 60, f"the workers do not consume; look into {shown(RUN / 'log')}")
        for worker in self.workers:
            worker.look()
        self.screen.step("workers", "shop: manage.py events_worker; billing: celery worker")

    # -- watching -------------------------------------------------------------------------

    def watch(self, broker: evidence.Broker) -> None:
        """Publish the orders and look on until everything is settled, or nothing moves."""
        intake = Intake(self.services[0], self.limit)
        total = min(len(ORDERS.read_bytes().splitlines()), self.limit or sys.maxsize)
        self.screen.step("orders", f"{shown(ORDERS)}, by manage.py place_orders")
        moved, before = time.monotonic(), State()
        while True:
            intake.read()
            for worker in self.workers:
                worker.complain()
            state = self.look(broker)
            self.show(state, intake, total)
            if intake.ended and state.settled >= state.expected:
                break
            if state != before or not intake.ended:
                moved, before = time.monotonic(), state
            if time.monotonic() - moved > PATIENCE:
                break  # the table tells what waits
            time.sleep(LOOK)
        self.refused = intake.refused
        self.screen.clear()

    def look(self, broker: evidence.Broker) -> State:
        state = State()
        published = Counter(name for one in self.ledgers.values() for _, name in one.published())
        for shape in self.shapes:
            depths = broker.depths(shape.watched)
            counts = self.ledgers[shape.service].counts()
            state.archived[shape.service] = depths[shape.archive]
            for name, handler in shape.handlers.items():
                handled, retried = counts.get(handler, (0, 0))
                expected = sum(n for key, n in published.items() if handler in shape.wants(key))
                state.rows.append(
                    (shape.service, handler, expected, handled, depths[name], retried)
                )
            for name, count in depths.items():
                if count and shape.queues[name] == "delay":
                    state.delayed[f"{shape.service} {name.rpartition('.')[2]}"] = count
        return state

    def show(self, state: State, intake: Intake, total: int) -> None:
        screen = self.screen
        refused = f"{len(intake.refused)} refused"
        delayed = ", ".join(f"{queue}: {count}" for queue, count in state.delayed.items())
        archived = ", ".join(f"{name} {count}" for name, count in state.archived.items())
        head = ("service", "handler", "", "handled", "of", "waiting", "retried")
        rows = [
            (service, handler, small_bar(handled, expected), handled, expected, waiting, retried)
            for service, handler, expected, handled, waiting, retried in state.rows
        ]
        block = [
            "",
            f"  orders   {screen.bar(intake.lines, total)} {intake.lines} of {total}, {refused}",
            "",
            *screen.table(head, rows),
            "",
            f"  delayed on the broker   {delayed or 'nothing'}",
            f"  archived                {archived}",
        ]
        plain = (
            f"{intake.lines}/{total} orders, {refused}; handled {state.handled} of "
            f"{state.expected}, retried {sum(row[5] for row in state.rows)}, archived "
            f"{sum(state.archived.values())}; delayed {delayed or 'nothing'}"
        )
        screen.live(block, plain)

    # -- the end --------------------------------------------------------------------------

    def take_stock(self, broker: evidence.Broker) -> Result:
        """Count what is where, and show it."""
        depths = broker.depths(name for shape in self.shapes for name in shape.queues)
        archives = {shape.service: broker.peek(shape.archive) for shape in self.shapes}
        result = evidence.account(self.shapes, self.ledgers, depths, archives)
        self.screen.clear()
        report(self.screen, result, refused=self.refused, ledgers=self.ledgers, archives=archives)
        for shape in self.shapes:
            found, now = len(archives[shape.service]), broker.depth(shape.archive)[0]
            if now < found:
                raise DemoError(f"reading {shape.archive} has taken {found - now} events from it")
        return result

    def verdict(self, result: Result) -> int:
        screen = self.screen
        seconds = time.monotonic() - screen.began
        screen.write()
        if result.lost:
            screen.write(f"  {screen.paint(f'{result.lost} events are lost', BOLD, RED)}:")
            for handler, event_id in sorted(result.missing)[:10]:
                screen.write(f"    {handler} {event_id}")
            return 1
        if result.waiting:
            waiting = f"{result.waiting} messages waited still after {PATIENCE:.0f} s of silence"
            screen.write(f"  Nothing is lost, but {screen.paint(waiting, YELLOW)}.")
            screen.write(f"  Remedy: look into {shown(RUN / 'log')}, then run it again")
            return 1
        screen.write(
            f"  {screen.paint('Nothing was lost.', BOLD, GREEN)} {seconds:.0f} s. "
            + screen.paint(f"Databases, mails and logs: {shown(RUN)}", DIM)
        )
        return 0

    def clean_up(self) -> None:
        """End everything that was started, whatever has happened; bounded in time."""
        if self.kept or not self.begun:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self.screen.status("stopping …")
        # A node whose start was interrupted is found by its folder.
        node = self.place.node if self.place else Node.attach(RUN / "broker")
        ended = node_processes(node) if node is not None else []
        stop(self.workers)
        ended += [process for worker in self.workers for process in worker.processes]
        try:
            if self.place is not None:
                self.place.clear_away(self.shapes)
            elif node is not None:
                node.end()
        except Exception as exc:  # noqa: BLE001 - the broker may be what has failed
            print(f"demo: not cleared away on the broker: {exc}", file=sys.stderr)
        self.screen.clear()
        left = [process.pid for process in ended if process.alive]
        if left:
            print(f"demo: still running: {left}; end them with kill -9", file=sys.stderr)
        elif ended:
            text = f"  {len(ended)} processes stopped, none is left"
            self.screen.write(self.screen.paint(text, DIM))

    @contextmanager
    def broker(self) -> Iterator[evidence.Broker]:
        assert self.place is not None  # noqa: S101 - made first
        connected = evidence.Broker(self.place.url)
        try:
            yield connected
        finally:
            with suppress(Exception):
                connected.close()


@dataclass(slots=True)
class State:
    """A look at ledgers and queues while things go on."""

    #: service, handler, expected, handled, waiting, retried
    rows: list[tuple[str, str, int, int, int, int]] = field(default_factory=list)
    delayed: dict[str, int] = field(default_factory=dict)
    archived: dict[str, int] = field(default_factory=dict)

    @property
    def expected(self) -> int:
        return sum(row[2] for row in self.rows)

    @property
    def handled(self) -> int:
        return sum(row[3] for row in self.rows)

    @property
    def settled(self) -> int:
        return self.handled + sum(self.archived.values())


class Intake:
    """`manage.py place_orders`, read as it goes on."""

    def __init__(self, shop: Service, limit: int | None) -> None:
        self.lines = 0
        self.refused: list[dict[str, Any]] = []
        self.ended = False
        self._queue: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        command = ["place_orders", str(ORDERS), "--format", "json"]
        command += ["--limit", str(limit)] if limit else []
        threading.Thread(target=self._run, args=(shop, command), daemon=True).start()

    def _run(self, shop: Service, command: list[str]) -> None:
        try:
            for line in shop.lines(*command):
                self._queue.put(json.loads(line))
            self._queue.put({"ended": True})
        except Exception as exc:  # noqa: BLE001 - it is raised where it is read
            self._queue.put(exc)

    def read(self) -> None:
        """Take in what was said since the last time.

        Raises:
            DemoError: the command has failed.
        """
        while not self._queue.empty():
            entry = self._queue.get()
            if isinstance(entry, Exception):
                raise entry
            if "line" in entry:
                self.lines += 1
                if entry["outcome"] != "published":
                    self.refused.append(entry)
            self.ended = self.ended or "ended" in entry


def service(name: str, place: Place | None = None) -> Service:
    """Return a service; without a place only what needs no broker."""
    environment = {"EXAMPLE_DATA": str(RUN)}
    if place is not None:
        environment |= {"AMQP_URL": place.url, "EXAMPLE_PREFIX": place.prefix}
        if place.management_url:
            environment["AMQP_MANAGEMENT_URL"] = place.management_url
    return Service(name=name, environment=environment, data=RUN)


def small_bar(done: int, total: int) -> str:
    length = 12
    filled = length if done and done >= total else done * length // total if total else 0
    return "█" * filled + "░" * (length - filled)
