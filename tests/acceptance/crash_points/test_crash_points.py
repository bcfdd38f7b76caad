"""Each path of an event survives the death of its process before and after each of its effects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import SLOW, Servers

from ..conftest import Make
from ..harness import Eyes
from .paths import PATHS
from .scene import Path, Scene, explore

pytestmark = pytest.mark.timeout(900)
#: `make test-all` has more points of the same kinds.
QUICK = ("publish, outbox", "relay", "handle, success", "replay")


def cases() -> Iterator[Any]:
    """Yield each path on SQLite, and those that commit on PostgreSQL; commands have more."""
    for path in PATHS:
        name = path.name.replace(", ", "-").replace(" ", "_")
        for kind in ("sqlite", "postgresql") if "commit" in path.kinds else ("sqlite",):
            is_quick = kind == "sqlite" and path.name in QUICK
            marks = () if is_quick else SLOW
            yield pytest.param(path, kind, id=f"{name}-{kind}", marks=marks)


@pytest.mark.parametrize(("path", "kind"), [*cases()])
def test_a_path(path: Path, kind: str, fresh_eyes: Eyes, service: Make, servers: Servers) -> None:
    crash = service(fresh_eyes, "crash", handlers="paired")
    crash.events = {"MANAGEMENT_URL": fresh_eyes.node.management_url}
    # Seconds after which a relay takes over the rows of a process that died.
    crash.environ = {**crash.environ, "TESTPROJECT_LEASE": "6"}
    crash.declare()
    server = None if kind == "sqlite" else servers[kind]
    outcome = explore(path, Scene(crash, fresh_eyes, server))
    print(*outcome.effects, sep="\n")
    assert not outcome.wrong, outcome.wrong
    assert outcome.reached
    assert path.varies or len(outcome.reached) == 2 * len(outcome.effects)
