"""One run of the demo, from an empty broker to the verdict, and its end in any case."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from example_project.releases import NOTES

from . import state_file
from .accounting import Account, Ledger, Queues, ServiceTopology, account
from .admin_user import AdminUser, answers
from .processes import ROOT, RUN, DemoError, Service, Worker, shown, stop, until
from .report import report, report_again
from .sandbox import Sandbox
from .screen import BOLD, DIM, GREEN, RED, YELLOW, Screen, bar

from broker import Node  # isort: skip - processes.py adds its path
from machine import Process, free_ports, port_is_free  # isort: skip

ORDERS = ROOT / "example_project" / "orders.jsonl"
LOGS = shown(RUN / "log")
#: Output of a server in the background.
OUTPUT = RUN / "serve.log"
SERVICES = ("shop", "billing")
#: The user of the admin.
USER = "demo"
#: Seconds without progress after which the demo stops waiting.
PATIENCE = 30.0
#: Seconds between two looks at ledgers and queues.
LOOK = 0.4


class Demo:
    """One run.

    Args:
        orders: the number of lines to read, None for all.
        keep: leave everything running.
        ports: of the services' web servers, if they are free.
    """

    def __init__(
        self,
        screen: Screen,
        *,
        orders: int | None = None,
        keep: bool = False,
        ports: Sequence[int] = (0, 0),
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
        self.intake: Intake | None = None
        self.ended: list[Process] = []
        self.topologies: list[ServiceTopology] = []
        self.addresses: dict[str, str] = {}
        self.password = secrets.token_urlsafe(9)
        #: The broker may run; workers were started; `make serve` is ready; `--keep` was obeyed.
        self.begun = self.working = self.served = self.kept = False
        self.metrics_port = 0
        self.ledgers = {name: Ledger(RUN / f"{name}.sqlite3") for name in SERVICES}

    def run(self) -> int:
        """Run the demo and return the exit code."""
        self.set_up()
        with self.queues() as queues:
            self.start(queues, web=False)
            self.publish(queues)
            self.screen.status("stopping the workers …")
            # Without workers no message is unacknowledged, so the counts are exact.
            self._stop(self.workers)
            result = self.take_stock(queues)
            if result.lost or result.waiting:
                return self.verdict(result)
            self.roll_out(queues)
            self.replay()
            self.watch(queues)
            if not self.keep:
                self.screen.status("stopping the workers …")
                self._stop(self.workers)
            result = self.take_stock(queues, again=True)
        if self.keep:
            self.save_state()
            self.explain()
            self.screen.write("  stop        make demo ARGS=--stop")
            self.kept = True
        return self.verdict(result, final=True)

    # -- setup ----------------------------------------------------------------------------

    def set_up(self) -> None:
        """Start the broker, create the databases with a user, declare the topology."""
        for path in RUN.iterdir():
            if path.name not in ("lock", OUTPUT.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (RUN / "log").mkdir()
        screen = self.screen
        screen.write(screen.paint("A shop and its billing service, on one RabbitMQ", BOLD))
        screen.write()
        with ThreadPoolExecutor(2) as pool:
            # The databases need no broker.
            data = {"EXAMPLE_DATA": str(RUN)}
            databases = [
                pool.submit(self.create_database, Service(name=name, environment=data))
                for name in SERVICES
            ]
            screen.status("starting RabbitMQ …")
            self.begun = True
            self.sandbox = Sandbox.create(keep=self.keep)
            screen.step("broker", str(self.sandbox))
            for database in databases:
                database.result()
            screen.step("databases", f"SQLite, one per service, in {shown(RUN)}")
            environment = data | {
                "AMQP_URL": self.sandbox.url,
                "DJANGO_SECRET_KEY": secrets.token_urlsafe(64),
            }
            if self.sandbox.management_url:
                environment["AMQP_MANAGEMENT_URL"] = self.sandbox.management_url
            self.services = [Service(name=name, environment=environment) for name in SERVICES]
            screen.status("manage.py events_declare …")
            declared = [pool.submit(one.manage_json, "events_declare") for one in self.services]
            self.topologies = [ServiceTopology.of(each.result()) for each in declared]
        handlers = [f"{each.service} {len(each.handlers)}" for each in self.topologies]
        queues = sum(len(each.queues) for each in self.topologies)
        screen.step(
            "topology", f"{queues} queues by events_declare; handlers: {', '.join(handlers)}"
        )

    def create_database(self, one: Service) -> None:
        one.manage("migrate", "--verbosity", "0")
        one.with_environment(DJANGO_SUPERUSER_PASSWORD=self.password).manage(
            "createsuperuser", "--noinput", "--username", USER, "--email", f"{USER}@shop.example"
        )

    def start(self, queues: Queues, *, web: bool) -> None:
        """Start workers and mirrors, and web servers; wait until they consume and answer."""
        self.screen.status(f"starting release {self.release} …")
        self.working = True
        self._start_workers()
        if web:
            self._start_webs()

        def consumed() -> bool:
            self.check_workers()
            return all(queues.depth(name)[1] for each in self.topologies for name in each.consumed)

        def answering() -> bool:
            self.check_workers()
            return all(answers(address) for address in self.addresses.values())

        until(consumed, 60, f"The workers do not consume. Look into {LOGS}")
        text = "shop: events_worker; billing: celery worker, events_companion"
        self.screen.step("workers", f"{text} (release {self.release})")
        self.screen.step("metrics", f"shop http://127.0.0.1:{self.metrics_port}/metrics")
        if web:
            until(answering, 60, f"The admin does not answer. Look into {LOGS}")
            places = ", ".join(f"{name} {url}/admin/" for name, url in self.addresses.items())
            self.screen.step("admin", places)
        for each in [*self.workers, *self.webs]:
            each.find_children()

    def _start_workers(self) -> None:
        shop, billing = self.services
        (self.metrics_port,) = free_ports(1)
        counting = shop.with_environment(
            PROMETHEUS_MULTIPROC_DIR=str(RUN / f"metrics-{self.metrics_port}")
        )
        # On one vhost, the second worker with the same name finds its remote control queue locked.
        pool = ("--pool", "prefork", "--concurrency", "1", "--loglevel", "WARNING")
        for one, role, *command in (
            # Starts a companion, which includes the mirror of the archive.
            (counting, "worker", "manage.py", "events_worker", "--hostname", "shop@%h", *pool,
             "--metrics-port", str(self.metrics_port)),
            # An ordinary worker runs ordinary tasks too, and no mirror.
            (billing, "worker", "-m", "celery", "--app", "example_project", "worker",
             "--hostname", "billing@%h", *pool),
            (billing, "companion", "manage.py", "events_companion"),
        ):  # fmt: skip
            self.workers.append(Worker.start(one, role, *command, keep=self.keep))

    def _start_webs(self) -> None:
        for one, wanted, free in zip(self.services, self.ports, free_ports(2), strict=True):
            port = wanted if wanted and port_is_free(wanted) else free
            # Plain HTTP and static files are for development only, like this server.
            web = one.with_environment(DJANGO_DEBUG="1")
            command = ("manage.py", "runserver", "--noreload", f"127.0.0.1:{port}")
            self.addresses[one.name] = f"http://127.0.0.1:{port}"
            self.webs.append(Worker.start(web, "web", *command, keep=self.keep))

    def check_workers(self) -> None:
        for each in [*self.workers, *self.webs]:
            each.check()

    def _stop(self, workers: list[Worker]) -> None:
        stop(workers)
        self.ended += [process for worker in workers for process in worker.processes]
        workers.clear()

    # -- the second release ---------------------------------------------------------------

    def roll_out(self, queues: Queues) -> None:
        """Deploy release 2: stop all processes of release 1 warm, then start the new ones."""
        self.screen.heading("Release 2 fixes the failures")
        for handler, note in NOTES:
            self.screen.write(f"  {handler:<26} {note}")
        self.screen.write()
        # An open page of the admin keeps its address.
        self.ports = [urlsplit(url).port or 0 for url in self.addresses.values()] or self.ports
        self.screen.status("stopping release 1 …")
        self._stop(self.workers)
        self._stop(self.webs)
        until(
            lambda: not any(queues.depth(q)[1] for each in self.topologies for q in each.consumed),
            30,
            "Another program consumes the queues of this demo. Stop it",
        )
        self.release = 2
        self.services = [one.with_environment(EXAMPLE_RELEASE="2") for one in self.services]
        self.start(queues, web=True)

    def replay(self) -> None:
        """Replay the whole archive of each service in its admin."""
        self.screen.heading(f"Replayed in the admin, over HTTP, by the user {USER}")
        for name, address in self.addresses.items():
            self.screen.status(f"{address} …")
            user = AdminUser(address)
            said = user.replay_everything(user.log_in(USER, self.password), "release 2")
            self.screen.step(name, "; ".join(said) or "nothing is archived")

    # -- progress -------------------------------------------------------------------------

    def publish(self, queues: Queues) -> None:
        """Publish the orders, and wait until every event is handled or archived."""
        self.intake = Intake(self.services[0], self.limit)
        self.screen.step("orders", f"{shown(ORDERS)}, by manage.py place_orders")
        self.watch(queues, self.intake)

    def watch(self, queues: Queues, intake: Intake | None = None) -> None:
        """Show the progress until every event is handled or archived, or nothing moves.

        Without an *intake*, the archive must be done too.
        """
        moved, before = time.monotonic(), None
        while True:
            published = intake is None or intake.read()
            self.check_workers()
            now = self.look(queues)
            self.show(now, intake)
            finished = not now.missing and (intake is not None or not any(now.open.values()))
            if published and finished and not self.unread(queues):
                break
            if now != before or not published:
                moved, before = time.monotonic(), now
            if time.monotonic() - moved > PATIENCE:
                break  # the report shows what waits
            time.sleep(LOOK)
        self.screen.clear()

    def look(self, queues: Queues) -> Account:
        """Count what became of the events."""
        depths = queues.depths(name for each in self.topologies for name in each.queues)
        self.archives = {name: ledger.archive() for name, ledger in self.ledgers.items()}
        return account(self.topologies, self.ledgers, depths, self.archives)

    def unread(self, queues: Queues) -> int:
        """Return the number of messages that the mirrors have not stored."""
        return sum(queues.depth(each.archive)[0] for each in self.topologies)

    def show(self, now: Account, intake: Intake | None) -> None:
        screen = self.screen
        delayed = ", ".join(f"{queue}: {n}" for queue, n in now.delayed.items()) or "none"
        archived = ", ".join(f"{name} {count}" for name, count in now.open.items())
        head = ("service", "handler", "", "handled", "of", "waiting", "retried")
        rows = [
            (r.service, r.handler, bar(r.handled, r.events, 12), r.handled, r.events,
             r.waiting, r.retried)
            for r in now.rows
        ]  # fmt: skip
        block = ["", *screen.table(head, rows)]
        block += [
            "",
            f"  waiting in delay queues   {delayed}",
            f"  open in the archive       {archived}",
        ]
        plain = (
            f"handled {now.total('handled')} of {now.total('events')}, retried "
            f"{now.total('retried')}, open in the archive {sum(now.open.values())}; "
            f"in delay queues: {delayed}"
        )
        if intake:
            orders = f"{intake.lines} of {intake.total} orders, {len(intake.refused)} refused"
            block[:0] = ["", f"  orders   {bar(intake.lines, intake.total)} {orders}"]
            plain = f"{orders}; {plain}"
        screen.live(block, plain)

    # -- the end --------------------------------------------------------------------------

    def take_stock(self, queues: Queues, *, again: bool = False) -> Account:
        """Count everything, and print the tables."""
        result = self.look(queues)
        self.screen.clear()
        if again:
            report_again(self.screen, result, self.archives)
        else:
            refused = self.intake.refused if self.intake is not None else []
            report(self.screen, result, refused, self.ledgers, self.archives)
        return result

    def verdict(self, result: Account, *, final: bool = False) -> int:
        screen = self.screen
        screen.write()
        if result.lost:
            screen.write(f"  {screen.paint(f'{result.lost} events are lost', BOLD, RED)}:")
            for handler, event_id in sorted(result.missing)[:10]:
                screen.write(f"    {handler} {event_id}")
            return 1
        unhandled = result.total("events") - result.total("handled")
        problem = ""
        if result.waiting:
            problem = (
                f"{result.waiting} messages still wait after {PATIENCE:.0f} s without progress"
            )
        elif final and (unhandled or any(result.open.values())):
            problem = f"{unhandled} are not handled, and {sum(result.open.values())} are archived"
        if problem:
            screen.write(f"  Nothing is lost, but {screen.paint(problem, YELLOW)}.")
            screen.write(f"  Look into {LOGS}, then run the demo again.")
            return 1
        screen.write(
            f"  {screen.paint('Nothing was lost.', BOLD, GREEN)} "
            f"{time.monotonic() - screen.began:.0f} s. "
            + screen.paint(f"Databases, mails and logs: {shown(RUN)}", DIM)
        )
        return 0

    def save_state(self, *, server: bool = False) -> None:
        assert self.sandbox is not None  # noqa: S101 - set_up() creates it
        running = [*self.webs, *self.workers]
        state_file.write(self.sandbox, running, release=self.release, server=server)

    def explain(self) -> None:
        """Print what runs where."""
        assert self.sandbox is not None  # noqa: S101 - set_up() creates it
        environment = RUN / "env"
        environment.touch(mode=0o600)
        pairs = self.services[0].environment.items()
        environment.write_text("".join(f"export {key}='{value}'\n" for key, value in pairs))
        screen = self.screen
        screen.heading("Running now")
        for name, address in self.addresses.items():
            screen.write(f"  {name:<11} {address}/admin/")
        screen.write(f"  log in      user {USER}, password {self.password}")
        screen.write(f"  broker      {self.sandbox.url}")
        if self.sandbox.management_url:
            url = urlsplit(self.sandbox.management_url)
            page = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
            screen.write(f"  management  {page}, user {url.username}, password {url.password}")
        screen.write(
            f"  commands    . {shown(environment)}; .venv/bin/python manage.py events_status"
        )

    def clean_up(self) -> None:
        """End everything that was started, in bounded time."""
        if self.kept or not self.begun:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self.screen.status("stopping …")
        # A node whose start was interrupted is found by its folder.
        node = self.sandbox.node if self.sandbox else Node.attach(RUN / "broker")
        ended = node.processes if node is not None else []
        self._stop(self.webs)
        self._stop([*self.workers, *([self.intake.worker] if self.intake else [])])
        ended += self.ended
        try:
            if self.sandbox is not None:
                self.sandbox.clean_up()
            elif node is not None:
                node.end()
        except Exception as exc:  # noqa: BLE001 - the broker may be what has failed
            print(f"demo: the broker was not cleaned up: {exc}", file=sys.stderr)
        self.screen.clear()
        left = [process.pid for process in ended if process.alive]
        if left:
            print(f"demo: still running: {left}. End them with kill -9.", file=sys.stderr)
        elif ended:
            text = f"  {len(ended)} processes stopped, none is left"
            self.screen.write(self.screen.paint(text, DIM))

    @contextmanager
    def queues(self) -> Iterator[Queues]:
        assert self.sandbox is not None  # noqa: S101 - set_up() creates it
        connected = Queues(self.sandbox.url)
        try:
            yield connected
        finally:
            with suppress(Exception):
                connected.close()


class Intake:
    """`manage.py place_orders`, and what it has said so far."""

    def __init__(self, shop: Service, limit: int | None) -> None:
        self.total = min(len(ORDERS.read_bytes().splitlines()), limit or sys.maxsize)
        self.lines = 0
        self.refused: list[dict[str, Any]] = []
        command = ["manage.py", "place_orders", str(ORDERS), "--format", "json"]
        command += ["--limit", str(limit)] if limit else []
        self.worker = Worker.start(shop, "place_orders", *command)
        self._output = shop.log(self.worker.role)
        self._read = 0

    def read(self) -> bool:
        """Read new lines; return True once the command has ended.

        Raises:
            DemoError: the command has failed.
        """
        child = self.worker.main.child
        code = child.poll() if child is not None else 0
        text = self._output.read_text()
        end = text.rfind("\n") + 1  # the last line may be incomplete
        for line in text[self._read : end].split("\n"):
            if line.startswith('{"line"'):
                entry = json.loads(line)
                self.lines += 1
                if entry["outcome"] != "published":
                    self.refused.append(entry)
        self._read = end
        if code:
            raise DemoError(f"manage.py place_orders ended with {code}:\n{text[-2000:]}")
        return code is not None
