"""Past events for a handler that is new or was wrong: each once, although runners are killed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from django_amqp_events.archive import replay, states, tables
from django_amqp_events.archive.batches import backfill, batch_states, preview
from django_amqp_events.archive.batches.runner import Runner
from django_amqp_events.archive.history import PastSelection
from django_amqp_events.context import ReceivedEvent
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.message import encoding
from django_amqp_events.message.types import Message
from django_amqp_events.models import InboxEntry, ReplayBatch
from django_amqp_events.monitor import statistics
from django_amqp_events.worker.inbox import inbox_key
from tests.acceptance import harness
from tests.conftest import EACH, ONE, Database, Vhost
from tests.services import handling

from ..archiving import archived, mirror_all, outcome, publish, publish_past, received
from ..conftest import Service

HISTORY = {"MAX_AGE": "14d"}
KEY = "shop.order.created"
QUEUE = "billing.send_invoice"
DAY = timedelta(days=1)

pytestmark = pytest.mark.timeout(240)

Made = Callable[..., Service]


@pytest.fixture
def late(service: Made, fresh_vhost: Vhost, archive_database: Database) -> Service:
    """A service whose handler was added after 450 events; its queue has another 50."""
    before = service(fresh_vhost, HISTORY=HISTORY)
    before.declare()
    publish_past(before, 0, 450)
    made = service(fresh_vhost, HISTORY=HISTORY, HANDLERS={"send_invoice": [KEY]})
    made.declare()
    publish_past(made, 450, 500)
    return made


@pytest.fixture
def billing(late: Service) -> Service:
    """The service of ``processes``."""
    return late


def begun(
    *, again: bool = False, selection: PastSelection | None = None, **options: Any
) -> ReplayBatch:
    batch = backfill.freeze("send_invoice", selection or PastSelection(), by="ada", again=again)
    assert batch_states.start(batch.pk, by="ada", reason="new", **{"threshold": None, **options})
    return batch


def run(made: Service, batch: ReplayBatch, seconds: float = 60) -> ReplayBatch:
    """Run a batch until it only waits for outcomes."""
    runner = Runner(settings=made.settings, stop=lambda: waits_for_outcomes(batch), tell=print)
    runner.run(until_done=True)
    return now(batch)


def now(batch: ReplayBatch) -> ReplayBatch:
    return batch_states.rows().get(pk=batch.pk)


def waits_for_outcomes(batch: ReplayBatch) -> bool:
    row = now(batch)
    assert not row.deleted  # no event that is given counts as gone
    return row.state != "running" or (not backfill.unread(row) and not row.pending)


def taken(made: Service) -> Counter[str]:
    return Counter(message.headers["event-id"] for message in made.take_all(QUEUE))


def succeed(made: Service) -> None:
    """Report that every replay has succeeded."""
    rows = {row.event_id: row for row in tables.rows()}
    messages = made.take_all(QUEUE)
    replays = [m for m in messages if "event-replay-id" in m.headers]
    publish(
        made,
        *(outcome(rows[m.headers["event-id"]], m.headers["event-replay-id"]) for m in replays),
    )
    mirror_all(made)


@ONE
def test_a_new_handler_gets_each_event_once(late: Service) -> None:
    batch = run(late, begun())
    assert taken(late) == Counter(f"e{number}" for number in range(500))
    assert (batch.total, batch.backfill_left) == (450, {"received": 50})
    counts = batch_states.count(batch.pk)
    assert counts["published"] == 450


@ONE
def test_rows_that_have_not_failed_are_no_failures(late: Service) -> None:
    batch = run(late, begun())
    since = tables.clock() - statistics.HOUR
    assert statistics.open_events().open == 0
    assert statistics.new_since(since, 9, service="billing") == 0
    assert statistics.newest_failure(datetime.now(UTC), service="billing") is None
    row = tables.rows().get(event_id="e7")
    assert (row.reason, row.state, row.attempts, row.group_id) == ("backfill", "replaying", 0, None)
    succeed(late)
    assert batch_states.count(batch.pk)["succeeded"] == 450
    assert set(tables.rows().values_list("state", flat=True)) == {"succeeded"}


@ONE
def test_one_that_fails_is_a_failure_like_others(late: Service) -> None:
    run(late, begun(selection=PastSelection(search=("order_id=7",))))
    (message,) = [m for m in late.take_all(QUEUE) if "event-replay-id" in m.headers]
    # Its retries took hours.
    given = tables.clock() - timedelta(hours=5)
    tables.rows().update(mirrored_at=given, state_since=given)
    delivery = received("e7", payload={"order_id": 7})
    publish(late, archived(delivery, replay_id=message.headers["event-replay-id"]))
    mirror_all(late)
    row = tables.rows().get()
    assert (row.event_id, row.state, row.reason, row.attempts) == ("e7", "archived", "exhausted", 3)
    assert row.group_id is not None
    assert row.mirrored_at > given, "it counts from its failure"
    since = tables.clock() - statistics.HOUR
    assert statistics.new_since(since, 9, service="billing") == 1


@pytest.mark.parametrize("when", ["before", "after"])
@EACH
def test_a_runner_that_is_killed_is_followed_by_another(
    when: str, late: Service, processes: harness.Service, tmp_path: Path
) -> None:
    batch = begun()
    processes.events = {**processes.events, "HISTORY": HISTORY}
    for number in range(2):
        # "after" is after a whole chunk, which is not noted yet.
        crash = {
            "log": str(tmp_path / f"effects-{number}"), "at": 1, "when": when,
            "kinds": ["publish"], "child": False,
        }  # fmt: skip
        runner = processes.start("events_batches", TESTPROJECT_CRASH=json.dumps(crash))
        assert runner.wait() == -9, runner.log
        batch_states.rows().filter(pk=batch.pk).update(leased_until=tables.clock())
    run(late, batch)
    replay.resume(lease=0)
    times = taken(late)
    # What was published and not noted is published again, under the same replay ids.
    assert set(times) == {f"e{number}" for number in range(500)}
    if when == "before":
        assert set(times.values()) == {1}
    assert now(batch).total == 450


@ONE
def test_what_the_inbox_and_the_archive_know_is_left_out(
    late: Service, service: Made, fresh_vhost: Vhost, archive_database: Database
) -> None:
    late.raw["HANDLERS"]["send_invoice"]["ONCE"] = True
    made = service(fresh_vhost, **late.raw, DATABASE=archive_database.alias)
    rows = [
        InboxEntry(
            id=inbox_key("billing", "send_invoice", event_of(number)),
            service="billing", handler="send_invoice", source="shop", event_id=f"e{number}",
            name=KEY, handled_at=datetime.now(UTC),
        )
        for number in range(10)
    ]  # fmt: skip
    InboxEntry.objects.bulk_create(rows)
    delivery = received("e20", payload={"order_id": 20})
    publish(made, archived(delivery))
    mirror_all(made)
    batch = run(made, begun())
    assert batch.backfill_left == {"received": 50, "handled": 10, "archived": 1}
    assert batch.total == 439


def event_of(number: int) -> Any:
    return ReceivedEvent(id=f"e{number}", name=KEY, service="shop")


@ONE
def test_again_runs_everything_of_the_range_and_twice(late: Service) -> None:
    taken(late)
    since = datetime.now(UTC) - timedelta(minutes=30, seconds=30)
    for _ in range(2):
        batch = run(late, begun(again=True, selection=PastSelection(since=since)))
        assert batch.total == 31 + 31
        (forced,) = batch_states.events(batch.pk).values_list("forced", flat=True).distinct()
        assert forced
        succeed(late)
        assert batch_states.count(batch.pk)["succeeded"] == batch.total


@ONE
def test_what_the_history_has_twice_is_given_once(late: Service) -> None:
    """Also if the copies are in different chunks, and the first one has succeeded meanwhile."""
    publish_past(late, 0, 5)
    publish_past(late, 0, 1)
    taken(late)
    batch = begun(again=True, selection=PastSelection(ids=("e0", "e1", "e2", "e3", "e4")), rate=5)
    runner = Runner(settings=late.settings, stop=lambda: now(batch).next_offset > 0)
    runner.run()
    succeed(late)
    assert run(late, batch).backfill_left == {"twice": 6}
    assert now(batch).total == 5
    assert not taken(late)


@ONE
def test_what_succeeded_stays_so_until_it_is_published_again(late: Service) -> None:
    selection = PastSelection(ids=tuple(f"e{number}" for number in range(20)))
    run(late, begun(again=True, selection=selection))
    succeed(late)
    before = list(tables.rows().order_by("pk").values_list("state", "error"))
    late.channel().exchange_delete(late.names.replay)
    batch = begun(again=True, selection=selection)
    Runner(settings=late.settings, stop=lambda: bool(now(batch).note)).run()
    assert batch_states.count(batch.pk)["pending"] == 20
    after = list(tables.rows().order_by("pk").values_list("state", "error"))
    assert after == before
    late.declare()
    run(late, batch)
    assert batch_states.count(batch.pk)["published"] == 20
    assert set(tables.rows().values_list("state", "replays")) == {("replaying", 2)}


@ONE
def test_what_a_person_has_discarded_does_not_run_again(late: Service) -> None:
    publish(late, archived(received("e1", payload={"order_id": 1})))
    mirror_all(late)
    discarded = tables.rows().get(event_id="e1")
    states.discard({discarded.pk: 0}, by="ada", reason="a test", now=tables.clock())
    batch = run(late, begun(again=True, selection=PastSelection(ids=("e1", "e2", "e3"))))
    assert batch.backfill_left == {"archived": 1}
    assert batch.total == 2
    assert tables.rows().get(event_id="e1").state == "discarded"


@ONE
def test_a_canary_goes_first(late: Service) -> None:
    batch = begun(canary=3)
    Runner(settings=late.settings, stop=lambda: now(batch).published == 3).run()
    assert len(late.take_all(QUEUE)) == 53
    assert now(batch).total == 3


@ONE
def test_a_batch_whose_handler_is_gone_waits(
    late: Service, service: Made, fresh_vhost: Vhost
) -> None:
    batch = begun()
    made = service(fresh_vhost, HISTORY=HISTORY)
    Runner(settings=made.settings, stop=lambda: bool(now(batch).note)).run()
    assert "send_invoice" in str(now(batch).note)
    assert now(batch).next_offset == 0


@ONE
def test_a_batch_without_a_history_waits_and_no_other(
    late: Service, service: Made, fresh_vhost: Vhost
) -> None:
    batch = begun()
    publish(late, archived(received("e1", payload={"order_id": 1})))
    mirror_all(late)
    other = batch_states.freeze(tables.rows(), by="ada")
    batch_states.start(other.pk, by="ada", reason="fixed", threshold=None)
    made = service(fresh_vhost, HANDLERS={"send_invoice": [KEY]})

    def stop() -> bool:
        return bool(now(batch).note) and batch_states.count(other.pk)["published"] == 1

    Runner(settings=made.settings, stop=stop).run()
    assert "set AMQP_EVENTS['HISTORY']" in str(now(batch).note)
    assert now(batch).state == "running"


@ONE
@pytest.mark.parametrize("patched", [(backfill, "READ_SECONDS", -1.0), (replay, "CHUNK_BYTES", 1)])
def test_a_step_ends_in_the_time_of_its_lease(
    late: Service, monkeypatch: pytest.MonkeyPatch, patched: Any
) -> None:
    """Also if it gives nothing."""
    batch = begun(selection=PastSelection(ids=("none",)))
    monkeypatch.setattr(*patched)
    assert backfill.read_chunk(batch, 100).next == batch.next_offset + 1


@ONE
def test_later_events_are_not_in_the_range(late: Service) -> None:
    batch = begun(again=True)
    publish_past(late, 500, 520)
    assert run(late, batch).total == 500


@ONE
def test_a_preview_counts_and_changes_nothing(late: Service) -> None:
    batch = backfill.freeze("send_invoice", PastSelection(), by="ada")
    plan = preview.preview_batch(batch)
    assert (plan["eligible"], plan["undecided"]) == (450, 0)
    assert [(each["count"], each["why"]["code"]) for each in plan["skipped"]] == [
        (50, "left-received")
    ]
    object.__setattr__(get_registry().handlers["send_invoice"], "newest", ("order_id", "version"))
    for again, superseded in ((False, None), (True, 0)):
        batch = backfill.freeze("send_invoice", PastSelection(), by="ada", again=again)
        assert preview.preview_batch(batch)["superseded"] == superseded
    assert not tables.rows().exists()


@ONE
def test_a_queue_without_a_record_is_declared_first(
    service: Made, fresh_vhost: Vhost, archive_database: Database
) -> None:
    service(fresh_vhost, HISTORY=HISTORY).declare()
    made = service(fresh_vhost, HISTORY=HISTORY, HANDLERS={"send_invoice": [KEY]})
    publish_past(made, 0, 3)
    for name, text in (
        ("send_invoice", "run `manage.py events_declare`: it binds the queue billing.send_invoice"),
        ("send_invoices", "no handler 'send_invoices'; did you mean 'send_invoice'?"),
    ):
        code, _out, err = made.command("events_backfill", name, "--comment", "new")
        assert (code, text in err) == (2, True), err


@ONE
def test_what_has_a_row_is_not_given_twice(late: Service) -> None:
    run(late, begun())
    code, out, _err = late.command("events_backfill", "send_invoice", "--comment", "twice")
    assert code == 1
    assert "0 events to give" in out
    assert "450 left out" in out


@ONE
def test_again_gives_what_was_edited(late: Service) -> None:
    publish(late, archived(received("e1", payload={"order_id": 1})))
    mirror_all(late)
    row = tables.rows().get(event_id="e1")
    late.raw["EDITING"] = True
    with late.active():
        replay.edit(row.pk, row.version, {"order_id": 4711}, by="ada", reason="a typo")
        succeed(late)
        run(late, begun(again=True, selection=PastSelection(ids=("e1",))))
    (message,) = [m for m in late.take_all(QUEUE) if "event-replay-forced" in m.headers]
    assert json.loads(message.body)[1] == {"order_id": 4711}


@ONE
def test_an_event_without_a_time_is_where_rabbitmq_stored_it(
    service: Made, fresh_vhost: Vhost, archive_database: Database
) -> None:
    made = service(fresh_vhost, HISTORY=HISTORY, HANDLERS={"send_invoice": [KEY]})
    made.declare()
    for number in range(20):
        made.publish("events", KEY, b'{"order_id": 7}', {}, message_id=f"x{number}")
    hour = datetime.now(UTC) - timedelta(hours=1)
    for given, since, until in ((0, hour - DAY, hour), (20, hour, None), (0, None, hour)):
        selection = PastSelection(since=since, until=until)
        batch = backfill.freeze("send_invoice", selection, by="ada", again=True)
        assert preview.preview_batch(batch)["eligible"] == given


@ONE
def test_the_command_begins_a_batch(late: Service) -> None:
    code, out, _err = late.command("events_backfill", "send_invoice", "--dry-run")
    assert code == 0
    assert "450 events to give to send_invoice" in out
    assert not batch_states.rows().exists()
    code, out, _err = late.command(
        "events_backfill", "send_invoice", "--comment", "new", "--since", "6h", "--format", "json"
    )
    document = json.loads(out)
    assert (code, document["result"], document["eligible"]) == (0, "begun", 360)
    assert run(late, batch_states.rows().get()).total == 360


@ONE
def test_the_history_is_printed_and_searched(late: Service) -> None:
    code, out, err = late.command("events_history", "--match", "order_id=7", "--format", "json")
    (line,) = out.splitlines()
    assert code == 0
    assert json.loads(line)["payload"] == {"order_id": 7}
    assert err == "500 events read, 1 found\n"
    code, out, err = late.command("events_history", "--scan", "100", "--id", "e7", "--id", "e400")
    assert (code, len(out.splitlines())) == (1, 1)
    assert err == "100 events read, 1 found; the rest was not read\n"
    assert late.command("events_history", "--since", "1h", "--until", "2h")[0] == 2


@ONE
def test_a_history_that_was_declared_again_has_nothing_that_the_queue_missed(
    late: Service,
) -> None:
    """Its offsets begin at 0, like those that the record has."""
    late.channel().queue_delete(late.names.history)
    late.declare()
    for text in ("the history is empty", "has received all events of the history"):
        code, _out, err = late.command("events_backfill", "send_invoice", "--comment", "new")
        assert (code, text in err) == (1, True), err
        publish_past(late, 0, 5)


@ONE
def test_what_expires_before_it_is_read_is_counted(
    service: Made, fresh_vhost: Vhost, archive_database: Database
) -> None:
    history = {"MAX_BYTES": 1_000_000}
    before = service(fresh_vhost, HISTORY=history)
    before.declare()
    publish_past(before, 0, 450)
    made = service(fresh_vhost, HISTORY=history, HANDLERS={"send_invoice": [KEY]})
    made.declare()
    batch = begun()
    # Old segments are deleted when a new one begins.
    for number in range(80):
        publish(made, padding(number))
    row = run(made, batch)
    # RabbitMQ's own entries have offsets too.
    assert row.backfill_left is not None
    assert row.backfill_left.keys() == {"expired"}
    assert 450 <= row.backfill_left["expired"] < 460
    assert row.total == 0
    Runner(settings=made.settings).run(until_done=True)
    assert now(batch).state == "done"


def padding(number: int) -> Any:
    return encoding.event_message(
        exchange="events",
        name="shop.padding",
        body=encoding.encode_payload("shop.padding", {"text": "x" * 100_000}),
        event_id=f"p{number}",
        service="shop",
        published_at=datetime.now(UTC),
    )


@ONE
def test_an_added_pattern_has_its_past_once(
    service: Made, fresh_vhost: Vhost, archive_database: Database
) -> None:
    """Also of messages without an id, which have one row for each place in the history."""
    before = service(fresh_vhost, HISTORY=HISTORY, HANDLERS={"send_invoice": ["other.event"]})
    before.declare()
    publish_past(before, 0, 5)
    nameless = Message(
        exchange="events", routing_key=KEY, body=b'{"order_id": 1}', headers={},
        properties={"content_type": "application/json"},
    )  # fmt: skip
    publish(before, nameless, nameless)
    made = service(fresh_vhost, HISTORY=HISTORY, HANDLERS={"send_invoice": ["other.event", KEY]})
    made.declare()
    assert [run(made, begun()).total for _ in range(2)] == [7, 0]
    # With `once`, the second one would be taken for the first, which has the same content.
    once = handling(KEY, "other.event", ONCE=True)
    made = service(fresh_vhost, HISTORY=HISTORY, HANDLERS={"send_invoice": once})
    publish(made, replace(nameless, routing_key="other.event"))
    batch = run(made, begun(again=True, selection=PastSelection(events=(KEY,))))
    assert (batch.total, batch.backfill_left) == (0, {"archived": 5, "unreadable": 2})


@ONE
def test_the_streams_are_no_backlog(late: Service) -> None:
    late.take_all(QUEUE)
    _code, out, _err = late.command("events_status")
    assert "messages are kept" in out
    code, out, _err = late.command("events_find", "e7")
    assert code == 1
    assert "events:history" not in out


@ONE
def test_a_range_may_begin_before_the_history(late: Service) -> None:
    """One publisher may be ahead, so the time of the first event is not when the history begins."""
    since = datetime.now(UTC) - 30 * DAY
    batch = backfill.freeze("send_invoice", PastSelection(since=since), by="ada")
    assert preview.preview_batch(batch)["eligible"] == 450


@ONE
def test_the_clock_of_one_publisher_ends_no_range(late: Service) -> None:
    """RabbitMQ's order bounds what is read, and a range in which nothing was stored is empty."""
    until = datetime.now(UTC) + timedelta(minutes=5)
    ahead = encoding.event_message(
        exchange="events",
        name=KEY,
        body=encoding.encode_payload(KEY, {"order_id": 7}),
        event_id="ahead",
        service="shop",
        published_at=until + 3 * DAY,
    )
    publish(late, ahead)
    publish_past(late, 600, 620)
    assert run(late, begun(again=True, selection=PastSelection(until=until))).total == 520
    assert late.command("events_history", "--until", "0s")[2].startswith("521 events read")
    # The events were stored a moment ago, whatever times they have.
    past = ("--since", "20d", "--until", "10d")
    assert late.command("events_history", *past) == (0, "", "0 events read, 0 found\n")
    batch = backfill.freeze("send_invoice", PastSelection(until=until - 10 * DAY), by="ada")
    plan = preview.preview_batch(batch)
    assert (plan["eligible"], plan["undecided"], backfill.unread(batch)) == (0, 0, False)
