"""A service that uses celery-amqp-events 0.1.0 on the same exchange: it understands us, we it."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from . import peering
from .conftest import Make
from .harness import Eyes, Worker, until

#: It installs the other package.
pytestmark = pytest.mark.slow

PEER = Path(__file__).resolve().parent / "peer"


def test_each_understands_the_other(fresh_eyes: Eyes, service: Make, tmp_path: Path) -> None:
    """In both directions, with retries on both sides: neither sees the other's retries."""
    mixed = service(fresh_eyes, "mixed", handlers="mixed").declare()
    ledger = tmp_path / "peer.jsonl"
    env = peering.environ(PEER, PEER_BROKER=fresh_eyes.url, PEER_LEDGER=str(ledger))
    command = peering.worker("peer", "--pool", "threads", "--concurrency", "2")
    peer = Worker.start(command, env=env, where=tmp_path, name="peer")
    mixed.worker("threads", 4)
    peer.wait_ready()
    queues = ("mixed.testproject.one", "mixed.testproject.peer_number", "peer.mixed.one")
    until(lambda: all(fresh_eyes.consumers(queue) for queue in queues))

    # Ours, published by our code: handled by the peer, who retries it once for itself alone.
    printed = mixed.python(
        "from testproject.mixed import chained\nprint(chained.publish(number=7))"
    )
    ours = printed.split()[-1]
    retried = fresh_eyes.event("mixed.one", {"plan": ["fail", "ok"]})
    # Theirs, published by their code, by position and by name.
    done = subprocess.run(
        [peering.interpreter(), PEER / "publisher.py", "41", "42"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs = done.stdout.split()

    until(lambda: {line["event"] for line in mixed.ledger(what="end")} >= {retried, *theirs}, 30)
    until(lambda: ledger.exists() and len(ledger.read_text().splitlines()) >= 3)
    fresh_eyes.empty(*queues)
    calls = Counter(tuple(json.loads(line)[1:]) for line in ledger.read_text().splitlines())
    assert calls == {("chained", 7): 1, ("one", 0): 1, ("one", 1): 1}
    assert len(mixed.runs(ours)) == 1
    assert [line["attempt"] for line in mixed.runs(retried)] == [1, 2]
    for event_id, number in zip(theirs, (41, 42), strict=True):
        runs = mixed.runs(event_id)
        assert [(line["attempt"], line["number"]) for line in runs] == [(1, number), (2, number)]
