"""Identities of processes: which deaths are known, and which are not claimed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from django_amqp_events import process_identity
from django_amqp_events.process_identity import has_died, identity, place

PRINT = "from django_amqp_events import process_identity as p; print(p.identity(), flush=True)"


def other(code: str = PRINT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_process_lives_until_it_has_ended() -> None:
    with other(f"{PRINT}; input()") as process:
        assert process.stdout
        found = process.stdout.readline().strip()
        assert found.startswith(place())
        assert not has_died(found)
        process.kill()
        process.wait()
        assert has_died(found)


def test_a_fork_has_an_identity_of_its_own() -> None:
    mine = identity()
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, identity().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    child = os.read(reader, 200).decode()
    os.close(reader)
    os.close(writer)
    assert identity() == mine
    assert child.split(".")[:2] == [place(), str(pid)]
    assert has_died(child)
    assert not has_died(mine)


def test_a_process_id_that_is_used_again() -> None:
    where, pid, started = identity().split(".")
    assert has_died(f"{where}.{pid}.{int(started) - 1}")


def test_a_process_that_does_not_show_when_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the mount option hidepid, for the processes of other users."""
    mine, where = identity(), place()
    monkeypatch.setattr(process_identity, "_started", lambda pid: "")
    assert not has_died(f"{where}.{os.getpid()}.1")
    assert not has_died(mine)


@pytest.mark.parametrize(
    "text", ["", "x", "x.1.1", "{place}", "{place}.x.1", "{place}.-1.1", "..1"]
)
def test_what_is_unknown_has_not_died(text: str) -> None:
    assert not has_died(text.format(place=place()))


def test_without_proc_an_identity_cannot_be_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(process_identity, "_PROC", tmp_path)
    process_identity._identity.cache_clear()
    try:
        mine = identity()
        assert mine == identity()
        assert place() == ""
        assert not has_died(mine)
    finally:
        process_identity._identity.cache_clear()
