"""Programs that publish: they fork, die, or end while the broker does not answer.

Each runs with every warning an error. Event ids tell who published what, so what should have
arrived is known without asking those that died. A proxy tells what a fork does to the parent's
connection: a child that closed the inherited socket politely, or shut it down, would end it.
"""

from __future__ import annotations

import json
import os
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
from tests import forked
from tests.conftest import Database, Vhost

from ..relaying import ALIAS, table
from ..wire import ACK, Proxy, Wire, until

PACKAGE = Path(django_amqp_events.__file__).resolve().parent.parent
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
    DATABASES=json.loads(os.environ["DATABASES"]),
    AMQP_EVENTS={
        "SERVICE": "shop", "AUTODISCOVER": [], "CONFIRM_TIMEOUT": 10,
        "PUBLISH": "outbox" if os.environ["DATABASES"] != "{}" else "immediate",
        "EXCHANGE": os.environ["EXCHANGE"], "CELERY_APP": "__main__.app",
    },
)
django.setup()
from celery import Celery
app = Celery("program", broker=os.environ["URL"], set_as_current=False)
from django.db import connections, transaction
from django_amqp_events import Options, conf, publish_event
from django_amqp_events.broker import publisher_pool
from django_amqp_events.publish import direct_publisher, outbox_rows
from django_amqp_events.publish.relay import Relay

# A machine that is busy confirms late. Where that is not the point, it is waited for.
direct_publisher.CONFIRM_WAIT_SECONDS = 30

def publish(event_id, **payload):
    publish_event("shop.happened", payload, options=Options(event_id=event_id))

def pool():
    return publisher_pool.publisher_pool(conf.get_settings())

def wait(pid):
    _, status = os.waitpid(pid, 0)
    assert status == 0, status

def said(word):
    print(word, flush=True)

def heard(word):
    assert sys.stdin.readline().strip() == word
"""
RELAY = """
Relay(
    app=app, settings=conf.get_settings(), alias="default", size=100
).run(until_empty=True)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def wire(vhost: Vhost, request: pytest.FixtureRequest) -> Iterator[Wire]:
    """With an outbox where the test has a database."""
    keys = {}
    if "archive_database" in request.fixturenames:
        request.getfixturevalue("archive_database")
        keys = {"PUBLISH": "outbox", "DATABASE": ALIAS}
    with Wire.on(vhost.url, **keys) as wire:
        yield wire


@pytest.fixture
def start(wire: Wire, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start a program; whatever still runs is killed with the test."""
    started: list[subprocess.Popen[str]] = []
    databases: dict[str, Any] = {}
    if "archive_database" in request.fixturenames:
        databases["default"] = request.getfixturevalue("archive_database").settings

    def start(code: str, *, url: str = "") -> subprocess.Popen[str]:
        process = forked.Popen(
            [sys.executable, "-c", BEGIN + code],
            env={
                **os.environ,
                "PYTHONPATH": str(PACKAGE),
                "URL": url or wire.url,
                "EXCHANGE": wire.exchange,
                "DATABASES": json.dumps(databases),
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


def ended(process: subprocess.Popen[str], code: int = 0) -> None:
    """Wait for the end of a program, which says nothing on stderr."""
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (code, "")


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def write(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


# -- forks of a program that publishes immediately -------------------------------------------------

PARENT = """
publish("first")
mine = pool()._idle[0]._transport.sock.getsockname()[1]
{}
publish("last")
assert pool()._idle[0]._transport.sock.getsockname()[1] == mine, "the parent opened another one"
"""
FORK = """
import ctypes
pid = {}
if not pid:
    {}
wait(pid)
"""


@pytest.mark.parametrize(
    ("fork", "child", "published"),
    [
        ("os.fork()", "publish('1'); publish('2'); os._exit(0)", 2),
        ("os.fork()", "publish('1'); sys.exit(0)", 1),
        ("os.fork()", "publish('1'); os.execv('/bin/true', ['true'])", 1),
        # Nor does it say goodbye on the parent's connection when it ends.
        ("os.fork()", "publisher_pool.close_pools(); sys.exit(0)", 0),
        # Servers that embed Python may fork without its hooks; only the pid changes.
        ("ctypes.PyDLL(None).fork()", "publish('1'); os._exit(0)", 1),
    ],
)
def test_a_fork_has_a_connection_of_its_own(
    wire: Wire, start: Start, fork: str, child: str, published: int
) -> None:
    proxy = wire.proxy()
    ended(start(PARENT.format(FORK.format(fork, child)), url=proxy.url))
    assert wire.ids() == ["first", *["1", "2"][:published], "last"]
    assert len(proxy.links) == (2 if published else 1)


def test_a_fork_in_the_middle_of_another_threads_publish(wire: Wire, start: Start) -> None:
    code = """
said("warm")
heard("hold")
thread = threading.Thread(target=publish, args=("thread",))
thread.start()
heard("fork")
pid = os.fork()
if not pid:
    publish("child")
    os._exit(0)
wait(pid)
said("forked")
thread.join()
"""
    proxy = wire.proxy()
    process = start(PARENT.format(code), url=proxy.url)
    assert read(process) == "warm"
    proxy.hold = {ACK}
    write(process, "hold")
    until(lambda: proxy.links[0].held, "the thread waits for its confirm")
    proxy.hold = set()
    write(process, "fork")
    assert read(process) == "forked"
    assert not proxy.links[0].closed, "the child ended its parent's connection"
    proxy.links[0].release()
    ended(process)
    assert Counter(wire.ids()) == dict.fromkeys(("first", "thread", "child", "last"), 1)
    assert len(proxy.links) == 2


# -- with an outbox --------------------------------------------------------------------------------


def test_forks_with_an_outbox(archive_database: Database, wire: Wire, start: Start) -> None:
    """Fork between and after publishing, in a fork, and while a lock is held."""
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
with direct_publisher.get_direct_publisher(conf.get_settings())._changed:
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


def test_a_program_that_ends_while_the_broker_is_silent(
    archive_database: Database, wire: Wire, start: Start
) -> None:
    proxy: Proxy = wire.proxy()
    code = """
direct_publisher.CONFIRM_WAIT_SECONDS = 0.15
publish("first")
said("go")
heard("on")
began = time.monotonic()
publish("second")
publish("third")
said(time.monotonic() - began)
"""
    process = start(code, url=proxy.url)
    assert read(process) == "go"
    until(lambda: not table().exists(), "the first is confirmed")
    proxy.flowing.clear()
    write(process, "on")
    assert float(read(process)) < 2
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20, "the end is not waited for without end"
    assert process.returncode == 0
    assert "Traceback" not in err
    assert sorted(table().values_list("event_id", flat=True)) == ["second", "third"]
    proxy.flowing.set()
    table().update(due_at=Now())
    ended(start(RELAY))
    assert set(wire.ids()) == {"first", "second", "third"}


def test_published_while_the_interpreter_ends(
    archive_database: Database, wire: Wire, start: Start
) -> None:
    _, err = start("import atexit\natexit.register(publish, 'late')").communicate(timeout=60)
    assert "Traceback" not in err
    table().update(due_at=Now())
    ended(start(RELAY))
    assert wire.ids() == ["late"]
