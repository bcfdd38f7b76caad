"""The outbox's decisions against a real broker, on SQLite and PostgreSQL, and who is faster."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client, override_settings

from django_amqp_events import handler
from django_amqp_events.admin.action_pages import encode_selection
from django_amqp_events.admin.outbox_pages import version_of
from django_amqp_events.archive import inbox_retention, retention
from django_amqp_events.conf import get_settings
from django_amqp_events.databases import Now
from django_amqp_events.models import InboxEntry, OutboxEvent
from django_amqp_events.publish import outbox, outbox_rows
from django_amqp_events.publish.relay import RelayCounts
from django_amqp_events.testing import override_events
from tests.archive_rows import make_inbox, make_outbox
from tests.conftest import ONE, Database, Vhost, routed_by
from tests.unit.admin import admin_world as world

from ..relaying import ALIAS, NAME, leave, relay, table
from ..wire import Wire


@pytest.fixture
def wire(vhost: Vhost, archive_database: Database) -> Iterator[Wire]:
    with (
        override_settings(**world.SETTINGS),
        Wire.on(vhost.url, PUBLISH="outbox", DATABASE=ALIAS, UNROUTED="hold") as wire,
    ):
        yield wire


@pytest.fixture
def ada(wire: Wire) -> Client:
    return world.client_of(User.objects.create_superuser("ada"))


def fail(count: int = 1, **columns: Any) -> list[OutboxEvent]:
    """Commit events whose publish has failed, and that are tried again in an hour."""
    state = {"attempts": 1, "error": "no queue is bound", "due_at": Now() + timedelta(hours=1)}
    return leave(count, columns={"claim": None, **state, **columns})


def post(client: Client, decision: str, *rows: OutboxEvent) -> list[str]:
    data = {"seen": encode_selection({row.pk: version_of(row) for row in rows}), "reason": "fixed"}
    address = f"/admin/django_amqp_events/outboxevent/decide/{decision}/"
    response = client.post(address, data, follow=True)
    assert response.status_code == 200
    return [str(each) for each in response.context["messages"]]


# -- pages on each database ------------------------------------------------------------------------


def test_pages_on_each_database(wire: Wire, ada: Client) -> None:
    [failed] = fail()
    [late] = fail(1, due_at=Now() - timedelta(hours=1), service="old")
    [gone] = fail()
    outbox.discard([gone.pk], alias=ALIAS, by="ada", reason="x")
    address = "/admin/django_amqp_events/outboxevent/"

    def listed(**query: str) -> set[UUID]:
        response = ada.get(address, query)
        assert response.status_code == 200
        return {row.pk for row in response.context["cl"].result_list}

    assert listed() == {failed.pk, late.pk}
    assert listed(state="overdue") == {late.pk}
    assert listed(state="discarded") == {gone.pk}
    assert listed(state="failed") == {failed.pk, late.pk}
    assert listed(name=NAME) == {failed.pk, late.pk}
    assert listed(q=gone.event_id[:8]) == {gone.pk}
    assert listed(q=str(gone.pk)) == {gone.pk}
    words = world.Page(ada.get(f"{address}{late.pk}/change/").content.decode()).words
    assert "events_relay --service old" in words
    assert '"n": 0' in words
    seen = encode_selection({row.pk: version_of(row) for row in (failed, late, gone)})
    words = world.Page(ada.get(f"{address}decide/discard/", {"seen": seen}).content.decode()).words
    assert "Discard 2 events?" in words


@ONE
def test_each_database_that_has_an_outbox_has_its_list(wire: Wire, ada: Client) -> None:
    [here] = fail()
    copied = table().values().get()
    there = OutboxEvent(**{**copied, "id": outbox_rows.new_id()})
    address = "/admin/django_amqp_events/outboxevent/"
    with routed_by():
        try:
            there.save(using="default", force_insert=True)
            for query, row in (({}, here), ({"database": "default"}, there)):
                response = ada.get(address, query)
                assert [each.pk for each in response.context["cl"].result_list] == [row.pk]
                titles = [each.title for each in response.context["cl"].filter_specs]
                assert "database" in titles
            words = ada.get(f"{address}{there.pk}/change/").content.decode()
            assert "<code>default</code>" in words
            assert f"{address}?state=all&database=default&name={NAME}" in world.Page(words).links
            assert post(ada, "discard", here, there) == ["2 events discarded."]
            for alias, row in ((ALIAS, here), ("default", there)):
                kept = OutboxEvent.objects.using(alias).get()
                assert (kept.pk, kept.discarded_by) == (row.pk, "ada")
        finally:
            OutboxEvent.objects.using("default").all().delete()


# -- a service that was renamed --------------------------------------------------------------------


def test_rows_of_a_renamed_service_are_shown_and_published(wire: Wire) -> None:
    wire.configure(PUBLISH="outbox", DATABASE=ALIAS, SERVICE="old")
    rows = fail(3, due_at=Now() - timedelta(minutes=5), attempts=0)
    wire.configure(PUBLISH="outbox", DATABASE=ALIAS, SERVICE="shop")
    mine = fail(1, due_at=Now(), attempts=0)
    assert relay() == RelayCounts(published=1)
    assert wire.ids() == [mine[0].event_id]
    [state] = outbox.read_status(get_settings())
    assert state.severity == "error"
    assert "3 events are due in service 'old' and no relay publishes them" in str(state.meaning)
    assert "events_relay --service old" in str(state.meaning)
    out = io.StringIO()
    call_command("events_relay", "--service", "old", "--until-empty", stdout=out)
    assert "relaying the outbox of old" in out.getvalue()
    assert "3 events published" in out.getvalue()
    messages = wire.take(about=3)
    assert {message.properties["message_id"] for message in messages} == {
        row.event_id for row in rows
    }
    # They are that service's still.
    assert {message.headers["event-service"] for message in messages} == {"old"}
    [state] = outbox.read_status(get_settings())
    assert (state.severity, str(state.meaning)) == ("ok", "empty")


@ONE
def test_rows_of_another_relayed_service_are_no_error(wire: Wire) -> None:
    fail(1, service="billing")
    [state] = outbox.read_status(get_settings())
    assert (state.severity, str(state.meaning)) == ("ok", "empty")


@ONE
@pytest.mark.parametrize("command", ["events_relay", "events_prune"])
def test_an_invalid_service_name_is_refused(wire: Wire, command: str) -> None:
    for wrong in ("", "a.b", "a b"):
        with pytest.raises(CommandError, match="a service's name is letters"):
            call_command(command, "--service", wrong)


# -- retention -------------------------------------------------------------------------------------


@pytest.fixture
def books(archive_database: Database) -> Iterator[None]:
    with override_events(SERVICE="billing", AUTODISCOVER=[], DATABASE=ALIAS):

        @handler(
            NAME, name="books.write", once=True, max_retries=10, retry_backoff=500_000,
            retry_backoff_max=500_000,
        )  # fmt: skip
        def write(**payload: Any) -> None: ...

        yield


def prune(*arguments: str) -> str:
    out = io.StringIO()
    call_command("events_prune", *arguments, stdout=out)
    return out.getvalue()


def test_discarded_events_of_the_outbox_go_when_they_are_old(books: None) -> None:
    old: dict[str, Any] = {"created_at": Now() - timedelta(days=400)}
    discarded = {"fresh": 89, "old": 91}
    for name, days in discarded.items():
        discarded_at = Now() - timedelta(days=days)
        for service in ("billing", "shop"):
            make_outbox(service=service, event_id=name, discarded_at=discarded_at, **old)
    make_outbox(event_id="waits", **old)
    before = table().count()
    assert "outbox     1 row would be deleted, kept 90 d" in prune("--dry-run")
    assert table().count() == before
    with override_events(RETENTION={"DISCARDED": None}):
        assert "outbox     kept forever" in prune()
    assert "outbox     1 row deleted, kept 90 d" in prune()
    left = set(table().values_list("service", "event_id"))
    assert left == {("billing", "fresh"), ("billing", "waits"), ("shop", "fresh"), ("shop", "old")}
    with override_events(RETENTION={"DISCARDED": timedelta(days=1)}):
        assert "outbox     2 rows deleted" in prune("--service", "shop")
    assert set(table().values_list("service", "event_id")) == {
        ("billing", "fresh"), ("billing", "waits"),
    }  # fmt: skip


def test_row_restored_during_the_prune_stays(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = fail()
    outbox.discard([row.pk], alias=ALIAS)
    table().update(discarded_at=Now() - timedelta(days=400))
    plain = retention._delete_rows

    def later(found: Any, ids: Any) -> int:
        assert ids == [row.pk]
        outbox.restore(ids, alias=ALIAS)
        return plain(found, ids)

    monkeypatch.setattr(retention, "_delete_rows", later)
    assert retention.prune({"outbox": 90 * 86400}, service="shop").total == 0
    assert table().get().discarded_at is None


def test_the_inbox_is_kept_for_twice_the_longest_schedule(books: None) -> None:
    rows = InboxEntry.objects.using(ALIAS)
    longest = inbox_retention.minimum_retention()
    assert longest > timedelta(days=100)
    now = datetime.now(UTC)
    for service, days in (("billing", 40), ("billing", 120), ("billing", 130), ("old", 120)):
        handler_of = "books.write" if days < 130 else "gone"
        handled_at = now - timedelta(days=days)
        make_inbox("x", handler_of, service=service, handled_at=handled_at)
    assert "inbox      2 rows would be deleted" in prune("--dry-run")
    with override_events(RETENTION={"INBOX": None}):
        assert "inbox      kept forever" in prune()
    with override_events(RETENTION={"INBOX": timedelta(days=125)}):
        assert "inbox      1 row deleted, kept 125 d" in prune()
    assert "inbox      1 row deleted" in prune()
    assert "inbox      1 row deleted" in prune("--service", "old")
    assert [round((now - row.handled_at).days) for row in rows.all()] == [40]
