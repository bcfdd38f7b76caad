"""Probes, and what workers say of their queues. Real processes: the acceptance suite."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from django_amqp_events import liveness
from django_amqp_events.monitor import health
from django_amqp_events.monitor.queue_status import _paused, _prefetch
from django_amqp_events.monitor.state_texts import PREFETCH_REASONS
from django_amqp_events.testing import override_events
from django_amqp_events.worker.prefetch import Why
from tests.commands import run_command

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write the file of a part of this process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def write(name: str, problem: str = "", *, seconds: float = 0.0, rests: bool = False) -> None:
        part = liveness.Part(name, lambda: problem)
        (part.rest if rests else part.turn)()
        path = next(tmp_path.glob(f"*/probed/{name}.*"))
        os.utime(path, (time.time() - seconds,) * 2)

    with override_events(SERVICE="probed"):
        yield write


def probe(*arguments: str) -> tuple[int, dict[str, str]]:
    code, out, _ = run_command("events_health", "--format", "json", *arguments)
    return code, {each["part"]: each["problem"] for each in json.loads(out)["processes"]}


def test_a_part_that_is_not_ready_is_alive(write: Write) -> None:
    write("relay", "it is paused")
    write("worker", rests=True, seconds=3600)
    assert probe("--live") == (0, {"relay": "", "worker": ""})
    assert probe("--ready") == (1, {"relay": "it is paused", "worker": ""})
    assert probe("--ready", "--part", "worker") == (0, {"worker": ""})


def test_a_loop_that_hangs(write: Write) -> None:
    write("mirror", seconds=health.HANGING_SECONDS + 10)
    code, found = probe("--live")
    assert (code, list(found)) == (1, ["mirror"])
    assert found["mirror"].startswith("its loop has not turned for 31")
    assert found["mirror"].endswith("restart it")


def test_a_part_that_does_not_run(write: Write) -> None:
    write("relay")
    code, found = probe("--live", "--part", "companion")
    assert (code, list(found)) == (1, ["relay", "mirror", "batches"])
    assert found["mirror"] == "no process of this container runs it: start events_mirror"


def test_as_text(write: Write) -> None:
    write("mirror", "it is paused")
    write("relay")
    code, out, _ = run_command("events_health", "--ready")
    assert code == 1
    assert out.splitlines()[0].endswith("): it is paused")
    assert out.splitlines()[1].startswith("relay (process ")
    assert out.splitlines()[1].endswith("): ready")
    assert run_command("events_health", "--live", verbosity=0)[:2] == (0, "")


def test_the_files_of_dead_processes(write: Write, tmp_path: Path) -> None:
    write("relay")
    [ours] = tmp_path.glob("*/probed/relay.*")
    if not (child := os.fork()):
        liveness.Part("mirror", lambda: "").turn()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(ours.parent.iterdir())) == 2
    assert probe("--live") == (0, {"relay": ""})
    assert list(ours.parent.iterdir()) == [ours]


def test_a_part_that_has_ended_or_cannot_write(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = liveness.Part("relay", lambda: "")
    part.turn()
    part.end()
    assert list(probe("--live")[1]) == [""]
    [folder] = tmp_path.iterdir()
    shutil.rmtree(folder)
    folder.touch()
    part.rest()
    part.rest()
    assert caplog.text.count("cannot examine this process") == 1
    assert list(probe("--live")[1]) == [""]


def test_a_full_disk_opens_one_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = liveness.Part("relay", str)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        for _ in range(3):
            part.rest()
    assert len(list(tmp_path.glob("*/probed/relay.*"))) == 1
    part.rest()
    assert probe("--live") == (0, {"relay": ""})


def test_a_probe_before_the_file_is_locked(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the file for one of a dead process."""
    lock = fcntl.flock

    def flock(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        assert probe("--live")[0] == 1
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    part = liveness.Part("relay", str)
    for _ in range(2):
        part.turn()
    assert probe("--live") == (0, {"relay": ""})


def test_another_service_is_not_examined(write: Write) -> None:
    write("relay")
    with override_events(SERVICE="probed2"):
        assert probe("--live") == (
            1, {"": "no process of service 'probed2' runs in this container"}
        )  # fmt: skip
        told = run_command("events_health", "--live")[1]
        assert told == "no process of service 'probed2' runs in this container\n"


# -- what workers say of their queues --------------------------------------------------------------


def worker(paused: list[str], counts: dict[str, list[Any]] | None) -> dict[str, Any]:
    return {"amqp_events": {"paused": paused, "prefetch_counts": counts}}


WORKERS = {
    "one": worker(["b"], {"a": [32, "measured"], "b": [0, "slow"]}),
    "two": worker([], {"a": [16, "measured"], "b": [1, "rate"]}),
    "configured": worker([], {"a": [4, "configured"]}),
    "of other queues": worker(["c"], {"c": [0, "slow"]}),
    "a reaper": worker([], None),
    "without events": {"pool": {}},
}


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        ("a", {"configured": 4, "measured": 48}),
        ("b", {"rate": 1, "slow": 0}),
        ("unknown", {}),
    ],
)
def test_counts_of_all_workers_are_added_by_reason(queue: str, expected: dict[str, int]) -> None:
    assert _prefetch(WORKERS, queue) == expected


def test_paused_queues() -> None:
    assert _paused(WORKERS) == {"b", "c"}


def test_each_reason_has_a_text() -> None:
    assert set(PREFETCH_REASONS) == set(get_args(Why))
