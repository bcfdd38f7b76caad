"""The page that finds an event: what it shows to whom, and where its search box is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.test import override_settings
from django.urls import reverse

from django_amqp_events.admin.backfill_pages import BackfillForm
from django_amqp_events.archive import search_values, selection
from django_amqp_events.models import ArchivedEvent, State
from django_amqp_events.monitor import event_locations
from tests.archive_rows import add_replay, make_inbox

from . import admin_world as world
from .admin_world import client_of, ids_in, make, page, said, select

pytestmark = pytest.mark.django_db

EVENTS = {**world.EVENTS, "EVENTS": {"shop.order.created": {"SEARCH": ["order_id", "note"]}}}
EVERYTHING = (
    "view_dashboard", "view_archivedevent", "view_payload_archivedevent", "view_outboxevent",
    "view_inboxentry", "view_replaybatch",
)  # fmt: skip


@pytest.fixture(autouse=True)
def searched() -> Any:
    with override_settings(AMQP_EVENTS=EVENTS):
        yield


def staff(*codenames: str) -> Any:
    return client_of(world.staff(*codenames))


def stored(**fields: Any) -> ArchivedEvent:
    row = make(**fields)
    search_values.store(search_values.in_event(row), using="default")
    return row


def find(client: Any, value: str) -> Any:
    return page(client.get(reverse("admin:django_amqp_events_dashboard_find"), {"q": value}))


def test_an_unreachable_database_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an inbox, such as while its server is away."""

    def away(*_: Any) -> Any:
        raise OperationalError("server closed the connection")

    monkeypatch.setattr(event_locations, "_in_inbox", away)
    assert "server closed the connection" in find(staff(*EVERYTHING), "7").words


def test_rows_are_shown_with_links() -> None:
    row = stored(state=State.REPLAYING)
    replay = add_replay(row)
    make_inbox(row.event_id)
    client = staff(*EVERYTHING)
    archived = reverse("admin:django_amqp_events_archivedevent_change", args=[row.pk])
    for value in (row.event_id, str(replay.pk), "7", "order_id=7", "note=Gr*"):
        found = find(client, value)
        assert archived in found.links
        assert "inbox billing book handled" in found.words
        assert "Published to its handler, which has not reported an outcome yet." in found.words
        assert found.fields["q"] == value


@pytest.mark.parametrize("waited", [None, timedelta(), timedelta(days=3)])
def test_a_past_event_is_searched_since_it_was_published(
    settings: Any, waited: timedelta | None
) -> None:
    """Not since its state has changed; also in the hour that clocks repeat."""
    settings.AMQP_EVENTS, settings.TIME_ZONE = (
        {**EVENTS, "HISTORY": {"MAX_AGE": "1d"}},
        "Europe/Berlin",
    )
    failed_at = datetime(2026, 10, 26, 0, 30, tzinfo=UTC)
    row = make(
        State.SUCCEEDED,
        first_failed_at=failed_at,
        state_since=failed_at + timedelta(days=9),
        published_at=None if waited is None else failed_at - waited,
    )
    client = staff(*EVERYTHING, "bulk_replay_archivedevent")
    found = client.get(reverse("admin:django_amqp_events_dashboard_find"), {"q": row.event_id})
    ((event, _rows, since),) = found.context["located"]
    data = {"handler": "send_invoice", "id": event.id, "since": since}
    form = BackfillForm(data, searches=True)
    assert form.is_valid(), form.errors
    assert form.cleaned_data["since"] == failed_at - (waited or timedelta()) - timedelta(days=1)


def test_tables_that_a_user_may_not_view_are_left_out() -> None:
    row = stored()
    found = find(staff("view_dashboard", "view_outboxevent"), row.event_id)
    assert "No row that you may view has this id or value." in found.words


def test_values_need_the_permission_for_payloads() -> None:
    row = stored()
    client = staff("view_dashboard", "view_archivedevent")
    assert "No row that you may view has" in find(client, "order_id=7").words
    assert "No row that you may view has" not in find(client, row.event_id).words
    assert ids_in(client.get(reverse(world.LIST), {"q": "order_id=7"})) == set()


@pytest.mark.parametrize("term", ["7", "order_id=7", "order_id=7*", "note=Gr*", "note=Grüße"])
def test_the_list_searches_by_value(term: str) -> None:
    row = stored()
    stored(event_id="other", body=b'[[], {"order_id": 8}, {}]', state=State.SUCCEEDED)
    assert ids_in(staff(*EVERYTHING).get(reverse(world.LIST), {"q": term})) == {row.pk}


def test_the_list_is_bounded_and_an_action_on_all_rows_takes_what_it_shows(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(selection, "FEW_VALUES", 2)
    rows = [stored() for _ in range(4)]
    client = staff(*EVERYTHING, "discard_archivedevent")
    response = client.get(reverse(world.LIST), {"q": "order_id=7"})
    assert len(ids_in(response)) == 2
    assert any("More than 2 values match" in each for each in said(response))
    form = select(rows[:1], "discard", select_across="1")
    asked = client.post(f"{reverse(world.LIST)}?q=order_id%3D7", form, follow=True)
    assert asked.context["count"] == 2
