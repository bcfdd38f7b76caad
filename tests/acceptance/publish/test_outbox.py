"""Processes that publish and processes that relay, killed at their worst moments. Counted.

Each program is a process with the database of the test as its default. Event ids tell who
published what, so what should have arrived is known without asking those that died.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import django_amqp_events
from django_amqp_events.databases import Now
from django_amqp_events.models import OutboxEvent
from tests import forked
from tests.conftest import Database, Vhost
from tests.integration.wire import Proxy, Wire, until

PACKAGE = Path(django_amqp_events.__file__).resolve().parent.parent
ALIAS = "archive"

pytestmark = pytest.mark.timeout(300)

BEGIN = """
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # of a fork beside a thread
import json, os, signal, sys, threading, time
import django, pymysql
from django.conf import settings
pymysql.install_as_MySQLdb()
settings.configure(
    INSTALLED_APPS=["django_amqp_events"],
    DATABASES={"default": json.loads(os.environ["DATABASE"])},
    AMQP_EVENTS={
        "SERVICE": "shop", "AUTODISCOVER": [], "CONFIRM_TIMEOUT": 10,
        "EXCHANGE": os.environ["EXCHANGE"], "CELERY_APP": "__main__.app",
    },
)
django.setup()
from celery import Celery
app = Celery("outbox", broker=os.environ["URL"], set_as_current=False)
from django.db import connections, transaction
from django_amqp_events import Options, conf, publish_event, publish_many
from django_amqp_events.broker import connection as broker
from django_amqp_events.publish import direct_publisher, outbox_rows
from django_amqp_events.publish.relay import Relay

# A machine that is busy confirms late. Where that is not the point, it is waited for.
direct_publisher.CONFIRM_WAIT_SECONDS = 30

def lease(seconds):
    outbox_rows.LEASE = seconds
    outbox_rows.BEGIN_WITHIN, outbox_rows.RENEW = seconds / 2, seconds / 6

def publish(event_id, **payload):
    publish_event("shop.happened", payload, options=Options(event_id=event_id))

def relay(**options):
    Relay(app=app, settings=conf.get_settings(), alias="default", **options).run(until_empty=True)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def wait(pid):
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
"""

Start = Callable[..., subprocess.Popen[str]]

#: Runs a program in process and user namespaces of its own, as a container does.
CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


@pytest.fixture
def wire(vhost: Vhost, archive_database: Database) -> Iterator[Wire]:
    with Wire.on(vhost.url, PUBLISH="outbox", DATABASE=ALIAS) as wire:
        yield wire


@pytest.fixture
def start(wire: Wire, archive_database: Database) -> Iterator[Start]:
    """Start a program; whatever still runs is killed with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(
        code: str, *arguments: str, url: str = "", before: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        process = forked.Popen(
            [
            *before, sys.executable, "-c", BEGIN + code, *arguments,
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(PACKAGE),
                "URL": url or wire.url,
                "EXCHANGE": wire.exchange,
                "DATABASE": archive_database.json,
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], code: int = 0, seconds: float = 120) -> str:
    """Wait for the end of a program, which says nothing on stderr; return what it printed."""
    out, err = process.communicate(timeout=seconds)
    assert (process.returncode, err) == (code, "")
    return out


def table() -> Any:
    return OutboxEvent.objects.using(ALIAS)


def arrived(wire: Wire, about: int) -> Counter[str]:
    return Counter(message.properties["message_id"] for message in wire.take(about=about))


PUBLISHER = """
who = sys.argv[1]
for n in range(50):
    with transaction.atomic():
        publish(f"{who}-{n}")
with transaction.atomic():
    transaction.on_commit(kill)
    for n in range(50, 1050):
        publish(f"{who}-{n}", text="x" * 100)
"""

RELAY = "relay(size=100)"


STOPPED = """
def stop():
    print("committed", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

with transaction.atomic():
    transaction.on_commit(stop)
    for n in range(100):
        publish(f"event-{n}")
"""


@pytest.mark.parametrize("where", ["beside", "in another container"])
def test_no_relay_takes_the_leases_of_a_living_process(wire: Wire, start: Start, where: str):
    """Not even where its process id does not exist."""
    process = start(STOPPED)
    assert process.stdout
    assert process.stdout.readline() == "committed\n"
    elsewhere = () if where == "beside" else CONTAINER
    ended(start(RELAY, before=elsewhere))
    assert table().filter(due_at__gt=Now()).count() == 100
    process.send_signal(signal.SIGCONT)
    ended(process)
    assert arrived(wire, 100) == Counter(f"event-{n}" for n in range(100))
    assert not table().exists()


@pytest.mark.parametrize("mount", ["--mount-proc", "--fork"])
def test_a_relay_waits_for_the_leases_of_another_container(wire: Wire, start: Start, mount: str):
    """It cannot know whether their process lives; with another /proc, not even its own place."""
    ended(start(PUBLISHER, "a"), -signal.SIGKILL)
    ended(start(RELAY, before=(*CONTAINER[:-1], mount)))
    assert table().count() == 1000
    ended(start(RELAY))
    assert not table().exists()


# -- the process -----------------------------------------------------------------------------------


def test_forks(wire: Wire, start: Start):
    """Fork before, between and after publishing, inside a transaction, and in a handler."""
    code = """
def fork():
    connections.close_all()  # no database's connection survives a fork
    return os.fork()

publish("parent-0")
pid = fork()
if not pid:
    publish("child-0")
    publish("child-1")
    inner = fork()
    if not inner:
        publish("grandchild")
        sys.exit(0)
    wait(inner)
    publish("child-2")
    sys.exit(0)
wait(pid)
publish("parent-1")
ours = direct_publisher.get_direct_publisher(conf.get_settings())
with ours._changed:
    pid = fork()
    if not pid:
        signal.alarm(60)
        publish("locked")
        os._exit(0)
wait(pid)
publish("parent-2")
assert not outbox_rows.rows("default").exists()
"""
    proxy = wire.proxy()
    ended(start(code, url=proxy.url))
    assert wire.ids() == [
        "parent-0", "child-0", "child-1", "grandchild", "child-2", "parent-1", "locked", "parent-2",
    ]  # fmt: skip
    assert len(proxy.links) == 4, "a fork cost its parent the connection"


def test_a_program_that_ends_while_the_broker_is_silent(wire: Wire, start: Start):
    proxy: Proxy = wire.proxy()
    code = """
direct_publisher.CONFIRM_WAIT_SECONDS = 0.15
publish("first")
print("go", flush=True)
sys.stdin.readline()
began = time.monotonic()
publish("second")
publish("third")
print(time.monotonic() - began)
print("end", flush=True)
"""
    process = start(code, url=proxy.url)
    assert process.stdout
    assert process.stdin
    assert process.stdout.readline() == "go\n"
    until(lambda: not table().exists(), "the first is confirmed")
    proxy.flowing.clear()
    process.stdin.write("\n")
    process.stdin.flush()
    assert float(process.stdout.readline()) < 2
    assert process.stdout.readline() == "end\n"
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20, "the end is not waited for without end"
    assert process.returncode == 0
    assert "Traceback" not in err
    assert sorted(table().values_list("event_id", flat=True)) == ["second", "third"]
    proxy.flowing.set()
    ended(start(RELAY))
    assert set(wire.ids()) == {"first", "second", "third"}


@pytest.mark.parametrize("broker", ["down", "silent"])
def test_a_program_that_ends_without_a_broker_leaves_its_events_to_relays(
    wire: Wire, start: Start, broker: str
):
    """A relay of another machine has to wait for the lease of one that was still connecting."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if broker == "down":
            silent.close()
            port = 1
        else:
            port = silent.getsockname()[1]
        code = """
direct_publisher.CONFIRM_WAIT_SECONDS = 0.15
for n in range(3):
    publish(f"event-{n}")
"""
        process = start(code, url=f"amqp://guest:guest@127.0.0.1:{port}//")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
    if broker == "down":
        assert table().filter(due_at__lte=Now(), claim=None, attempts=0).count() == 3
    ended(start(RELAY, before=CONTAINER if broker == "down" else ()))
    assert arrived(wire, 3) == Counter(f"event-{n}" for n in range(3))


def test_published_while_the_interpreter_ends(wire: Wire, start: Start):
    code = """
import atexit
atexit.register(publish, "late")
"""
    _, err = start(code).communicate(timeout=60)
    assert "Traceback" not in err
    table().update(due_at=Now())
    ended(start(RELAY))
    assert wire.ids() == ["late"]


def test_events_relay(wire: Wire, start: Start, tmp_path: Path):
    """The command relays, waits, and ends on a signal or when its parent dies."""
    ended(start(PUBLISHER, "a"), -signal.SIGKILL)
    table().update(due_at=Now())
    command = "from django.core.management import call_command\ncall_command('events_relay', {})"
    out = ended(start(command.format("until_empty=True")))
    assert re.search(r"events_relay: stopped; 1\d\d\d events published in all", out)
    assert not table().exists()
    running = start(command.format("parent=os.getppid()"))
    assert running.stdout
    assert "relaying the outbox of shop" in running.stdout.readline()
    running.send_signal(signal.SIGTERM)
    assert "stopped; nothing in all" in ended(running)
    assert len(arrived(wire, 1050)) == 1050
