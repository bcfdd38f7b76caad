"""``events_replay`` on a real broker: what goes where, what does not, how it exits."""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime, timedelta

import pytest
from django.db import ProgrammingError

from django_amqp_events.archive import replay
from django_amqp_events.archive import states as archive_states
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    Replay,
    State,
)
from tests.archive_rows import make_group

from ..archiving import (
    archived,
    mirror_all,
    publish,
    received,
)
from ..conftest import Service
from ..wire import close_pools

pytestmark = pytest.mark.django_db(transaction=True)

HANDLERS = {"send_invoice": ["shop.order.created"], "book": ["shop.#"]}


def declared(service, vhost, **keys) -> Service:
    """A service on a vhost that other tests have used; its queues are empty."""
    made: Service = service(vhost, HANDLERS=HANDLERS, **keys)
    made.import_topology()
    for queue in ("billing.send_invoice", "billing.book", "billing:archive"):
        made.channel().queue_purge(queue)
    close_pools()
    return made


@pytest.fixture
def billing(service, vhost):
    return declared(service, vhost)


def fill(billing, *numbers: int, handler: str = "send_invoice", **options) -> None:
    """Archive events 1, 2, … for a handler."""
    publish(
        billing,
        *(
            archived(
                received(f"order-{n}", payload={"order_id": n}, queue=f"billing.{handler}"),
                handler=handler,
                **options,
            )
            for n in numbers
        ),
    )
    mirror_all(billing)


def states(**filters) -> list[str]:
    rows = ArchivedEvent.objects.filter(**filters).order_by("event_id")
    return list(rows.values_list("state", flat=True))


# -- what ---------------------------------------------------------------------------------


def test_event_id_replays_to_its_handler_only(billing):
    fill(billing, 1, 2)
    fill(billing, 1, handler="book")
    ArchivedEvent.objects.filter(handler="book").update(state=State.SUCCEEDED)
    code, out, err = billing.command("events_replay", "order-1", "--comment", "tax rates are in")
    assert (code, err) == (0, "")
    assert "1 of 1 event published" in out
    assert states(handler="send_invoice") == [State.REPLAYING, State.ARCHIVED]
    assert states(handler="book") == [State.SUCCEEDED], "not those that were handled"
    assert billing.take("billing.send_invoice").headers["event-id"] == "order-1"
    assert billing.ready("billing.book") == 0
    made = Replay.objects.get()
    assert made.requested_by.startswith("events_replay (")
    assert made.reason == "tax rates are in"
    assert ArchiveAction.objects.get().reason == "tax rates are in"


def test_ids_however_they_are_written(billing):
    event_id = "7A3C5D1E-0000-4000-8000-000000000001"
    fill(billing, 1, 2)
    publish(billing, archived(received(event_id)))
    mirror_all(billing)
    row = ArchivedEvent.objects.get(event_id="order-2")
    assert billing.command("events_replay", row.pk.hex.upper(), event_id)[0] == 0
    assert states() == [State.REPLAYING, State.ARCHIVED, State.REPLAYING]


def test_filters(billing):
    now = datetime.now(UTC)
    fill(billing, 1)
    fill(billing, 2, at=now - timedelta(days=1))
    fill(billing, 3, handler="book", at=now - timedelta(days=9))
    fill(billing, 4, handler="book", reason="failed", failure=None, at=now - timedelta(minutes=5))
    for arguments, expected in (
        ("--handler send_invoice", {1, 2}),
        ("--handler book", {3, 4}),
        ("--handler book --handler send_invoice", {1, 2, 3, 4}),
        ("--event shop.order.created", {1, 2, 3, 4}),
        ("--exception TaxError", {1, 2, 3}),
        ("--exception billing.errors.TaxError --handler book", {3}),
        ("--reason failed", {4}),
        ("--reason failed --reason exhausted", {1, 2, 3, 4}),
        ("--since 2h", {1, 4}),
        ("--until 2h", {2, 3}),
        ("--since 3d --until 2h", {2}),
        ("--until 2020-01-01T00:00Z", set()),
        ("--all", {1, 2, 3, 4}),
        ("--all --limit 2", {3, 2}),  # oldest failure first
        ("order-1 order-3 --limit 1", {3}),
        ("order-1 order-3 --handler book", {3}),
    ):
        command = ("events_replay", *arguments.split())
        plan = json.loads(billing.command(*command, "--dry-run", "--format", "json")[1])
        assert sum(handler["events"] for handler in plan["handlers"]) == len(expected), arguments
        billing.command(*command)
        replaying = ArchivedEvent.objects.filter(state=State.REPLAYING)
        found = set(replaying.values_list("event_id", flat=True))
        assert found == {f"order-{n}" for n in expected}, arguments
        ArchivedEvent.objects.update(state=State.ARCHIVED)


def test_a_group(billing):
    """All open events of the group are replayed, and its history records that."""
    fill(billing, 1, 2)
    fill(billing, 3, handler="book")
    group = ArchivedEvent.objects.get(event_id="order-1").group
    assert group is not None
    code, out, _ = billing.command("events_replay", "--group", str(group.pk), "--comment", "fixed")
    assert (code, states()) == (0, [State.REPLAYING, State.REPLAYING, State.ARCHIVED])
    assert "2 of 2 events published" in out
    [step] = failure_groups.history(group, 10)
    assert (step.what, step.events, step.text) == ("replayed", 2, "fixed")
    assert step.by.startswith("events_replay (")
    other = make_group(service="shop")
    for wrong, text in (
        (str(other.pk), "there is no failure group"),
        ("tax", "invalid UUID value: 'tax'"),
    ):
        code, _, err = billing.command("events_replay", "--group", wrong)
        assert code == 2
        assert text in err


def test_rows_of_another_service_are_left_out(billing):
    """Even if theirs are the oldest, which would use up the limit."""
    fill(billing, 1, 2)
    fill(billing, 1, handler="book")
    of_shop = ArchivedEvent.objects.filter(handler="book")
    of_shop.update(service="shop", last_failed_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert billing.command("events_replay", "--all", "--limit", "1")[0] == 0
    assert billing.command("events_replay", "order-1", "order-2")[0] == 1
    assert states(service="billing") == [State.REPLAYING, State.REPLAYING]
    code, out, _ = billing.command("events_replay", str(of_shop.get().pk))
    assert code == 1
    assert "it belongs to the service 'shop'; replay it in a process of that service" in out
    assert states(service="shop") == [State.ARCHIVED]


def test_wrong_arguments_change_nothing(billing):
    fill(billing, 1)
    for arguments, text in (
        ([], "choose the events: ids, filters or --all"),
        (["--limit", "3"], "choose the events"),
        (["--all", "--event", "a.b"], "--all takes no ids and no filters"),
        (["--all", "order-1"], "--all takes no ids and no filters"),
        (["--force", "--all"], "--all: not allowed with argument --force"),
        (["--force", "order-1", "--handler", "book"], "--force takes ids"),
        (["--since", "yesterday"], "--since: 'yesterday' is neither a time such as 2026-11-20"),
        (["--since", "1h", "--until", "2h"], "--since is not before --until"),
        (["--handler", "send_invoce"], "no handler 'send_invoce' and no event of it; did you"),
        (["--handler", "caf\udce9"], "no handler 'caf\\\\udce9'"),  # Latin-1 on a command line
        (["--all", "--discard", "--comment", "x" * 1001], "--comment has more than 1000"),
        (["--event", "shop.*"], "'shop.*' is a pattern; give whole names"),
        (["--all", "--rate", "0"], "--rate: 0 is not a number above 0"),
        (["--all", "--discard"], "--discard needs a reason: --comment TEXT"),
        (["--discard", "--comment", "x"], "choose the events"),
        (["--all", "--discard", "--restore"], "not allowed with argument --discard"),
        (["--all", "--rate", "1", "--canary", "2"], "--rate, --canary: only with --background"),
        (["order-1", "--restore", "--force"], "--restore goes without --force"),
        (["--all", "--restore", "--background"], "--restore goes without --force"),
    ):
        code, _, err = billing.command("events_replay", *arguments)
        assert (code, text in err) == (2, True), err
    assert states() == [State.ARCHIVED]


def test_times_without_an_offset_are_the_projects(billing, settings):
    settings.TIME_ZONE = "Pacific/Auckland"
    fill(billing, 1, at=datetime(2026, 3, 1, 12, tzinfo=UTC))
    since = ["--since", "2026-03-02T00:59", "--until", "2026-03-02T01:01"]
    out = billing.command("events_replay", *since, "--dry-run")[1]
    assert "1 event would be replayed" in out


# -- the plan -----------------------------------------------------------------------------


def test_a_dry_run_names_handlers_and_places_and_changes_nothing(billing):
    fill(billing, 1, 2)
    fill(billing, 3, handler="book")
    fill(billing, 4, handler="gone")
    before = list(ArchivedEvent.objects.order_by("pk").values_list("version", "state"))
    code, out, _ = billing.command("events_replay", "--all", "--dry-run")
    assert code == 1
    *lines, why = out.splitlines()
    assert lines == [
        "3 events would be replayed",
        "  2 to send_invoice: billing:replay → billing.send_invoice",
        "  1 to book: billing:replay → billing.book",
        "1 would be skipped",
    ]
    assert why.startswith("  shop.order.created (order-4) for gone: there is no handler 'gone'")
    assert list(ArchivedEvent.objects.order_by("pk").values_list("version", "state")) == before
    assert not Replay.objects.exists()
    assert billing.ready("billing.send_invoice") == billing.ready("billing.book") == 0


# -- discard and restore ------------------------------------------------------------------


def test_discard_and_restore(billing, monkeypatch):
    """The admin's decision on the same events, with its record; nothing is published."""
    monkeypatch.setattr(archive_states, "BATCH", 1)
    fill(billing, 1, 2)
    fill(billing, 3, handler="book")
    fill(billing, 4, handler="gone")  # could not be replayed
    handlers = ["--handler", "send_invoice", "--handler", "gone"]

    def run(*arguments: str) -> tuple[int, str]:
        code, out, err = billing.command("events_replay", *arguments)
        assert not err
        return code, out

    def counts(*arguments: str) -> dict[str, object]:
        document = json.loads(billing.command("events_replay", *arguments, "--format", "json")[1])
        return {key: document[key] for key in ("result", "matched", "published", "decided")}

    assert run(*handlers, "--discard", "--dry-run") == (0, "3 events would be discarded\n")
    assert run("--all", "--restore") == (0, "nothing to restore: no discarded event matches\n")
    assert not ArchiveAction.objects.exists()
    comment = ["--comment", "a test"]
    assert run(*handlers, "--discard", *comment) == (0, "3 of 3 events discarded\n")
    assert states() == [State.DISCARDED, State.DISCARDED, State.ARCHIVED, State.DISCARDED]
    decided = ArchiveAction.objects.all()
    assert {(row.action, row.reason) for row in decided} == {("discard", "a test")}
    assert all(row.by.startswith("events_replay (") for row in decided)
    group = ArchivedEvent.objects.get(event_id="order-1").group
    assert group is not None
    assert [(step.what, step.events) for step in failure_groups.history(group, 10)] == [
        ("discarded", 2)
    ]
    code, out = run("order-1", "order-3", "--discard", *comment)
    assert code == 1
    assert "1 of 1 event discarded" in out
    assert "(order-1) for send_invoice: its state is discarded" in out
    assert counts("--all", "--restore", "--limit", "1") == {
        "result": "restored", "matched": 1, "published": 0, "decided": 1,
    }  # fmt: skip
    assert states().count(State.ARCHIVED) == 1
    assert run("--all", "--restore")[1] == "3 of 3 events restored\n"
    assert set(states()) == {State.ARCHIVED}
    assert not Replay.objects.exists()


# -- what does not go ---------------------------------------------------------------------


def test_settled_or_unknown_ids_are_reported(billing):
    fill(billing, 1, 2)
    ArchivedEvent.objects.filter(event_id="order-2").update(state=State.DISCARDED)
    code, out, _ = billing.command("events_replay", "order-1", "--handler", "book")
    assert code == 1
    assert "it does not match the filters" in out
    assert states() == [State.ARCHIVED, State.DISCARDED]
    code, out, err = billing.command("events_replay", "order-1", "order-2", "order-9")
    assert code == 1
    assert "1 of 1 event published" in out
    assert "shop.order.created (order-2) for send_invoice: its state is discarded" in out
    assert "no archived event has the id 'order-9'" in err
    assert states() == [State.REPLAYING, State.DISCARDED]


# -- long work ----------------------------------------------------------------------------


def test_ctrl_c_stops_between_chunks_and_reports(billing, monkeypatch):
    monkeypatch.setattr(replay, "CHUNK", 2)
    fill(billing, *range(1, 7))
    publish_chunk = replay.publish_claimed

    def interrupted(*args, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return publish_chunk(*args, **options)

    monkeypatch.setattr(replay, "publish_claimed", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = billing.command("events_replay", "--all")
    assert signal.getsignal(signal.SIGINT) is before
    assert code == 1
    assert "2 of 6 events published" in out
    assert "stopped: interrupted; 4 not replayed" in err
    assert sorted(states()) == [State.ARCHIVED] * 4 + [State.REPLAYING] * 2
    assert billing.ready("billing.send_invoice") == 2


def test_database_error_after_a_chunk_reports_what_was_published(billing, monkeypatch):
    monkeypatch.setattr(replay, "CHUNK", 1)
    fill(billing, 1, 2)
    publish_chunk = replay.publish_claimed

    def once(*args, **options):
        if ArchivedEvent.objects.filter(state=State.REPLAYING).exists():
            raise ProgrammingError("a column is missing")
        return publish_chunk(*args, **options)

    monkeypatch.setattr(replay, "publish_claimed", once)
    code, out, err = billing.command("events_replay", "--all")
    assert code == 1
    assert "1 of 2 events published" in out
    assert "stopped: ProgrammingError: a column is missing; 1 not replayed" in err


def test_json(billing):
    fill(billing, 1)
    fill(billing, 2, handler="gone")
    code, out, _ = billing.command("events_replay", "--all", "--dry-run", "--format", "json")
    answer = json.loads(out)
    assert code == 1
    [skipped] = answer.pop("skipped")
    assert skipped["title"] == "shop.order.created (order-2) for gone"
    assert answer == {
        "version": 1,
        "result": "counted",
        "exit_code": 1,
        "matched": 2,
        "published": 0,
        "decided": 0,
        "returned": [],
        "missing": [],
        "stopped": "",
        "handlers": [
            {
                "handler": "send_invoice",
                "exchange": "billing:replay",
                "queue": "billing.send_invoice",
                "routing_key": "billing.send_invoice",
                "events": 1,
            }
        ],
    }
    code, out, _ = billing.command("events_replay", "order-1", "order-7", "--format", "json")
    answer = json.loads(out)
    assert (code, answer["result"], answer["published"]) == (1, "published", 1)
    assert answer["missing"] == ["order-7"]
