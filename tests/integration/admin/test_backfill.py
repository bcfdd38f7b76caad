"""Past events in the admin: a range, and one event that was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client, override_settings
from django.urls import reverse
from django.utils.timezone import localtime

from django_amqp_events.archive.batches.runner import Runner
from django_amqp_events.models import ReplayBatch
from tests.conftest import Vhost
from tests.unit.admin import admin_world as world

from ..archiving import publish_past
from ..conftest import Service

KEY = "shop.order.created"
QUEUE = "billing.send_invoice"
VIEWS = ("view_archivedevent", "view_replaybatch", "view_dashboard")


@pytest.fixture
def billing(service: Callable[..., Service], fresh_vhost: Vhost) -> Service:
    """A service whose handler has 20 past events, one a minute, and whose queue is empty."""
    made = service(fresh_vhost, HISTORY={"MAX_AGE": "14d"}, HANDLERS={"send_invoice": [KEY]})
    made.declare()
    publish_past(made, 0, 20)
    made.take_all(QUEUE)
    return made


PAYLOAD = "view_payload_archivedevent"


@pytest.fixture
def ada(transactional_db: None) -> Iterator[Client]:
    with override_settings(**world.SETTINGS):
        yield world.client_of(world.staff(*VIEWS, PAYLOAD, "bulk_replay_archivedevent"))


def page(name: str) -> str:
    return reverse(f"admin:django_amqp_events_{name}")


def start(client: Client, response: Any) -> ReplayBatch:
    """Confirm the draft that a page shows."""
    batch = ReplayBatch.objects.get()
    assert response.redirect_chain[-1][0].endswith(f"{batch.pk}/change/")
    done = client.post(
        reverse("admin:django_amqp_events_replaybatch_start", args=[batch.pk]),
        {"reason": "was wrong", "threshold": 20, "version": batch.version},
        follow=True,
    )
    assert world.said(done) == ["Started: was wrong"]
    return batch


def handled(billing: Service) -> list[str]:
    runner = Runner(settings=billing.settings, stop=lambda: runner.published > 0)
    runner.run()
    return [message.headers["event-id"] for message in billing.take_all(QUEUE)]


def test_a_range_runs_again(billing: Service, ada: Client) -> None:
    listed = ada.get(page("replaybatch_changelist"))
    assert "Backfill…" in listed.text
    since = localtime(datetime.now(UTC) - timedelta(minutes=10, seconds=30))
    form = {"handler": "send_invoice", "again": "on", "since": f"{since:%Y-%m-%d %H:%M:%S}"}
    draft = ada.post(page("replaybatch_backfill"), form, follow=True)
    assert "<strong>11</strong>" in draft.text
    start(ada, draft)
    assert handled(billing) == [f"e{number}" for number in range(9, 20)]


def test_the_events_with_a_value_run_again(billing: Service, ada: Client) -> None:
    form = {"handler": "send_invoice", "again": "on", "match": "order_id=1*"}
    draft = ada.post(page("replaybatch_backfill"), form, follow=True)
    assert "value of order_id" in str(ReplayBatch.objects.get().title)
    start(ada, draft)
    assert handled(billing) == ["e1", *(f"e{number}" for number in range(10, 20))]


def test_only_those_who_may_view_payloads_search_them(
    billing: Service, transactional_db: None
) -> None:
    with override_settings(**world.SETTINGS):
        client = world.client_of(world.staff(*VIEWS, "bulk_replay_archivedevent"))
        shown = client.get(page("replaybatch_changelist")).text
        assert "Published since" in shown
        assert "Value in the payload" not in shown
        form = {"handler": "send_invoice", "again": "on", "match": "order_id=1"}
        refused = client.post(page("replaybatch_backfill"), form)
        assert (refused.status_code, PAYLOAD in refused.text) == (403, True)
        assert not ReplayBatch.objects.exists()


def test_a_found_event_runs_again(billing: Service, ada: Client) -> None:
    found = ada.get(page("dashboard_find"), {"q": "e7"})
    assert "Search the history of the last day" in found.text
    assert "Run again…" not in found.text
    past = ada.get(found.context["history_url"])
    ((event, records, since),) = past.context["located"]
    assert (event.id, event.name, records) == ("e7", KEY, [])
    assert "Run again…" in past.text
    form = {"handler": "send_invoice", "id": "e7", "event": KEY, "since": since, "again": "on"}
    draft = ada.post(past.context["run_url"], form, follow=True)
    start(ada, draft)
    assert handled(billing) == ["e7"]


def test_an_event_with_an_impossible_time_is_shown(billing: Service, ada: Client) -> None:
    headers = {"event-id": "e20", "event-published-at": "9999-12-31T23:59:59Z"}
    billing.publish("events", KEY, headers=headers)
    since = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    with override_settings(TIME_ZONE="Asia/Tokyo"):
        found = ada.get(page("dashboard_find"), {"q": "e20", "since": since})
    assert [event.id for event, _, _ in found.context["located"]] == ["e20"]
    assert "The history has it." in found.text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"handler": "nobody"}, "Handler: "),
        ({"handler": "send_invoice", "since": "2999-01-01"}, "is in the future"),
        ({"handler": "send_invoice", "since": "0001-01-01"}, "Enter a valid date/time"),
        ({"handler": "send_invoice", "until": "9999-12-31 23:59"}, "Enter a valid date/time"),
        (
            {"handler": "send_invoice", "since": "1970-01-03", "until": "1970-01-02"},
            "must be before its end",
        ),
        ({"handler": "send_invoice", "match": "17"}, "is not a search such as order_id=17"),
        ({"handler": "send_invoice"}, "has received all events of the history"),
        ({"handler": "send_invoice", "event": "shop.stock"}, "does not handle"),
    ],
)
def test_a_wrong_range_is_told(
    billing: Service, ada: Client, form: dict[str, str], text: str
) -> None:
    done = ada.post(page("replaybatch_backfill"), form, follow=True)
    assert text in world.said(done)[0]
    assert not ReplayBatch.objects.exists()


def test_only_those_who_may_replay_in_batches_see_it(
    billing: Service, transactional_db: None
) -> None:
    with override_settings(**world.SETTINGS):
        client = world.client_of(world.staff(*VIEWS))
        assert "Backfill…" not in client.get(page("replaybatch_changelist")).text
        assert client.post(page("replaybatch_backfill"), {}).status_code == 403
        since = {"q": "e7", "since": (datetime.now(UTC) - timedelta(days=1)).isoformat()}
        assert "Run again…" not in client.get(page("dashboard_find"), since).text
