"""Limits that the broker sets are negotiated, not assumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import Node

from ..conftest import Make
from ..harness import Archive, Eyes, until

ACT, FRAME_MAX = "options.act", 8192


@pytest.fixture(scope="module")
def small_frames(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    where: Path = tmp_path_factory.mktemp("frames")
    node = Node.start(where, config_extra=f"frame_max = {FRAME_MAX}")
    yield node
    node.end()


@pytest.mark.slow
def test_small_frames(small_frames: Node, service: Make) -> None:
    """Copies are cut until they fit, each event is run as often as its policy says, and a new event
    that cannot fit is refused where it is published."""
    eyes = Eyes(small_frames, "/")
    options = service(eyes, "options", handlers="options")
    options.declare()
    options.worker("prefork", 2).wait_ready()
    large = {f"trace-{number}": "x" * 200 for number in range(15)}
    failed = [
        eyes.event(ACT, {"plan": [step]}, headers=large) for step in ("deep", "fail", "big") * 2
    ]
    archive = Archive(eyes, "options")
    until(lambda: len(archive.collect()) >= 2 * len(failed), 60, "all are archived")
    entries = archive.collect()
    assert len(entries) == 2 * len(failed), "act and kept"
    for entry in entries:
        runs = options.runs(entry["event_id"], handler=entry["handler"])
        assert (entry["reason"], len(runs)) == ("exhausted", entry["attempt"])
        assert entry["exception"]["type"] in ("ValueError", "RuntimeError")
        if entry["exception"]["type"] == "RuntimeError":
            assert "traceback" in entry["cut"]
    eyes.empty("options.testproject.act", "options.testproject.kept")
    said = options.python(
        "from django_amqp_events import event\n"
        "act = event('options.act')(lambda plan: None)\n"
        "act.using(headers={'small': 'x'}).publish(plan=['ok'])\n"
        "for size in (3_000, 20_000):\n"
        "    try:\n"
        "        act.using(headers={'large': 'x' * size}).publish(plan=['ok'])\n"
        "    except Exception as exc:\n"
        "        print(type(exc).__name__, exc)\n"
    )
    assert said.count("InvalidEventError") == 1
    assert "the headers of event 'options.act' take more than 3968 bytes" in said
    eyes.close()
