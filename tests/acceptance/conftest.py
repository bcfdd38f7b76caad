"""Fixtures of the acceptance tests; a failing test shows the ends of its workers' logs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu.pidbox import Mailbox

from broker import Node
from tests.conftest import Vhost, _vhost, slow

from .harness import (
    STARTED,
    Archive,
    Eyes,
    Service,
)

Make = Callable[..., Service]
POOLS = ("prefork", *slow("threads", "solo"))
#: With Celery 5.5, two workers of one name share a mailbox, and kombu warns.
NAMES_ARE_UNIQUE = pytest.mark.skipif(
    "queue_exclusive" not in inspect.signature(Mailbox).parameters,
    reason="the mailboxes of this kombu are not exclusive",
)


@pytest.fixture(scope="module")
def eyes(vhost: Vhost) -> Iterator[Eyes]:
    looking = Eyes(vhost.node, vhost.name)
    yield looking
    looking.close()


@pytest.fixture
def fresh_eyes(fresh_vhost: Vhost) -> Iterator[Eyes]:
    """Eyes on a vhost of this test's own."""
    looking = Eyes(fresh_vhost.node, fresh_vhost.name)
    yield looking
    looking.close()


@pytest.fixture
def node_eyes(private_node: Node) -> Iterator[Eyes]:
    """Eyes on a vhost of this test's own, on a node that may be stopped and killed."""
    with _vhost(private_node, "private") as fresh:
        looking = Eyes(fresh.node, fresh.name)
        yield looking
        looking.close()


@pytest.fixture
def archive(eyes: Eyes) -> Archive:
    return Archive(eyes)


def _service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Make services; their workers are killed after the test, or after the module."""
    before = len(STARTED)

    def make(eyes: Eyes, name: str = "core", **options: Any) -> Service:
        where = options.pop("where", None) or tmp_path_factory.mktemp(name)
        return Service(url=eyes.url, where=Path(where), name=name, eyes=eyes, **options)

    yield make
    for worker in STARTED[before:]:
        worker.kill()
    del STARTED[before:]


service = pytest.fixture(_service)
module_service = pytest.fixture(scope="module")(_service)


@pytest.fixture
def core(service: Make, fresh_eyes: Eyes) -> Service:
    """The service ``core``, declared."""
    return service(fresh_eyes).declare()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    report = yield
    if report.failed:
        for worker in STARTED:
            tail = "\n".join(worker.log.splitlines()[-60:])
            report.sections.append((f"log of {worker.name} ({worker.log_path})", tail))
    return report
