"""Batches on a real broker: killed runners, two runners, and browsers that meet at a barrier."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from django_amqp_events.archive import replay, states
from django_amqp_events.archive.batches import batch_states, preview
from django_amqp_events.models import ArchivedEvent, Replay, ReplayBatch
from tests.archive_rows import build
from tests.conftest import SERVERS, Database

from ..archiving import mirror_all, outcome, publish
from ..conftest import Service, wait_until
from ..processes import Processes, runners
from ..serving import Browser, more, serving
from ..wire import in_threads

QUEUE = "billing.send_invoice"
#: Said once SIGTERM no longer ends the process at once.
RUNNING = "running the batches"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def running(billing: Service, archive_database: Database, tmp_path: Path) -> Iterator[Processes]:
    with runners(billing.vhost.url, archive_database.json, tmp_path) as starter:
        yield starter


def fill(number: int) -> None:
    now = datetime.now(UTC)
    ArchivedEvent.objects.bulk_create(build(index, at=now) for index in range(number))


def begun(number: int, **more: Any) -> ReplayBatch:
    fill(number)
    batch = batch_states.freeze(states.rows(), by="ada")
    assert batch_states.start(batch.pk, by="ada", **{"reason": "fixed", "threshold": None, **more})
    return batch


def again(batch: ReplayBatch) -> ReplayBatch:
    return batch_states.rows().get(pk=batch.pk)


def lapse(batch: ReplayBatch) -> None:
    """Let the lease of a runner expire."""
    batch_states.rows().filter(pk=batch.pk).update(leased_until=states.clock())


def taken(service: Service) -> Counter[tuple[str, str]]:
    """Event and replay of each message that is in the handler's queue."""
    return Counter(
        (each.headers["event-id"], each.headers["event-replay-id"])
        for each in service.take_all(QUEUE)
    )


def enough(service: Service, number: int) -> bool:
    return service.ready(QUEUE) >= number


@pytest.mark.parametrize("where", ["before-publish", "before-noted"])
def test_a_runner_that_is_killed_is_followed_by_another(
    where: str, billing: Service, running: Processes
) -> None:
    """Killed in its third chunk of 200; claimed events keep their replay ids."""
    batch = begun(1000)
    assert running.start(COMMAND_DIES=f"{where}@3").wait() == -9
    counts = batch_states.count(batch.pk)
    assert counts["published"] == 400
    assert counts["queued"] == 200
    assert counts["waiting"] == 400
    before = dict(
        batch_states.events(batch.pk)
        .filter(replay__isnull=False)
        .values_list("event_id", "replay_id")
    )
    follower = running.start()
    # No runner takes it over while the dead one may be alive.
    wait_until(lambda: RUNNING in follower.said, "the follower runs")
    assert again(batch).state == "running"
    lapse(batch)
    wait_until(
        lambda: batch_states.count(batch.pk)["published"] == 800, "the rest is published", 60
    )
    assert batch_states.count(batch.pk)["queued"] == 200
    # As the mirror does, when the claims are old.
    assert replay.resume(lease=0) == 200
    messages = taken(billing)
    doubled = {"before-publish": 0, "before-noted": 200}[where]
    assert len(messages) == 1000, "one replay of each event"
    assert len({event for event, _ in messages}) == 1000
    assert Counter(messages.values()) == Counter(
        {1: 1000 - doubled, **({2: doubled} if doubled else {})}
    )
    assert Replay.objects.count() == 1000
    after = dict(batch_states.events(batch.pk).values_list("event_id", "replay_id"))
    assert before.items() <= after.items()
    # All of them report, and the batch ends.
    rows = {row.pk: row for row in states.rows()}
    publish(billing, *(outcome(rows[pk], str(each)) for pk, each in after.items()))
    mirror_all(billing)
    wait_until(lambda: again(batch).state == "done", "the batch is done")
    assert again(batch).succeeded == 1000
    assert follower.stop() == 0


def test_a_runner_that_is_killed_anywhere_doubles_nothing(
    billing: Service, running: Processes
) -> None:
    batch = begun(2000)
    for at in (300, 900, 1500):
        victim = running.start()
        wait_until(partial(enough, billing, at), f"{at} are published", 60)
        victim.kill()
        lapse(batch)
    last = running.start()
    wait_until(lambda: not batch_states.count(batch.pk)["waiting"], "nothing waits", 60)
    # Before the dead ones' claims are resumed: it may be publishing its last chunk.
    wait_until(lambda: RUNNING in last.said, "the last one runs")
    assert last.stop() == 0
    replay.resume(lease=0)
    messages = taken(billing)
    assert len({event for event, _ in messages}) == len(messages) == 2000
    assert sum(messages.values()) <= 2000 + 3 * 200


@pytest.mark.parametrize("archive_database", [*SERVERS], indirect=True)
def test_a_database_that_fails_over(
    billing: Service, running: Processes, archive_database: Database
) -> None:
    batch = begun(2000)
    process = running.start()
    wait_until(partial(enough, billing, 300), "some are published", 60)
    archive_database.close()
    assert archive_database.server is not None
    with archive_database.server.read_only(archive_database.settings["NAME"]):
        words = "running batches is paused: the database is read-only"
        wait_until(lambda: words in process.said, "it is paused", 60)
    wait_until(lambda: not batch_states.count(batch.pk)["waiting"], "nothing waits", 60)
    wait_until(lambda: "running batches has resumed" in process.said, "it has resumed", 60)
    assert process.stop() == 0
    replay.resume(lease=0)
    messages = taken(billing)
    assert len({event for event, _ in messages}) == len(messages) == 2000, "one replay of each"
    # Published again under the same replay ids, as their confirm could not be recorded.
    assert sum(messages.values()) <= 2000 + 200


def test_two_runners_share_and_double_nothing(billing: Service, running: Processes) -> None:
    first = begun(600)
    second = batch_states.freeze(states.rows(), by="bob")
    batch_states.start(second.pk, by="bob", reason="me too", threshold=None)
    processes = [running.start() for _ in range(2)]
    wait_until(
        lambda: not any(batch_states.count(each.pk)["waiting"] for each in (first, second)),
        "nothing waits",
        60,
    )
    wait_until(lambda: all(RUNNING in each.said for each in processes), "both run")
    assert [each.stop() for each in processes] == [0, 0]
    messages = taken(billing)
    assert len(messages) == sum(messages.values()) == 600
    counts = [batch_states.count(each.pk) for each in (first, second)]
    assert sum(each["published"] for each in counts) == 600
    assert sum(each["skipped"] for each in counts) == 600


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


def test_the_dry_run_sees_the_queues(billing: Service, archive_database: Database) -> None:
    fill(3)
    billing.publish("", QUEUE)
    billing.consume(QUEUE, prefetch=1)
    wait_until(lambda: billing.ready(QUEUE) == 0, "it is delivered")
    billing.publish("", QUEUE)
    plan = preview.preview_batch(batch_states.freeze(states.rows(), by="ada"))
    (where,) = plan["handlers"]
    assert (where["queue"], where["events"], where["ready"], where["consumers"]) == (QUEUE, 3, 1, 1)
    assert plan["broker"] == ""


def test_the_commands(billing: Service, archive_database: Database) -> None:
    fill(3)
    code, _, err = billing.command("events_replay", "--all", "--background")
    assert code == 2
    assert "--comment" in err
    for wrong in (["--force"], ["--dry-run"], ["--wait", "5"], ["--pause-at", "101"]):
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
    assert batch.criteria is not None
    assert batch.criteria["handlers"] == ["send_invoice"]
    short = str(batch.pk)[:8]
    assert "running: 3 events (3 pending)" in billing.command("events_batches", "list")[1]
    for act, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        code, out, _ = billing.command("events_batches", act, short)
        assert (code, state in out) == (0, True)
    code, _, err = billing.command("events_batches", "pause", short)
    assert code == 1
    assert "it is cancelled" in err
    code, out, _ = billing.command("events_batches", "show", short, format="json")
    assert json.loads(out)["batches"]["counts"]["waiting"] == 3
    assert billing.command("events_batches", "show", "zz")[0] == 1
    assert billing.command("events_batches", "show")[0] == 1
    assert billing.command("events_batches", "run", "--until-done")[0] == 0
    assert billing.ready(QUEUE) == 0


# -- over HTTP ------------------------------------------------------------------------------

ARCHIVE = "/admin/django_amqp_events/archivedevent/"
BATCHES = "/admin/django_amqp_events/replaybatch/"


@pytest.mark.parametrize("empty_database", ["postgresql"], indirect=True)
def test_browsers_that_meet_replay_each_event_once(
    billing: Service, empty_database: dict[str, Any], tmp_path: Path
) -> None:
    """Two users start the same filter twice each while a third replays single events."""
    url = billing.vhost.url
    with (
        serving(empty_database, url, tmp_path) as (address, pk),
        runners(url, json.dumps(empty_database), tmp_path) as starter,
    ):
        more(empty_database, url, 40)
        clients = [Browser(address).login(name) for name in ("ada", "bob", "ada")]
        sessions = {each.value for one in clients for each in one.cookies if "session" in each.name}
        assert len(sessions) == 3
        asked, paths = [], []
        for browser in clients[:2]:
            listed = browser.open(ARCHIVE)
            form = {
                "csrfmiddlewaretoken": listed.fields["csrfmiddlewaretoken"],
                "action": "background_selected",
                "_selected_action": str(pk),
                "select_across": "1",
                "index": "0",
            }
            page = browser.open(ARCHIVE, form)
            assert "40 of 40 events can be replayed" in page.words
            asked.append(page.fields)
            paths.append(browser.last.removesuffix("change/") + "start/")
        single = clients[2].open(f"{ARCHIVE}decide/replay/?seen={pk.hex}:0")
        for _ in range(2):
            starter.start()
        barrier, told = threading.Barrier(6), []

        def act(number: int) -> None:
            who = number % 3
            browser = clients[who].again()
            barrier.wait(30)
            if who == 2:
                form = {**single.fields, "reason": "fixed", "back": "list"}
                words = browser.open(f"{ARCHIVE}decide/replay/", form).words
                told.append("single" if "1 event published" in words else "single late")
            else:
                token = asked[who]["csrfmiddlewaretoken"]
                form = {"csrfmiddlewaretoken": token, "reason": "fixed", "threshold": ""}
                words = browser.open(paths[who], form).words
                told.append("late" if "Nothing was done" in words else "started")

        raised = in_threads(6, act)
        assert not raised, (raised, (tmp_path / "log").read_text()[-3000:])
        found = Counter(told)
        assert (found["started"], found["late"]) == (2, 2)
        assert found["single"] <= 1
        billing.wait_for_ready(QUEUE, 40)
        wait_until(
            lambda: all(
                "pending" not in clients[0].open(f"{path.removesuffix('start/')}events/").words
                for path in paths
            ),
            "both are through",
        )
    messages = taken(billing)
    assert len(messages) == sum(messages.values()) == 40
    assert len({event for event, _ in messages}) == 40
