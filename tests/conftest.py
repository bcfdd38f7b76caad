"""Fixtures that every suite shares: a RabbitMQ, a vhost of one's own, a node that may be killed.

A broker that cannot be had is a failure, never a skip: a suite that skips proves nothing.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from broker import Broker, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Vhost:
    """A vhost that nobody else uses; it is deleted when its module is through."""

    name: str
    url: str
    management_url: str
    node: Broker

    @property
    def path(self) -> str:
        """The name as the management API wants it in a path."""
        return self.url.rpartition("/")[2]


# Under pytest-xdist all processes share one node, which the controller ends.
SHARED = "AMQP_EVENTS_SHARED_NODE"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and getattr(config.option, "numprocesses", None):
        os.environ[SHARED] = tempfile.mkdtemp(prefix="rabbit-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and (shared := os.environ.pop(SHARED, None)):
        if node := Node.attach(shared):
            node.end()
        shutil.rmtree(shared, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Reports travel to the controller as UTF-8, and our tests log and show lone surrogates."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_encodable(item) for item in value)
    return value


def _shared_node(directory: Path) -> Node:
    """The node of all test processes; the first one starts it. It ends with the controller."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (running := Node.attach(directory)) is not None:
            return running
        node = Node.start(directory, owner=os.getppid())
        node.disown()
        return node


@pytest.fixture(scope="session")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The broker of this session: AMQP_URL (and AMQP_MANAGEMENT_URL) if set, else a private node.

    Shared by all tests: do not stop or kill it, `private_node` is for that.
    """
    if url := os.environ.get("AMQP_URL"):
        yield Broker.from_urls(url, os.environ.get("AMQP_MANAGEMENT_URL"))
        return
    if shared := os.environ.get(SHARED):
        yield _shared_node(Path(shared))
        return
    node = Node.start(tmp_path_factory.mktemp("rabbit"))
    yield node
    node.end()


@pytest.fixture(scope="module")
def vhost(rabbit: Broker, request: pytest.FixtureRequest) -> Iterator[Vhost]:
    """A fresh vhost for the test module."""
    name = f"{request.module.__name__.rpartition('.')[2]}-{secrets.token_hex(4)}"
    with _vhost(rabbit, name) as fresh:
        yield fresh


@pytest.fixture
def fresh_vhost(rabbit: Broker, request: pytest.FixtureRequest) -> Iterator[Vhost]:
    """A fresh vhost for one test."""
    name = re.sub(r"\W+", "-", request.node.name)[:60] + f"-{secrets.token_hex(4)}"
    with _vhost(rabbit, name) as fresh:
        yield fresh


class _vhost:  # noqa: N801 (a context manager, used like a function)
    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self.name = name

    def __enter__(self) -> Vhost:
        self.broker.add_vhost(self.name)
        management_url = self.broker.management_url
        assert management_url is not None
        return Vhost(
            name=self.name,
            url=self.broker.amqp_url(self.name),
            management_url=management_url,
            node=self.broker,
        )

    def __exit__(self, *_: object) -> None:
        self.broker.delete_vhost(self.name)


@pytest.fixture(scope="session")
def make_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Node]]:
    """Start further nodes, with the arguments of `Node.start`; all are gone at the end."""
    nodes: list[Node] = []

    def start(**options: object) -> Node:
        node = Node.start(tmp_path_factory.mktemp("node"), **options)  # type: ignore[arg-type]
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        node.end()


@pytest.fixture(scope="module")
def _module_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node.start(tmp_path_factory.mktemp("private"))
    yield node
    node.end()


@pytest.fixture
def private_node(_module_node: Node) -> Node:
    """A node that only this module uses and that a test may stop, kill and start again.

    It runs when a test begins, whatever the one before did to it; its data stays.
    """
    if not _module_node.alive:
        _module_node.start_again()
    else:
        _module_node.wait_ready()
    return _module_node
