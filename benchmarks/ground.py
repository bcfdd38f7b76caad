"""The basis of a benchmark: a private RabbitMQ, a private PostgreSQL, and counting."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

import amqp

from broker import Node
from postgresql import Postgres

from .processes import BenchmarkError, Child, Program, peers, until
from .programs.tally import Tally
from .window import Window, connect

#: Seconds until a queue's depth shows confirmed and acknowledged messages.
SETTLED = 30.0
WORKER = (
    "-l", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat",
)  # fmt: skip

C = TypeVar("C", bound=Child)


class Vhost:
    """A vhost of the private node, and the contents of its queues."""

    def __init__(self, node: Node, name: str) -> None:
        self.node = node
        self.name = name
        self.url = node.amqp_url(name)
        self._connection: amqp.Connection | None = None

    def channel(self) -> Any:
        """Return a new channel of its connection."""
        if self._connection is None:
            self._connection = connect(self.url)
        return self._connection.channel()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.collect()
            self._connection = None

    def ready(self, *queues: str) -> int:
        """Return the number of ready messages in these queues."""
        channel = self.channel()
        found = sum(channel.queue_declare(queue, passive=True).message_count for queue in queues)
        channel.close()
        return int(found)

    def purge(self, *queues: str) -> None:
        """Empty queues."""
        channel = self.channel()
        for queue in queues:
            channel.queue_purge(queue)
        channel.close()

    def expect(self, number: int, *queues: str, what: str = "") -> None:
        """Expect *number* messages in queues.

        Raises:
            BenchmarkError: there are more or fewer.
        """
        try:
            until(lambda: self.ready(*queues) == number, SETTLED, "", interval=0.05)
        except BenchmarkError:
            found = self.ready(*queues)
            raise BenchmarkError(
                f"{what or self.name}: {found:,} messages are in {', '.join(queues)}, "
                f"not {number:,}"
            ) from None

    def take(self, queue: str) -> tuple[Any, str, str]:
        """Take a message out of a queue: a template, with its exchange and its routing key."""
        channel = self.channel()
        found: list[Any] = []

        def got() -> bool:
            found.append(channel.basic_get(queue, no_ack=True))
            return found[-1] is not None

        until(got, 10, f"a message is in {queue}")
        channel.close()
        message = found[-1]
        return message, message.delivery_info["exchange"], message.delivery_info["routing_key"]

    def fill(self, templates: Iterable[tuple[Any, str, str]], number: int) -> None:
        """Publish *number* copies of messages, in turn, with new ids; all confirmed.

        So a backlog needs no slow publisher; the participant itself has published the originals.
        """
        chosen = list(templates)
        window = Window(self.url)

        def copies() -> Iterator[tuple[amqp.Message, str, str]]:
            for n in range(number):
                template, exchange, routing_key = chosen[n % len(chosen)]
                yield _copy(template), exchange, routing_key

        done = window.publish(copies())
        window.close()
        if done != number:
            raise BenchmarkError(f"{done:,} of {number:,} messages of a backlog were confirmed")

    def queues(self) -> dict[str, dict[str, Any]]:
        """Ask the management API for all queues; its figures are seconds old."""
        found = self.node.http("GET", f"/api/queues/{quote(self.name, safe='')}")
        return {queue["name"]: queue for queue in found}


def _copy(template: Any) -> amqp.Message:
    properties = dict(template.properties)
    headers = dict(properties.pop("application_headers", None) or {})
    old = str(headers.get("id") or properties.get("message_id") or "")
    new = str(uuid4())
    if old:
        headers = {key: new if value == old else value for key, value in headers.items()}
        properties = {key: new if value == old else value for key, value in properties.items()}
    return amqp.Message(template.body, application_headers=headers, **properties)


class Ground:
    """The node, the database server, and all processes of a benchmark."""

    def __init__(self, stack: ExitStack, *, config_extra: str = "") -> None:
        self._all = stack
        self._numbers = count(1)
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self.node = Node.start(self.folder / "node", config_extra=config_extra)
        stack.callback(self.node.end)
        self._server: Postgres | None = None

    # -- servers --------------------------------------------------------------------------

    @property
    def server(self) -> Postgres:
        """The private PostgreSQL, started on first use; its commits are durable."""
        if self._server is None:
            self._server = Postgres.start(durable=True)
            self._all.callback(self._server.end)
        return self._server

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the servers."""
        found = {"RabbitMQ": self.node.version}
        if self._server is not None:
            with self.sql() as cursor:
                cursor.execute("SHOW server_version")
                found["PostgreSQL"] = str(cursor.fetchone()[0]).partition(" ")[0]
        return found

    @contextmanager
    def sql(self, database: str = "postgres") -> Iterator[Any]:
        """Open a cursor on a PostgreSQL database."""
        with self.server.connect(database) as connection, connection.cursor() as cursor:
            yield cursor

    def database(self, vendor: str) -> dict[str, Any]:
        """Create a database with all tables; return its entry for DATABASES."""
        if vendor == "sqlite3":
            entry: dict[str, Any] = {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(self.path("sqlite3")),
                "OPTIONS": {"timeout": 30},
            }
        else:
            name = f"bench{next(self._numbers)}"
            self.server.create(name)
            entry = self.server.settings(name)
        self.program("migrate", database=entry).ask("migrate")
        return entry

    def vhost(self, name: str) -> Vhost:
        """Create a vhost."""
        unique = f"{name}-{next(self._numbers)}"
        self.node.add_vhost(unique)
        made = Vhost(self.node, unique)
        self._all.callback(made.close)
        return made

    # -- processes ------------------------------------------------------------------------

    def program(self, module: str, vhost: Vhost | None = None, **given: Any) -> Program:
        """Start a participant that takes commands.

        Args:
            module: of :mod:`benchmarks.programs`.
            given: its arguments, for :mod:`benchmarks.programs.given`.
        """
        command = [interpreter(module), "-m", f"benchmarks.programs.{module}"]
        return self._started(Program(command, self._given(vhost, given), self._log(module)))

    def worker(self, module: str, vhost: Vhost, *, pool: str = "prefork", number: int = 2,
               program: str = "", **given: Any) -> Child:  # fmt: skip
        """Start a worker of a participant: *number* processes or threads.

        Args:
            module: its application, of :mod:`benchmarks.programs`.
            program: run by this module of ours, with the command line of Celery's worker.
        """
        python, target = interpreter(module), f"benchmarks.programs.{module}"
        if module == "service_dramatiq":
            command = [python, "-m", "dramatiq", target, "--processes", str(number)]
            command += ["--threads", "1", "--skip-logging"]
        elif module == "service_faststream":
            command = [python, "-m", "faststream", "run", f"{target}:app", "--workers", str(number)]
        else:
            command = [python, "-m", program or "celery", "-A", target, "worker", "--pool", pool]
            command += ["--concurrency", str(number), "--hostname", f"{module}@localhost", *WORKER]
        return self._started(Child(command, self._given(vhost, given), self._log(module)))

    def command(self, *arguments: str, vhost: Vhost, **given: Any) -> Child:
        """Start a management command of this project."""
        command = [sys.executable, "-m", "benchmarks.programs.command", *arguments]
        command += ["--settings", "benchmarks.programs.settings"]
        return self._started(Child(command, self._given(vhost, given), self._log(arguments[0])))

    def tally(self) -> Tally:
        """Create a tally, whose path a worker gets."""
        made = Tally(self.folder / f"tally{next(self._numbers)}")
        made.reset()
        return made

    def path(self, name: str) -> Path:
        """Return the path of a new file."""
        return self.folder / f"{next(self._numbers)}-{name}"

    def _given(self, vhost: Vhost | None, given: dict[str, Any]) -> dict[str, Any]:
        return {"broker": vhost.url, **given} if vhost is not None else given

    def _log(self, name: str) -> Path:
        return self.path(f"{name}.log")

    def _started(self, child: C) -> C:
        self._all.callback(child.kill)
        return child


def interpreter(module: str) -> str:
    """Return the Python of a participant."""
    mine = any(module.endswith(word) for word in PEERS)
    return peers() if mine else sys.executable


#: Ends of the names of modules that run in the peers' virtual environment.
PEERS = ("_peer", "_dramatiq", "_faststream")


def measured_drain(tally: Tally, total: int, worker: Child, *, warm: float = 0.1,
                   seconds: float = 600.0) -> float:  # fmt: skip
    """Wait until *total* calls were counted; return how many a second, once the worker is warm.

    Args:
        warm: the share of calls that is not measured, since processes start one after another.
    """
    begin = max(1, int(total * warm))
    until(lambda: tally.count >= begin, 120, "the worker handles", interval=0.002, alive=worker)
    first, began = tally.count, perf_counter()
    until(lambda: tally.count >= total, seconds, f"all {total:,} are handled",
          interval=0.002, alive=worker)  # fmt: skip
    return (total - first) / (perf_counter() - began)


def counted(tally: Tally, total: int, vhost: Vhost, worker: Child, *queues: str) -> None:
    """Stop a worker; check that each event was handled once and acknowledged.

    Raises:
        BenchmarkError: a count is wrong.
    """
    worker.stop()
    if tally.count != total:
        raise BenchmarkError(
            f"{worker.log.stem}: {tally.count:,} calls were counted, not {total:,}:\n"
            f"{worker.said()}"
        )
    vhost.expect(0, *queues, what=f"{worker.log.stem}, after all was handled")
