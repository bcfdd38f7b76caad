"""Each path of an event survives the death of its process before and after each of its effects."""

from __future__ import annotations

from pathlib import Path as File

import pytest

from tests.conftest import KINDS, Servers

from ..conftest import Make
from ..harness import Eyes
from .paths import PATHS
from .scene import Path, Scene, explore

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [False, True], ids=["commits", "statements"])
@pytest.mark.parametrize(
    "path", PATHS, ids=lambda path: path.name.replace(", ", "-").replace(" ", "_")
)
def test_a_path(
    path: Path,
    every: bool,
    kind: str,
    fresh_eyes: Eyes,
    service: Make,
    servers: Servers,
    tmp_path: File,
) -> None:
    made = service(fresh_eyes, "crash", handlers="paired")
    made.events = {"MANAGEMENT_URL": fresh_eyes.node.management_url}
    made.declare()
    server = None if kind == "sqlite" else servers[kind]
    outcome = explore(path, Scene(made, fresh_eyes, server), every=every)
    print(outcome, *outcome.effects, sep="\n")
    assert not outcome.wrong, outcome.wrong
    assert outcome.reached
    assert path.varies or len(outcome.reached) == outcome.points
