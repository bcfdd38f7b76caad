"""deploy/: the commands of the image, of compose and of Kubernetes run, handle events and stop.

There is no container: the image's paths are those of this checkout, and its ports are free ones.
"""

from __future__ import annotations

import http.client
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from machine import Process, free_ports, wait_until
from postgresql import Postgres

from ..commands import run_example, run_program
from ..conftest import Vhost
from ..waiting import NotInTime
from .files import ROOT, Container, compose, composed, deployed

pytestmark = pytest.mark.timeout(300)

#: The absolute paths that the image has and this machine has not.
INSIDE = re.compile(r"(?<![\w./-])/(app/static|venv|tmp)\b")
#: Lines of orders.jsonl; the next one is refused.
PUBLISHED = 17


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The static files, which the Dockerfile collects."""
    root = tmp_path_factory.mktemp("static")
    environ = {"EXAMPLE_STATIC": str(root), "EXAMPLE_DATA": str(root)}
    run_example("manage.py", "collectstatic", "--no-input", **environ)
    return root


@dataclass(slots=True)
class Running:
    """A container's processes: its command, its probes, and other commands in it."""

    container: Container
    environment: Mapping[str, str]
    static: Path
    tmp: Path
    ports: dict[str, str] = field(default_factory=dict)
    main: Process | None = None

    def start(self) -> None:
        for port in re.findall(r"\b(?:8000|9540)\b", shlex.join(self.container.command)):
            self.ports[port] = str(free_ports(1)[0])
        self.main = Process.spawn(
            *self._words(self.container.command), output=self.log_path, **self._options
        )

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return run_program(*self._words(command), timeout=60, **self._options)

    def healthy(self, probe: Any) -> bool:
        """Run a probe: a command, or an HTTP request as Kubernetes describes it."""
        if isinstance(probe, list):
            return self.run(probe).returncode == 0
        headers = {each["name"]: each["value"] for each in probe["httpHeaders"]}
        assert probe["port"] == "http"
        return self.get(probe["path"], **headers)[0] == 200

    def get(self, path: str, *, port: str = "8000", **headers: str) -> tuple[int, str]:
        """Return the status and the text of a page, status 0 if nothing answers."""
        connection = http.client.HTTPConnection("127.0.0.1", int(self.ports[port]), timeout=10)
        try:
            connection.request("GET", path, headers={"Host": "localhost"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    @property
    def alive(self) -> bool:
        return self.main is not None and self.main.alive

    @property
    def log_path(self) -> Path:
        return self.tmp / "log"

    @property
    def log(self) -> str:
        return f"{self.container.name}:\n{self.log_path.read_text(errors='replace')[-3000:]}"

    def code(self, seconds: float) -> int:
        """Return the exit code of the command."""
        assert self.main is not None
        assert self.main.child is not None
        if not self.main.wait(seconds):
            raise NotInTime(f"not within {seconds} s: {self.log}")
        return self.main.child.returncode

    def _words(self, command: list[str]) -> list[str]:
        text = shlex.join(command)
        for inside, outside in self.ports.items():
            text = re.sub(rf"\b{inside}\b", outside, text)
        return [self._here(word) for word in shlex.split(text)]

    @property
    def _options(self) -> dict[str, Any]:
        environment = {name: self._here(value) for name, value in self.environment.items()}
        environment["PATH"] = environment["PATH"].replace("$PATH", os.defpath)
        environment["TMPDIR"] = str(self.tmp)
        return {"cwd": ROOT, "env": environment}

    def _here(self, text: str) -> str:
        """Return a text with this machine's places for the image's paths."""
        places = {"app/static": self.static, "venv": sys.prefix, "tmp": self.tmp}
        return INSIDE.sub(lambda found: str(places[found[1]]), text)


class Machine:
    """Runs containers, with the broker and database of a test."""

    def __init__(self, static: Path, tmp: Path, vhost: Vhost, database: Postgres) -> None:
        self.static, self.tmp = static, tmp
        self.outside = {
            "AMQP_URL": vhost.url,
            "AMQP_MANAGEMENT_URL": vhost.management_url,
            "PGHOST": database.HOST,
            "PGPORT": str(database.port),
        }
        self.running: dict[str, Running] = {}

    def start(self, container: Container, **more: str) -> Running:
        tmp = self.tmp / container.name
        tmp.mkdir()
        environment = {**container.environment, **more, **self.outside}
        started = Running(container, environment, self.static, tmp)
        self.running[container.name] = started
        started.start()
        return started

    def named(self, pattern: str) -> list[Running]:
        return [each for name, each in self.running.items() if fnmatch(name, pattern)]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        if not wait_until(condition, 90, interval=0.3):
            logs = "\n".join(each.log for each in self.running.values())
            raise NotInTime(f"not within 90 s: {what}\n{logs}")

    def wait_until_healthy(self) -> None:
        """Wait until all probes of the running containers succeed."""
        for each in self.running.values():
            for probe in each.container.probes if each.alive else ():
                self.wait(partial(each.healthy, probe), f"{each.container.name}: {probe}")

    def stop(self) -> None:
        """End all as `docker stop` does: within its time, with exit code 0."""
        alive = [each for each in self.running.values() if each.alive]
        for each in alive:
            assert each.main is not None
            each.main.send(signal.SIGTERM)
        codes = {each.container.name: each.code(each.container.grace) for each in alive}
        assert set(codes.values()) == {0}, codes

    def clean_up(self) -> None:
        for each in self.running.values():
            if each.main is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(each.main.pid, signal.SIGKILL)
                each.main.wait(10)


@pytest.fixture
def database() -> Iterator[Postgres]:
    """A server of the test's own, since the files name the databases."""
    server = Postgres.start()
    yield server
    server.end()


@pytest.fixture
def machine(
    static: Path, tmp_path: Path, fresh_vhost: Vhost, database: Postgres
) -> Iterator[Machine]:
    made = Machine(static, tmp_path, fresh_vhost, database)
    yield made
    made.clean_up()


def execute(server: Postgres, sql: str) -> None:
    with psycopg.connect(
        host=server.HOST, port=server.port, user=server.USER, dbname="postgres", autocommit=True
    ) as connection:
        for statement in filter(None, map(str.strip, sql.split(";"))):
            connection.execute(statement.encode())


def counted(workers: list[Running]) -> Counter[str]:
    """Return how many runs of each handler succeeded, from the workers' metrics."""
    found: Counter[str] = Counter()
    for worker in workers:
        _, text = worker.get("/metrics", port="9540")
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "amqp_events_handled_total":
                    found[sample.labels["handler"]] += int(sample.value)
    return found


def place_orders(shop: Running) -> None:
    orders = ("example_project/orders.jsonl", "--limit", str(PUBLISHED))
    done = shop.run(["python", "manage.py", "place_orders", *orders])
    assert f"{PUBLISHED} orders published" in done.stdout, done.stdout + done.stderr


def check_the_pages(web: Running, **headers: str) -> None:
    status, page = web.get("/admin/login/", **headers)
    assert status == 200
    stylesheet = re.search(r'href="(/static/admin/css/base\.[0-9a-f]+\.css)"', page)
    assert stylesheet, page
    assert web.get(stylesheet[1], **headers)[0] == 200
    assert web.get("/admin/login/", Host="elsewhere", **headers)[0] == 400


def test_compose(machine: Machine, database: Postgres) -> None:
    execute(database, compose()["configs"]["databases"]["content"])
    for each in composed():
        assert each.environment["AMQP_URL"].endswith("@rabbitmq:5672/")
        assert each.environment["PGHOST"] in compose()["services"]
        started = machine.start(each)
        if each.name.endswith("-setup"):
            assert started.code(60) == 0, started.log
    webs, workers = machine.named("*-web"), machine.named("*-worker")
    assert len(webs) == len(workers) == 2
    machine.wait_until_healthy()
    for web in webs:
        check_the_pages(web)
    place_orders(machine.running["shop-web"])
    once = (
        "audit.record",
        "orders.send_confirmation",
        "stock.reserve_stock",
        "invoices.book_revenue",
    )
    machine.wait(
        lambda: (
            all(counted(workers)[name] >= PUBLISHED for name in once)
            and counted(workers)["orders.mark_invoiced"] > 0
        ),
        "the events are handled in both services",
    )
    assert counted(workers)["invoices.book_revenue"] == PUBLISHED
    machine.stop()
    # Other tests run the example too; its processes are not told apart on one host.
    machine.wait(
        lambda: not any(web.healthy(probe) for web in webs for probe in web.container.probes),
        "no probe succeeds",
    )


def test_kubernetes(machine: Machine, database: Postgres) -> None:
    execute(database, "CREATE ROLE shop LOGIN; CREATE DATABASE shop OWNER shop")
    for each in deployed():
        started = machine.start(each, DJANGO_SECRET_KEY="secret")
        if each.name.startswith(("shop-setup", "shop-prune")):
            assert started.code(60) == 0, started.log
    machine.wait_until_healthy()
    (web,), (worker,) = machine.named("shop-web.*"), machine.named("shop-worker.*")
    check_the_pages(web, **{"X-Forwarded-Proto": "https"})
    assert web.get("/admin/login/", Host="shop.example.com")[0] == 301, "to https"
    place_orders(web)
    machine.wait(lambda: counted([worker])["stock.reserve_stock"] == PUBLISHED, "handled")
    machine.stop()
