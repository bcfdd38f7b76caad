"""Web servers that publish: gunicorn with --preload, so that the master's pool is warm.

Its workers: processes, threads, and asynchronous ones with asynchronous views.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import django_amqp_events
from machine import free_ports
from tests import forked
from tests.conftest import Vhost

from ..wire import Wire, in_threads, until

PACKAGE = Path(django_amqp_events.__file__).resolve().parent.parent
ROOT = Path(__file__).resolve().parents[3]
REQUESTS = 200


@pytest.fixture
def wire(vhost: Vhost) -> Iterator[Wire]:
    with Wire.on(vhost.url) as wire:
        yield wire


@pytest.mark.parametrize(
    ("application", "page", "worker"),
    [
        ("wsgi", "", ["--worker-class", "sync"]),
        ("wsgi", "", ["--worker-class", "gthread", "--threads", "20"]),
        ("asgi", "async/", ["--worker-class", "asgi"]),
    ],
    ids=["sync", "threads", "asgi"],
)
def test_gunicorn(wire: Wire, tmp_path: Path, application: str, page: str, worker: list[str]):
    proxy = wire.proxy()
    (port,) = free_ports(1)
    log_path = tmp_path / "log"
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "2", *worker]
    command += ["--bind", f"127.0.0.1:{port}", "--no-control-socket"]
    with log_path.open("wb") as log:
        server = forked.Popen(
            [*command, f"tests.integration.web:{application}"],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(PACKAGE)]),
                "URL": proxy.url,
                "EXCHANGE": wire.exchange,
                "DATABASE": str(tmp_path / "database"),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        until(
            lambda: log_path.read_text().count("Booting worker") == 2 or server.poll() is not None,
            "both workers start",
        )
        until(lambda: answers(port) or server.poll() is not None, "gunicorn listens")
        ids: list[str] = []

        def visit(number: int) -> None:
            for n in range(number, REQUESTS, 40):
                url = f"http://127.0.0.1:{port}/{page}{n}"
                with urllib.request.urlopen(url, timeout=60) as answer:
                    ids.append(answer.read().decode())

        raised = in_threads(40, visit)
        assert not raised, log_path.read_text()
        messages = wire.take(about=REQUESTS + 1)  # a commit waits for a slow confirm only briefly
        # The master published at import. A later confirm lets an event of a worker come first.
        messages.sort(key=lambda message: payload_of(message.body)["n"])
        found = [message.properties["message_id"] for message in messages]
        assert len(set(ids)) == REQUESTS
        assert sorted(found[1:]) == sorted(ids)
        payloads = [payload_of(message.body) for message in messages]
        assert sorted(payload["n"] for payload in payloads) == list(range(-1, REQUESTS))
        # Its workers publish on connections of their own.
        assert payloads[0] == {"n": -1, "pid": server.pid}
        workers = {payload["pid"] for payload in payloads[1:]}
        assert 1 <= len(workers) <= 2
        assert server.pid not in workers
        assert not proxy.links[0].closed, "a worker ended the master's connection"
        assert len(proxy.links) <= 1 + 2 * 10
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    log_text = log_path.read_text()
    assert "Traceback" not in log_text, log_text


def payload_of(body: bytes) -> dict[str, int]:
    payload: dict[str, int] = json.loads(body)[1]
    return payload


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
