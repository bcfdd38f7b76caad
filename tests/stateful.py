"""How long the state machines run."""

from __future__ import annotations

import os

import pytest
from django.db import connections
from hypothesis import HealthCheck, settings

from tests.conftest import Database

#: More examples, at random; unset, the same ones in each run.
FUZZ = "AMQP_EVENTS_FUZZ"
#: Seconds of a run, at most.
TIMEOUT = 0 if FUZZ in os.environ else 600


def examples(request: pytest.FixtureRequest, quick: int, full: int) -> settings:
    """Return the settings of a run with so many examples in `make test` and `make test-all`."""
    more = os.environ.get(FUZZ)
    return settings(
        max_examples=int(more or (quick if request.config.getoption("--quick") else full)),
        stateful_step_count=40,
        derandomize=not more,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def without_disk(database: Database) -> None:
    """Let SQLite not wait for the disk: no test of this kind cuts the power."""
    if database.kind == "sqlite":
        with connections[database.alias].cursor() as cursor:
            cursor.execute("PRAGMA synchronous = OFF")
