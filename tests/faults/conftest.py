"""Rows as tests: each of them with few events, whenever the suite runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pprint import pformat

import pytest

from tests.acceptance.conftest import pytest_runtest_makereport  # noqa: F401 - shows the logs

from .rows import ROWS
from .running import run
from .world import Grounds

#: Published by a row; `make faults` takes many more.
EVENTS = 40

Hold = Callable[[str], None]


@pytest.fixture(scope="module")
def grounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grounds]:
    """A broker and a database server of the module's own, which rows may kill."""
    kind = os.environ.get("AMQP_EVENTS_FAULTS_DATABASE", "postgresql")
    grounds = Grounds(tmp_path_factory.mktemp("faults"), kind=kind)
    yield grounds
    grounds.end()


@pytest.fixture
def hold(grounds: Grounds) -> Hold:
    """Run a row; nothing may be lost, no effect doubled, and the fault must have hit."""

    def hold(name: str) -> None:
        result = run(ROWS[name], grounds, events=EVENTS, seed="suite")
        assert result.held, pformat(asdict(result), width=120)

    return hold
