"""Worker processes, their ledger, and eyes on the broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import amqp
from celery import Celery
from kombu import Connection

import django_amqp_events
from broker import Broker
from django_amqp_events.broker.confirms import ConfirmChannel
from django_amqp_events.broker.queue_depth import queue_depth
from django_amqp_events.context import ReceivedEvent
from django_amqp_events.message import headers, types
from django_amqp_events.message.types import Message
from tests import forked, waiting
from tests.event_messages import published
from tests.waiting import is_usable

PROJECT = Path(__file__).resolve().parent / "project"
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(django_amqp_events.__file__).resolve().parent.parent

T = TypeVar("T")

#: Workers of this process that run or ran; their logs are shown where a test fails.
STARTED: list[Worker] = []
_NUMBERS = count()


def until(condition: Callable[[], T], seconds: float = 20, what: str = "") -> T:
    """Wait until *condition* is true and return what it returned."""
    return waiting.until(condition, what or str(condition), seconds)


def alive(pid: int) -> bool:
    """Return True if a process runs, which is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@dataclass
class Worker:
    """A ``celery worker``, or another command, in its own process group."""

    process: subprocess.Popen[bytes]
    log_path: Path
    name: str

    @classmethod
    def start(
        cls, command: Sequence[str | Path], *, env: Mapping[str, str], where: Path, name: str
    ) -> Self:
        """Start a command that logs to a file of its own; it is not waited for."""
        log_path = where / f"{name}-{next(_NUMBERS)}.log"
        with log_path.open("wb") as log:
            process = forked.Popen(
                command,
                env=env,
                cwd=where,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        worker = cls(process, log_path, name)
        STARTED.append(worker)
        return worker

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def children(self) -> list[int]:
        """Pids of the pool's processes."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def wait_ready(self, seconds: float = 30, text: str = " ready.") -> Worker:
        def ready() -> bool:
            assert self.alive, f"{self.name} ended with {self.process.returncode}:\n{self.log}"
            return text in self.log

        until(ready, seconds, f"{self.name} is ready")
        return self

    def signal(self, number: int) -> None:
        if self.alive:
            self.process.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        """Return the exit code."""
        return self.process.wait(seconds)

    def stop(self, seconds: float = 30) -> int:
        """Warm shutdown."""
        self.signal(signal.SIGTERM)
        try:
            return self.wait(seconds)
        except subprocess.TimeoutExpired:
            raise waiting.NotInTime(f"{self.name} did not stop:\n{self.log[-4000:]}") from None

    def kill(self) -> None:
        """SIGKILL for it and its pool processes, as the kernel's memory killer would."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(10)


def _run(
    arguments: Sequence[str], env: Mapping[str, str], where: Path
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return forked.run(command, env=env, cwd=where, capture_output=True, text=True, timeout=90)


class Project:
    """A project of its own in a folder, and its processes.

    Args:
        path: where its modules are.
        environ: of its processes, beside those of the test.
    """

    def __init__(self, where: Path, path: Path, **environ: str) -> None:
        self.where = where
        paths = os.pathsep.join([str(path), str(PACKAGE)])
        self.environ = {**os.environ, "PYTHONPATH": paths, **environ}
        self.started: list[Worker] = []

    def run(self, *arguments: str, **environ: str) -> str:
        """Run a program to its end; return what it prints."""
        done = _run(arguments, {**self.environ, **environ}, self.where)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout + done.stderr)

    def manage(self, *arguments: str, **environ: str) -> str:
        return self.run("-m", "django", *arguments, **environ)

    def python(self, code: str, **environ: str) -> str:
        return self.run("-c", f"import django; django.setup()\n{code}", **environ)

    def start(self, name: str, *arguments: str, ready: str = " ready.", **environ: str) -> Worker:
        """Start a program that does not end, and wait until its log says that it is ready."""
        env = {**self.environ, **environ}
        worker = Worker.start([sys.executable, *arguments], env=env, where=self.where, name=name)
        self.started.append(worker)
        return worker.wait_ready(60, ready)

    def end(self) -> None:
        """Stop what was started, at once, and kill what does not stop."""
        for worker in self.started:
            worker.signal(signal.SIGTERM)
        for worker in self.started:
            with suppress(subprocess.TimeoutExpired):
                worker.wait()
            worker.kill()
            STARTED.remove(worker)


@dataclass
class Service:
    """A service of the test project on one vhost; its processes share a ledger."""

    url: str
    where: Path
    name: str = "core"
    handlers: str = "core"
    events: Mapping[str, Any] = field(default_factory=dict)
    celery: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    #: Declares the topology; None where the service's broker has no management API.
    eyes: Eyes | None = None
    #: Constants of the package, by dotted names.
    constants: Mapping[str, float] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self.where.mkdir(parents=True, exist_ok=True)

    def env(self) -> dict[str, str]:
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith("AMQP_")},
            "PYTHONPATH": os.pathsep.join([str(PROJECT), str(PACKAGE), str(ROOT)]),
            "PYTHONUNBUFFERED": "1",
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
            "TESTPROJECT_DIR": str(self.where),
            "TESTPROJECT_SERVICE": self.name,
            "TESTPROJECT_HANDLERS": self.handlers,
            "TESTPROJECT_BROKER": self.url,
            "TESTPROJECT_EVENTS": json.dumps(dict(self.events)),
            "TESTPROJECT_CELERY": json.dumps(dict(self.celery)),
            "TESTPROJECT_CONSTANTS": json.dumps(dict(self.constants)),
            **self.environ,
        }

    def start(
        self, *arguments: str, name: str = "", program: Sequence[str] = ("-m", "django"),
        where: Path | None = None, **environ: str,
    ) -> Worker:  # fmt: skip
        """Start a management command, or another program; it is not waited for."""
        self._count += 1
        return Worker.start(
            [sys.executable, *program, *arguments],
            env={**self.env(), **environ},
            where=where or self.where,
            name=name or f"{self.name}-{arguments[0]}",
        )

    def worker(self, pool: str = "prefork", concurrency: int = 2, *arguments: str) -> Worker:
        """Start a worker; it is not waited for."""
        name = f"{self.name}-{pool}-{self._count + 1}"
        return self.start(
            "--pool", pool, "--concurrency", str(concurrency), "--loglevel", "INFO",
            "--hostname", f"{name}@localhost", "--without-gossip", "--without-mingle", *arguments,
            program=("-m", "celery", "-A", "testproject", "worker"), name=name,
        )  # fmt: skip

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return _run(arguments, self.env(), self.where)

    def python(self, code: str, *, check: bool = True) -> str:
        """Run a program of this service with Django set up and return what it prints."""
        done = self._run("-c", f"import testproject, django; django.setup()\n{code}")
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def value(self, expression: str, setup: str = "") -> Any:
        """Return the value of an expression in a process of this service, as JSON has it."""
        printed = self.python(
            f"import json\n{setup}\nprint('VALUE', json.dumps({expression}, default=str))"
        )
        # What is logged may come before it and behind it.
        return json.JSONDecoder().raw_decode(printed.partition("VALUE ")[2])[0]

    def command(self, name: str, *arguments: str) -> tuple[int, str]:
        """Run a management command; return its exit code and what it prints to stdout."""
        done = self._run("-m", "django", name, *arguments)
        return done.returncode, done.stdout

    def declare(self) -> Self:
        """Declare the topology, as events_declare does.

        It is the same in all vhosts, so a process describes it once, and RabbitMQ imports it.
        """
        if self.eyes is None:
            self.python(f"{_TOPOLOGY}startup.declare(connection.celery_app(s), s, made)")
            return self
        about = (self.name, self.handlers, self.events, self.environ, self.constants)
        key = json.dumps(about, default=str, sort_keys=True)
        if key not in _DEFINITIONS:
            _DEFINITIONS[key] = json.loads(self.python(_TOPOLOGY + _DESCRIBE).splitlines()[-1])
        self.eyes.http("POST", "/api/definitions/{vhost}", _DEFINITIONS[key])
        return self

    def migrate(self, module: str = "") -> None:
        """Create the tables, as migrate does, and the ``TABLE`` of a module of the test project.

        In SQLite, all but the first are copies, where there is no such module.
        """
        file = self.where / "db.sqlite3"
        elsewhere = self.environ.keys() & {"TESTPROJECT_DATABASE", "TESTPROJECT_RESULTS"}
        fresh = not elsewhere and not module and not file.exists()
        if fresh and _MIGRATED:
            file.write_bytes(_MIGRATED[0])
            return
        code = (
            "from django.core.management import call_command\n"
            "call_command('migrate', verbosity=0)\n"
        )
        if module:
            code += (
                f"from django.db import connection\nfrom testproject.{module} import TABLE\n"
                "connection.cursor().execute(TABLE)"
            )
        self.python(code)
        if fresh:
            _MIGRATED.append(file.read_bytes())

    def control(self, *arguments: str, seconds: int = 5) -> str:
        """``celery control`` or ``celery inspect``."""
        timeout = ("--timeout", str(seconds))
        done = self._run("-m", "celery", "-A", "testproject", *arguments, *timeout)
        return done.stdout + done.stderr

    # -- what ran

    def ledger(self, **wanted: Any) -> list[dict[str, Any]]:
        """Lines of all processes in order of time, those with these values."""
        lines: list[dict[str, Any]] = []
        for path in self.where.glob("ledger.*.jsonl"):
            text = path.read_text()
            # A killed process may leave half a line.
            lines += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        lines.sort(key=lambda line: line["at"])
        return [
            line for line in lines if all(line.get(key) == value for key, value in wanted.items())
        ]

    def runs(self, event_id: str, what: str = "start", **wanted: Any) -> list[dict[str, Any]]:
        return self.ledger(event=event_id, what=what, **wanted)

    def ended(self, ids: Iterable[str], **wanted: Any) -> bool:
        """Return True if each of these events has a run that came to its end."""
        return {line["event"] for line in self.ledger(what="end", **wanted)} >= set(ids)


def task_id(
    event_id: str, name: str, handler: str, service: str = "core", replay_id: str | None = None
) -> str:
    """Celery's task id for an event that :class:`Eyes` published."""
    event = ReceivedEvent(id=event_id, name=name, service="tests")
    return types.task_id(service, handler, event, replay_id)


_TOPOLOGY = """
from django_amqp_events import conf
from django_amqp_events.broker import connection, topology
from django_amqp_events.broker.provisioning import startup
from django_amqp_events.declare import registry
s, r = conf.get_settings(), registry.get_registry()
made = topology.build(s, r)
"""
_DESCRIBE = f"""
import json, runpy
describe = runpy.run_path({str(Path(__file__).parent.parent / "definitions.py")!r})["definitions"]
print(json.dumps(describe(made)))
"""
#: Topologies by what they follow from.
_DEFINITIONS: dict[str, Any] = {}
#: The SQLite file of a service that was migrated.
_MIGRATED: list[bytes] = []


class Eyes:
    """Looks at a vhost and puts messages on it, over plain AMQP and the management API."""

    def __init__(self, node: Broker, vhost: str) -> None:
        self.node = node
        self.vhost = vhost
        self.url = node.amqp_url(vhost)
        self.app = Celery("eyes", broker=self.url, set_as_current=False)
        self._channel: ConfirmChannel | None = None
        self._connection: Connection | None = None
        self._asked: amqp.Channel | None = None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
        self._channel = self._connection = self._asked = None

    # -- publishing

    def send(self, *messages: Message, mandatory: bool = True) -> None:
        """Publish, confirmed."""
        if self._channel is None or not self._channel.healthy():
            self._channel = ConfirmChannel(self.app, timeout=20)
        errors = self._channel.publish(messages, mandatory=mandatory)
        failed = [error for error in errors if error is not None]
        assert not failed, failed

    def event(self, name: str, payload: Mapping[str, Any], **more: Any) -> str:
        """Publish an event and return its id."""
        message = self.message(name, payload, **more)
        self.send(message)
        return message.event_id

    def events(self, number: int, name: str, *plan: str) -> list[str]:
        """Publish events with the same plan; return their ids."""
        messages = [self.message(name, {"plan": plan}) for _ in range(number)]
        self.send(*messages)
        return [message.event_id for message in messages]

    def message(self, name: str, payload: Mapping[str, Any], **more: Any) -> Message:
        return published(name, payload, service="tests", **more)

    # -- looking

    def http(self, method: str, path: str, body: Any = None) -> Any:
        return self.node.http(method, path.replace("{vhost}", quote(self.vhost, safe="")), body)

    def channel(self) -> amqp.Channel:
        """A fresh channel: a passive declare that fails closes it."""
        if self._connection is None or not self._connection.connected:
            self._connection = Connection(self.url)
            self._connection.connect()
        return self._connection.connection.channel()

    def _asking(self) -> amqp.Channel:
        """Return the channel for questions: a new one for each costs more than its answer."""
        if self._asked is None or not is_usable(self._asked):
            self._asked = self.channel()
            # basic_get decodes text bodies otherwise.
            self._asked.auto_decode = False
        return self._asked

    def declared(self, queue: str) -> tuple[int, int] | None:
        """Ready messages and consumers of a queue, at this moment; None where there is none.

        Nor where it is another connection's own, as a worker's for remote control.
        """
        try:
            depth = queue_depth(self._asking(), queue)
        except (amqp.exceptions.NotFound, amqp.exceptions.ResourceLocked):
            return None
        return depth.ready, depth.consumers

    def consumers(self, queue: str) -> int:
        answer = self.declared(queue)
        return answer[1] if answer else 0

    def ready(self, queue: str) -> int:
        answer = self.declared(queue)
        return answer[0] if answer else 0

    def queue(self, name: str) -> dict[str, Any]:
        """Return the management API's data on a queue."""
        found: dict[str, Any] = self.http("GET", f"/api/queues/{{vhost}}/{quote(name, safe='')}")
        return found

    def totals(self, prefix: str = "") -> dict[str, int]:
        """Return the number of messages in each queue, by the management API."""
        return {
            queue["name"]: queue.get("messages", 0)
            for queue in self.http("GET", "/api/queues/{vhost}")
            if queue["name"].startswith(prefix)
        }

    def drained(self, prefix: str, seconds: float = 30) -> None:
        """Wait until all queues whose names begin with *prefix* are empty.

        Raises:
            NotInTime: some are not; it names them, with their numbers of messages.
        """
        left: dict[str, int] = {}

        def empty() -> bool:
            left.clear()
            left.update((queue, number) for queue, number in self.totals(prefix).items() if number)
            return not left

        try:
            until(empty, seconds)
        except waiting.NotInTime:
            raise waiting.NotInTime(f"after {seconds:g} s, queues have {left}") from None

    def empty(self, *queues: str, seconds: float = 20) -> None:
        """Wait until the queues have no ready and no unacknowledged messages.

        A message that came within the last two seconds may be unacknowledged still.
        """
        until(
            # The management API is half a second late at least, a queue itself is not; it
            # tells what is ready alone.
            lambda: not any(self.totals().get(queue) or self.ready(queue) for queue in queues),
            seconds,
            f"{queues} are empty",
        )

    def take(self, queue: str, limit: int = 100_000) -> list[Any]:
        """Take messages off a queue, acked."""
        channel = self._asking()
        taken: list[Any] = []
        while len(taken) < limit and (message := channel.basic_get(queue)) is not None:
            channel.basic_ack(message.delivery_tag)
            message.body = bytes(message.body or b"")  # py-amqp reads an empty one as text
            taken.append(message)
        return taken

    def connections(self) -> list[dict[str, Any]]:
        return [c for c in self.http("GET", "/api/connections") if c.get("vhost") == self.vhost]

    def consuming(self, *queues: str) -> str:
        """Return the name of a connection that consumes one of these queues, or any queue."""

        def find() -> str:
            for consumer in self.http("GET", "/api/consumers/{vhost}"):
                # An empty list where the channel has just gone.
                about, queue = consumer["channel_details"], consumer["queue"]["name"]
                if about and (queue in queues or not queues):
                    return str(about["connection_name"])
            return ""

        return until(find, 30, "the management API lists the connection")

    def cut(self, connection: Mapping[str, Any]) -> None:
        """Close a connection from the broker's side."""
        self.http("DELETE", f"/api/connections/{quote(connection['name'], safe='')}")


class Archive:
    """The messages that have arrived in a service's archive queue."""

    def __init__(self, eyes: Eyes, service: str = "core") -> None:
        self.eyes = eyes
        self.queue = f"{service}:archive"
        self.messages: list[Any] = []

    def collect(self) -> list[dict[str, Any]]:
        """Consume the waiting messages and return all entries, each with its message."""
        self.messages += self.eyes.take(self.queue)
        return [
            {**json.loads(message.headers[headers.EVENT_ARCHIVE]), "message": message}
            for message in self.messages
            if headers.EVENT_ARCHIVE in message.headers
        ]

    def of(self, event_id: str) -> list[dict[str, Any]]:
        return [entry for entry in self.collect() if entry["event_id"] == event_id]

    def wait(self, event_id: str, seconds: float = 20) -> dict[str, Any]:
        """The one archived entry of an event."""
        found = until(lambda: self.of(event_id), seconds, f"{event_id} is archived")
        assert len(found) == 1, found
        return found[0]


def by_event(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        found.setdefault(line.get("event", ""), []).append(line)
    return found
