"""Publishing before and after a fork. Each program runs with every warning an error.

The proxy tells what a fork does to the parent's connection: a child that closed the inherited
socket politely, or shut it down, would end it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import django_amqp_events
from tests import forked
from tests.conftest import Vhost

from ..wire import (
    ACK,
    DEADLINE,
    Proxy,
    Wire,
    until,
)

PACKAGE = Path(django_amqp_events.__file__).resolve().parent.parent

BEGIN = """
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # of a fork beside a thread
import os, sys, threading
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_amqp_events"],
    AMQP_EVENTS={
        "SERVICE": "shop", "AUTODISCOVER": [], "PUBLISH": "immediate", "CONFIRM_TIMEOUT": 10,
        "EXCHANGE": os.environ["EXCHANGE"], "CELERY_APP": "__main__.app",
    },
)
django.setup()
from celery import Celery
app = Celery("fork", broker=os.environ["URL"], set_as_current=False)
from django_amqp_events import conf, publish_event, publish_many
from django_amqp_events.broker import publisher_pool

def publish(who, count=1):
    publish_many("shop.forked", [{"who": who, "pid": os.getpid()} for _ in range(count)])

def port():
    (channel,) = publisher_pool.publisher_pool(conf.get_settings())._idle
    return channel._transport.sock.getsockname()[1]

def wait(pid):
    _, status = os.waitpid(pid, 0)
    assert status == 0, status

def said(word):
    print(word, flush=True)

def heard(word):
    assert sys.stdin.readline().strip() == word

publish("parent")
mine = port()
"""

END = """
publish("parent")
assert port() == mine, "the parent opened another connection"
"""


@pytest.fixture
def wire(vhost: Vhost) -> Iterator[Wire]:
    with Wire.on(vhost.url) as wire:
        yield wire


@contextmanager
def program(wire: Wire, proxy: Proxy, code: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program; it has to end well and to say nothing on stderr."""
    process = forked.Popen(
        [
            sys.executable, "-c", BEGIN + code + END,
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(PACKAGE),
            "URL": proxy.url,
            "EXCHANGE": wire.exchange,
        },
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
        _, err = process.communicate(timeout=DEADLINE * 2)
        assert (process.returncode, err) == (0, "")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def run(wire: Wire, code: str) -> Proxy:
    proxy = wire.proxy()
    with program(wire, proxy, code):
        pass
    return proxy


def counts(wire: Wire) -> dict[str, int]:
    found: dict[str, int] = {}
    for payload in wire.payloads():
        found[payload["who"]] = found.get(payload["who"], 0) + 1
    return found


@pytest.mark.parametrize("exit_", ["os._exit(0)", "sys.exit(0)", "os.execv('/bin/true', ['true'])"])
def test_os_fork(wire: Wire, exit_: str):
    code = f"""
for n in range(3):
    pid = os.fork()
    if not pid:
        publish("child", 5)
        publish("child", 5)
        {exit_}
    wait(pid)
    publish("parent")
"""
    proxy = run(wire, code)
    assert counts(wire) == {"parent": 5, "child": 30}
    assert len(proxy.links) == 4


def test_a_child_that_does_not_publish(wire: Wire):
    """Nor says goodbye on the parent's connection when it ends."""
    code = """
pid = os.fork()
if not pid:
    publisher_pool.close_pools()
    sys.exit(0)
wait(pid)
"""
    proxy = run(wire, code)
    assert counts(wire) == {"parent": 2}
    assert len(proxy.links) == 1


def test_while_another_thread_holds_the_lock(wire: Wire):
    code = """
pool = publisher_pool.publisher_pool(conf.get_settings())
held, done = threading.Event(), threading.Event()
def hold():
    with pool._changed:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if not pid:
    import signal
    signal.alarm(20)
    publish("child")
    os._exit(0)
wait(pid)
done.set()
thread.join()
"""
    run(wire, code)
    assert counts(wire) == {"parent": 2, "child": 1}


def test_in_the_middle_of_another_threads_publish(wire: Wire):
    code = """
said("warm")
heard("hold")
thread = threading.Thread(target=publish, args=("thread",))
thread.start()
heard("fork")
pid = os.fork()
if not pid:
    publish("child", 3)
    os._exit(0)
wait(pid)
said("forked")
thread.join()
"""
    proxy = wire.proxy()
    with program(wire, proxy, code) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "warm\n"
        proxy.hold = {ACK}
        process.stdin.write("hold\n")
        process.stdin.flush()
        until(lambda: proxy.links[0].held, "the thread waits for its confirm")
        proxy.hold = set()
        process.stdin.write("fork\n")
        process.stdin.flush()
        assert process.stdout.readline() == "forked\n"
        assert not proxy.links[0].closed, "the child ended its parent's connection"
        proxy.links[0].release()
    assert counts(wire) == {"parent": 2, "child": 3, "thread": 1}
    assert len(proxy.links) == 2


def test_fork_without_python_hooks(wire: Wire):
    """Servers that embed Python may fork without its hooks; only the pid changes."""
    code = """
import ctypes
pid = ctypes.PyDLL(None).fork()
if not pid:
    publish("child", 3)
    os._exit(0)
wait(pid)
"""
    proxy = run(wire, code)
    assert counts(wire) == {"parent": 2, "child": 3}
    assert len(proxy.links) == 2
