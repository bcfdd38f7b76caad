"""Batches on a real broker: killed runners, two runners, and browsers that meet at a barrier."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from django_amqp_events.archive import replay, tables
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.models import ArchivedEvent, Replay, ReplayBatch
from tests.archive_rows import build
from tests.conftest import EACH, ONE, Database

from ..archiving import mirror_all, outcome, publish
from ..conftest import Service, wait_until
from ..processes import Processes, runners

QUEUE = "billing.send_invoice"
#: Said once SIGTERM no longer ends the process at once.
RUNNING = "running the batches"

pytestmark = pytest.mark.timeout(240)
#: On each kind of database, with time zones; and of what no database has a part in.


@pytest.fixture
def running(billing: Service, archive_database: Database, tmp_path: Path) -> Iterator[Processes]:
    with runners(billing.vhost.url, archive_database.json, tmp_path) as starter:
        yield starter


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


def lapse(batch: ReplayBatch) -> None:
    """Let the lease of a runner expire."""
    batch_states.rows().filter(pk=batch.pk).update(leased_until=tables.clock())


def taken(service: Service) -> Counter[tuple[str, str]]:
    """Event and replay of each message that is in the handler's queue."""
    return Counter(
        (each.headers["event-id"], each.headers["event-replay-id"])
        for each in service.take_all(QUEUE)
    )


def enough(service: Service, number: int) -> bool:
    return service.ready(QUEUE) >= number


@EACH
@pytest.mark.parametrize("where", ["before-publish", "before-noted"])
def test_a_runner_that_is_killed_is_followed_by_another(
    where: str, billing: Service, running: Processes
) -> None:
    """Killed in its third chunk of 200; claimed events keep their replay ids."""
    batch = begun(700)
    assert running.start(COMMAND_DIES=f"{where}@3").wait() == -9
    counts = batch_states.count(batch.pk)
    assert counts["published"] == 400
    assert counts["queued"] == 200
    assert counts["pending"] == 100
    before = dict(batch_states.events(batch.pk).exclude(number=None).values_list("event_id", "pk"))
    follower = running.start()
    # No runner takes it over while the dead one may be alive.
    wait_until(lambda: RUNNING in follower.said, "the follower runs")
    assert again(batch).state == "running"
    lapse(batch)
    wait_until(
        lambda: batch_states.count(batch.pk)["published"] == 500, "the rest is published", 60
    )
    assert batch_states.count(batch.pk)["queued"] == 200
    # As the mirror does, when the claims are old.
    assert replay.resume(lease=0) == 200
    messages = taken(billing)
    doubled = {"before-publish": 0, "before-noted": 200}[where]
    assert len(messages) == 700, "one replay of each event"
    assert len({event for event, _ in messages}) == 700
    assert Counter(messages.values()) == Counter(
        {1: 700 - doubled, **({2: doubled} if doubled else {})}
    )
    assert Replay.objects.count() == 700
    after = dict(batch_states.events(batch.pk).values_list("event_id", "pk"))
    assert before.items() <= after.items()
    # All of them report, and the batch ends.
    rows = {row.pk: row for row in tables.rows()}
    publish(billing, *(outcome(rows[pk], str(each)) for pk, each in after.items()))
    mirror_all(billing)
    wait_until(lambda: again(batch).state == "done", "the batch is done")
    assert again(batch).succeeded == 700
    assert follower.stop() == 0


@ONE
def test_sigterm_gives_back_and_pause_holds(billing: Service, running: Processes) -> None:
    batch = begun(500, rate=20)
    one = running.start()
    wait_until(lambda: billing.ready(QUEUE) >= 20, "it has begun")
    assert one.stop() == 0
    found = again(batch)
    assert (found.state, found.runner, found.leased_until) == ("running", None, None)
    so_far = billing.ready(QUEUE)
    assert so_far % 20 == 0
    two = running.start()
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
