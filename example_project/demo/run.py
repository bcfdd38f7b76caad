"""One run of the demo, from an empty broker to the verdict, and its end whatever happens."""

from __future__ import annotations

import json
import queue
import secrets
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from example_project.releases import NOTES

from . import accounting, state_file
from .accounting import Ledger, Result, ServiceTopology
from .admin_user import AdminUser, answers
from .processes import ROOT, Service, Worker, stop, until
from .report import report, report_again
from .sandbox import RUN, Sandbox, pick_ports, shown
from .screen import BOLD, DIM, GREEN, RED, YELLOW, Screen

from broker import Node  # isort: skip - processes.py has its path
from machine import Process  # isort: skip

ORDERS = ROOT / "example_project" / "orders.jsonl"
SERVICES = ("shop", "billing")
#: Who may log in to the admin.
USER = "demo"
#: Seconds without anything happening after which the demo gives up waiting.
PATIENCE = 30.0
#: Seconds between looks at ledgers and queues.
LOOK = 0.4


class Demo:
    """One run.

    Args:
        orders: how many lines of orders, all where it is ``None``.
        keep: leave everything running.
        ports: of the services' web servers, where these are free.
    """

    def __init__(
        self,
        screen: Screen,
        *,
        orders: int | None = None,
        keep: bool = False,
        ports: Sequence[int] = (),
    ) -> None:
        self.screen = screen
        self.limit = orders
        self.keep = keep
        self.ports = ports
        self.sandbox: Sandbox | None = None
        self.release = 1
        self.services: list[Service] = []
        self.workers: list[Worker] = []
        self.webs: list[Worker] = []
        self.ended: list[Process] = []
        self.reports: list[dict[str, Any]] = []
        self.shapes: list[ServiceTopology] = []
        self.refused: list[dict[str, Any]] = []
        self.addresses: dict[str, str] = {}
        self.password = secrets.token_urlsafe(9)
        self.user = USER
        #: The broker may run; workers have been started; somebody is served.
        self.begun = self.working = self.served = False
        self.kept = False
        self.ledgers = {name: Ledger(RUN / f"{name}.sqlite3") for name in SERVICES}

    def run(self) -> int:
        """Run it and return the exit code.

        Raises:
            DemoError, BrokerError: it cannot go on.
        """
        self.set_up()
        with self.broker() as broker:
            self.start(broker, web=False)
            self.publish(broker)
            self.screen.status("stopping the workers …")
            # Without workers nothing is in anybody's hands, so the counts are exact.
            self.stop_workers()
            result = self.take_stock(broker)
            if result.lost or result.waiting:
                return self.verdict(result)
            self.roll_out(broker)
            self.replay()
            self.watch(broker)
            if not self.keep:
                self.screen.status("stopping the workers …")
                self.stop_workers()
            result = self.take_stock(broker, again=True)
        if self.keep:
            state_file.write(self)
            state_file.explain(self.screen, self)
            self.screen.write("  stop        make demo ARGS=--stop")
            self.kept = True
        return self.verdict(result, final=True)

    # -- beginning ------------------------------------------------------------------------

    def set_up(self) -> None:
        """Broker, databases with a user for the admin, topology."""
        for path in RUN.iterdir():
            if path.name not in state_file.STAYS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (RUN / "log").mkdir()
        screen = self.screen
        screen.write(screen.paint("A shop and its billing, on one RabbitMQ", BOLD))
        screen.write()
        with ThreadPoolExecutor(2) as pool:
            # The databases need no broker.
            databases = [pool.submit(self.make_database, service(name)) for name in SERVICES]
            screen.status("starting RabbitMQ …")
            self.begun = True
            self.sandbox = Sandbox.find(keep=self.keep)
            screen.step("broker", self.sandbox.text)
            for database in databases:
                database.result()
            screen.step("databases", f"SQLite, one per service, in {shown(RUN)}")
            key = secrets.token_urlsafe(64)
            self.services = [
                service(name, self.sandbox).with_environment(DJANGO_SECRET_KEY=key)
                for name in SERVICES
            ]
            screen.status("manage.py events_declare …")
            declared = [pool.submit(one.manage_json, "events_declare") for one in self.services]
            self.reports = [each.result() for each in declared]
        self.shapes = [ServiceTopology.of(each) for each in self.reports]
        sizes = [f"{s.service} {len(s.handlers)} handlers" for s in self.shapes]
        queues = sum(len(shape.queues) for shape in self.shapes)
        screen.step("topology", f"{', '.join(sizes)}, {queues} queues, by events_declare")

    def make_database(self, one: Service) -> None:
        one.manage("migrate", "--verbosity", "0")
        one.with_environment(DJANGO_SUPERUSER_PASSWORD=self.password).manage(
            "createsuperuser", "--noinput", "--username", USER, "--email", f"{USER}@shop.example"
        )

    def start(self, broker: accounting.Queues, *, web: bool) -> None:
        """Start workers and mirrors, and web servers; wait until they consume and answer."""
        self.screen.status(f"starting release {self.release} …")
        self.working = True
        self._spawn_workers()
        if web:
            self._spawn_webs()
        queues = [name for shape in self.shapes for name in shape.inboxes]

        def ready() -> bool:
            self.complain()
            return all(broker.depth(name)[1] for name in queues)

        until(ready, 60, f"the workers do not consume; look into {shown(RUN / 'log')}")
        text = "shop: events_worker; billing: celery worker, events_mirror"
        self.screen.step("workers", f"{text}: release {self.release}")

        def answering() -> bool:
            self.complain()
            return all(answers(address) for address in self.addresses.values())

        if web:
            until(answering, 60, f"the admin does not answer; look into {shown(RUN / 'log')}")
            places = ", ".join(f"{name} {url}/admin/" for name, url in self.addresses.items())
            self.screen.step("admin", places)
        for each in [*self.workers, *self.webs]:
            each.look()

    def _spawn_workers(self) -> None:
        shop, billing = self.services
        # Two services on one vhost: without a name of its own the second worker of a machine
        # finds the remote control queue of the first one locked.
        pool = ("--pool", "prefork", "--concurrency", "1", "--loglevel", "WARNING")
        for one, role, *command in (
            # With the mirror of its archive.
            (shop, "worker", "manage.py", "events_worker", "--hostname", "shop@%h", *pool),
            # An ordinary worker has the ordinary tasks too, and no mirror.
            (billing, "worker", "-m", "celery", "--app", "example_project", "worker",
             "--hostname", "billing@%h", *pool),
            (billing, "mirror", "manage.py", "events_mirror"),
        ):  # fmt: skip
            self.workers.append(Worker.start(one, role, *command, keep=self.keep))

    def _spawn_webs(self) -> None:
        for one, port in zip(self.services, pick_ports(self.ports), strict=True):
            # Plain HTTP and static files are for development only, and so is this server.
            web = one.with_environment(DJANGO_DEBUG="1")
            command = ("manage.py", "runserver", "--noreload", f"127.0.0.1:{port}")
            self.addresses[one.name] = f"http://127.0.0.1:{port}"
            self.webs.append(Worker.start(web, "web", *command, keep=self.keep))

    def complain(self) -> None:
        for each in [*self.workers, *self.webs]:
            each.complain()

    def stop_workers(self) -> None:
        self._stop(self.workers)

    def _stop(self, workers: list[Worker]) -> None:
        stop(workers)
        self.ended += [process for worker in workers for process in worker.processes]
        workers.clear()

    # -- the second release ---------------------------------------------------------------

    def roll_out(self, broker: accounting.Queues) -> None:
        """Deploy release 2: whatever runs of release 1 ends warm, then the new one starts."""
        self.screen.heading("Release 2 mends what failed for good")
        for handler, note in NOTES:
            self.screen.write(f"  {handler:<26} {note}")
        self.screen.write()
        # Whoever looks at a page goes on looking.
        self.ports = [urlsplit(url).port or 0 for url in self.addresses.values()] or self.ports
        self.screen.status("stopping release 1 …")
        self.stop_workers()
        self._stop(self.webs)
        inboxes = [name for shape in self.shapes for name in shape.inboxes]
        until(
            lambda: not any(broker.depth(name)[1] for name in inboxes),
            30,
            "somebody else consumes the queues of this demo",
        )
        self.release = 2
        self.services = [one.with_environment(EXAMPLE_RELEASE="2") for one in self.services]
        self.start(broker, web=True)

    def replay(self) -> None:
        """Log in to the admin of each service, and replay all that is in its archive."""
        self.screen.heading(f"Replayed in the admin, over HTTP, as {self.user}")
        for name, address in self.addresses.items():
            self.screen.status(f"{address} …")
            person = AdminUser(address)
            said = person.replay_everything(person.log_in(self.user, self.password), "release 2")
            self.screen.step(name, "; ".join(said) or "nothing is in the archive")

    # -- watching -------------------------------------------------------------------------

    def publish(self, broker: accounting.Queues) -> None:
        """Publish the orders, and look on until everything is settled and mirrored."""
        intake = Intake(self.services[0], self.limit)
        total = min(len(ORDERS.read_bytes().splitlines()), self.limit or sys.maxsize)
        self.screen.step("orders", f"{shown(ORDERS)}, by manage.py place_orders")
        self.watch(broker, intake, total)
        self.refused = intake.refused

    def watch(
        self, broker: accounting.Queues, intake: Intake | None = None, total: int = 0
    ) -> None:
        """Look on until everything is settled, or nothing moves.

        Settled is what was handled, or has come into the archive's tables; without an *intake*
        these must have nothing open either.
        """
        moved, before = time.monotonic(), State()
        while True:
            if intake is not None:
                intake.read()
            self.complain()
            state = self.look(broker)
            self.show(state, intake, total)
            published = intake is None or intake.ended
            if published and state.settled and (intake is not None or not state.open):
                break
            if state != before or not published:
                moved, before = time.monotonic(), state
            if time.monotonic() - moved > PATIENCE:
                break  # the table tells what waits
            time.sleep(LOOK)
        self.screen.clear()

    def look(self, broker: accounting.Queues) -> State:
        state = State()
        published = Counter(name for one in self.ledgers.values() for _, name in one.published())
        for shape in self.shapes:
            depths = broker.depths(shape.watched)
            counts = self.ledgers[shape.service].counts()
            archive = self.ledgers[shape.service].archive()
            state.archived[shape.service] = sum(one.open for one in archive)
            state.unread += depths[shape.archive]
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

    def show(self, state: State, intake: Intake | None, total: int) -> None:
        screen = self.screen
        refused = f"{len(intake.refused)} refused" if intake else ""
        delayed = ", ".join(f"{queue}: {count}" for queue, count in state.delayed.items())
        archived = ", ".join(f"{name} {count}" for name, count in state.archived.items())
        head = ("service", "handler", "", "handled", "of", "waiting", "retried")
        rows = [
            (service, handler, small_bar(handled, expected), handled, expected, waiting, retried)
            for service, handler, expected, handled, waiting, retried in state.rows
        ]
        block = [""]
        if intake:
            bar = screen.bar(intake.lines, total)
            block += [f"  orders   {bar} {intake.lines} of {total}, {refused}", ""]
        block += [
            *screen.table(head, rows),
            "",
            f"  delayed on the broker   {delayed or 'nothing'}",
            f"  open in the archive     {archived}",
        ]
        plain = (
            f"handled {state.handled} of {state.expected}, retried "
            f"{sum(row[5] for row in state.rows)}, open in the archive {state.open}; delayed "
            f"{delayed or 'nothing'}"
        )
        if intake:
            plain = f"{intake.lines}/{total} orders, {refused}; {plain}"
        screen.live(block, plain)

    # -- the end --------------------------------------------------------------------------

    def take_stock(self, broker: accounting.Queues, *, again: bool = False) -> Result:
        """Count what is where, and show it."""
        depths = broker.depths(name for shape in self.shapes for name in shape.queues)
        archives = {
            # The queue first: what the mirror takes meanwhile is counted twice, never not at all.
            shape.service: [
                *broker.peek(shape.archive),
                *self.ledgers[shape.service].archive(),
            ]
            for shape in self.shapes
        }
        result = accounting.account(self.shapes, self.ledgers, depths, archives)
        self.screen.clear()
        if again:
            report_again(self.screen, result, archives)
        else:
            report(
                self.screen, result, refused=self.refused, ledgers=self.ledgers, archives=archives
            )
        return result

    def verdict(self, result: Result, *, final: bool = False) -> int:
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
        if final and (result.open or result.handled != result.expected):
            left = result.expected - result.handled
            text = f"{left} are not handled, and {result.open} open in the archive"
            screen.write(f"  Nothing is lost, but {screen.paint(text, YELLOW)}.")
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
        node = self.sandbox.node if self.sandbox else Node.attach(RUN / "broker")
        ended = node.processes if node is not None else []
        self._stop(self.webs)
        self._stop(self.workers)
        ended += self.ended
        try:
            if self.sandbox is not None:
                self.sandbox.clear_away(self.shapes)
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
    def broker(self) -> Iterator[accounting.Queues]:
        assert self.sandbox is not None  # noqa: S101 - made first
        connected = accounting.Queues(self.sandbox.url)
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
    #: open in the archive's tables, by service
    archived: dict[str, int] = field(default_factory=dict)
    #: messages in the archive's queues
    unread: int = 0

    @property
    def open(self) -> int:
        return sum(self.archived.values())

    @property
    def expected(self) -> int:
        return sum(row[2] for row in self.rows)

    @property
    def handled(self) -> int:
        return sum(row[3] for row in self.rows)

    @property
    def settled(self) -> bool:
        """Whether everything is handled or mirrored."""
        return not self.unread and self.handled + self.open >= self.expected


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


def service(name: str, place: Sandbox | None = None) -> Service:
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
