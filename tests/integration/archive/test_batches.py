"""Batches on a real broker: runners that are stopped, and the commands."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from django_amqp_events.archive import tables
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.models import ArchivedEvent, ReplayBatch
from tests.acceptance import harness
from tests.archive_rows import build
from tests.conftest import ONE, Database

from ..conftest import Service, wait_until

QUEUE = "billing.send_invoice"

pytestmark = pytest.mark.timeout(240)


def fill(number: int) -> None:
    now = datetime.now(UTC)
    ArchivedEvent.objects.bulk_create(build(index, at=now) for index in range(number))


def begun(number: int, **more: Any) -> ReplayBatch:
    fill(number)
    batch = batch_states.freeze(tables.rows(), by="ada")
    assert batch_states.start(batch.pk, by="ada", **{"reason": "fixed", "threshold": None, **more})
    return batch


def again(batch: ReplayBatch) -> ReplayBatch:
    return batch_states.rows().get(pk=batch.pk)


@ONE
def test_sigterm_gives_back_and_pause_holds(billing: Service, processes: harness.Service) -> None:
    batch = begun(500, rate=20)
    one = processes.start("events_batches")
    wait_until(lambda: billing.ready(QUEUE) >= 20, "it has begun")
    assert one.stop() == 0
    found = again(batch)
    assert (found.state, found.runner, found.leased_until) == ("running", None, None)
    so_far = billing.ready(QUEUE)
    assert so_far % 20 == 0
    two = processes.start("events_batches")
    wait_until(lambda: billing.ready(QUEUE) > so_far, "the next one goes on at once")
    assert batch_states.pause(batch.pk, by="ada")
    at_most = billing.ready(QUEUE) + 20
    wait_until(lambda: again(batch).runner is None, "it is given back")
    two.stop()
    assert billing.ready(QUEUE) <= at_most
    assert again(batch).state == "paused"


@ONE
def test_the_commands(billing: Service, archive_database: Database) -> None:
    fill(3)
    code, _, err = billing.command("events_replay", "--all", "--background")
    assert code == 2
    assert "--comment" in err
    for wrong in (["--force"], ["--dry-run"], ["--pause-at", "101"]):
        asked = ["--handler", "send_invoice", "--background", "--comment", "fixed", *wrong]
        assert billing.command("events_replay", *asked)[0] == 2, wrong
    assert billing.command("events_replay", "--all", "--canary", "2")[0] == 2
    assert not batch_states.rows().exists()
    code, out, _ = billing.command(
        "events_replay", "--handler", "send_invoice", "--background", "--comment", "fixed",
        "--rate", "50", "--pause-at", "0", "--format", "json",
    )  # fmt: skip
    assert code == 0
    begun = json.loads(out)
    batch = batch_states.rows().get(pk=begun["batch"])
    assert (batch.total, batch.state, batch.rate, batch.threshold) == (3, "running", 50, None)
    assert str(batch.title) == "All with handler send_invoice"
    pk = str(batch.pk)
    assert "running: 3 events (3 pending)" in billing.command("events_batches", "list")[1]
    for act, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        code, out, _ = billing.command("events_batches", act, pk)
        assert (code, state in out) == (0, True)
    code, _, err = billing.command("events_batches", "pause", pk)
    assert code == 1
    assert "it is cancelled" in err
    code, out, _ = billing.command("events_batches", "show", pk, format="json")
    assert json.loads(out)["batches"]["counts"]["pending"] == 3
    assert billing.command("events_batches", "show", "zz")[0] == 1
    assert billing.command("events_batches", "show")[0] == 2
    assert billing.command("events_batches", "run", "--until-done")[0] == 0
    assert billing.ready(QUEUE) == 0
