"""Rows as tests: each of them with few events, whenever the suite runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pprint import pformat
from typing import Any

import pytest

from broker import Node
from tests.acceptance.conftest import pytest_runtest_makereport  # noqa: F401 - shows the logs
from tests.acceptance.harness import STARTED
from tests.conftest import SLOW
from tests.waiting import NotInTime

from . import rows_of
from .rows import ROWS
from .running import run
from .world import Grounds

#: Of all families of faults, `make test` has these.
QUICK = frozenset({
    "broker-killed-handling", "broker-killed-publish", "child-within", "companion-killed",
    "cut-handling", "database-outbox", "delay-queue-deleted", "warm-prefork",
})  # fmt: skip
#: Published by a row; `make faults` takes many more.
EVENTS = 40

Hold = Callable[[str], None]


def cases(module: str, *groups: str) -> list[Any]:
    """Return the rows of a module as parameters."""
    names = rows_of(module, *groups)
    return [pytest.param(name, marks=() if name in QUICK else SLOW) for name in names]


@pytest.fixture(scope="session")
def _grounds(
    own_node: Node, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Grounds]]:
    with ExitStack() as stack:

        @cache
        def make(kind: str) -> Grounds:
            grounds = Grounds(tmp_path_factory.mktemp("faults"), kind=kind, node=own_node)
            stack.callback(grounds.end)
            return grounds

        yield make


@pytest.fixture(scope="module")
def grounds(request: pytest.FixtureRequest, _grounds: Callable[[str], Grounds]) -> Grounds:
    """A broker and a database server of this process, which rows may kill."""
    kind = getattr(request, "param", os.environ.get("AMQP_EVENTS_FAULTS_DATABASE", "postgresql"))
    return _grounds(kind)


@pytest.fixture
def hold(grounds: Grounds) -> Iterator[Hold]:
    """Run a row; nothing may be lost, no effect doubled, and the fault must have hit."""

    def hold(name: str) -> None:
        result = run(ROWS[name], grounds, events=EVENTS, seed="suite")
        told = pformat(asdict(result), width=120)
        if result.late:
            raise NotInTime(told)
        assert result.held, told

    before = len(STARTED)
    yield hold
    # A later failure shows the logs of its own processes.
    del STARTED[before:]
