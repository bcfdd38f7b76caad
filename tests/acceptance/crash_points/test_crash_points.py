"""Each path of an event survives the death of its process before and after each of its effects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import SLOW, Servers

from ..conftest import Make
from ..harness import Eyes
from .paths import PATHS, Relay
from .scene import Path, Scene, explore

pytestmark = pytest.mark.timeout(900)
#: `make test-all` has more points of the same kinds.
QUICK = ("publish, outbox", "relay", "handle, success", "replay")


def scene(
    service: Make, eyes: Eyes, servers: Servers, kind: str, handlers: str = "paired"
) -> Scene:
    made = service(eyes, "crash", handlers=handlers)
    made.events = {"MANAGEMENT_URL": eyes.node.management_url}
    made.declare()
    return Scene(made, eyes, None if kind == "sqlite" else servers[kind])


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
    outcome = explore(path, scene(service, fresh_eyes, servers, kind), every=False)
    print(outcome, *outcome.effects, sep="\n")
    assert not outcome.wrong, outcome.wrong
    assert outcome.reached
    assert path.varies or len(outcome.reached) == outcome.points


def test_a_planted_fault_is_found(fresh_eyes: Eyes, service: Make, servers: Servers) -> None:
    """Only a crash after the rows are deleted, and before both events are published, shows it."""
    made = scene(service, fresh_eyes, servers, "sqlite", "planted_relay")
    outcome = explore(Relay(), made)
    kinds = [effect.split()[1] for effect in outcome.effects]
    assert kinds == ["sql", "sql", "sql", "publish", "publish", "sql"]
    assert [point.split()[:2] for point in outcome.wrong] == [
        ["after", "3"], ["before", "4"], ["after", "4"], ["before", "5"],
    ]  # fmt: skip
