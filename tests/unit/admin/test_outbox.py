"""The outbox in the admin: pages, permissions, decisions. Publishing: tests/integration."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.urls import reverse

from django_amqp_events.admin import outbox_pages as pages
from django_amqp_events.admin.action_pages import encode_selection
from django_amqp_events.databases import Now
from django_amqp_events.models import OutboxEvent
from django_amqp_events.monitor.state_texts import ROW_STATES
from django_amqp_events.publish import outbox
from tests.archive_rows import make_outbox as make

from . import admin_world as world
from .admin_world import client_of, ids_in, page, said

pytestmark = pytest.mark.django_db

PERMISSIONS = ("view", "view_payload", "discard", "restore")
DECISIONS = ("discard", "restore")
#: How a row is made that stands so.
STANDING: dict[str, dict[str, Any]] = {
    "failed": {"attempts": 3, "error": "a queue refused it", "due": 300},
    "held": {"due": 50, "claim": "its process"},
    "due": {"due": -1},
    "overdue": {"due": -600},
    "discarded": {
        "due": 3600,
        "attempts": 1,
        "discarded_at": Now(),
        "discarded_by": "bob",
        "discard_reason": "the shop has closed",
    },
}


def user(*permissions: str, model: str = "outboxevent", name: str = "ada") -> User:
    return world.user(*permissions, model=model, name=name)


@pytest.fixture
def ada():
    return client_of(user(*PERMISSIONS))


def one_of_each() -> dict[str, OutboxEvent]:
    return {stands: make(**fields) for stands, fields in STANDING.items()}


def rows() -> QuerySet[Any]:
    return OutboxEvent.objects.annotate(at=Now())


def stands(row: OutboxEvent) -> str:
    found = rows().get(pk=row.pk)
    return outbox.row_state(found, found.at)


def url(name: str, *args: Any, site: str = "admin", model: str = "outboxevent") -> str:
    return reverse(f"admin:django_amqp_events_{model}_{name}", args=args, current_app=site)


def frozen(*found: OutboxEvent) -> str:
    return encode_selection({row.pk: pages.version_of(row) for row in found})


def post(client: Any, decision: str, *found: OutboxEvent, **more: str) -> Any:
    data = {"seen": frozen(*found), "reason": "the queue is fixed", **more}
    return client.post(url(decision), data, follow=True)


# -- the list


def test_list_shows_pending_events_with_age_and_error(ada):
    found = one_of_each()
    response = ada.get(url("changelist"))
    assert ids_in(response) == {row.pk for name, row in found.items() if name != "discarded"}
    words = page(response).words
    for word in (
        "shop.order.created of billing",
        "a queue refused it",
        "failed next try in 4 min",
        "publishing",
        "overdue",
        "2 h",
        "failed: will be retried",
    ):
        assert word in words, word
    assert "attempts 3" in words
    discarded = page(ada.get(url("changelist"), {"state": "discarded"})).words
    assert "discarded by bob: the shop has closed" in discarded


def test_filters(ada):
    made = one_of_each()
    OutboxEvent.objects.filter(pk=made["failed"].pk).update(name="shop.order.paid")
    OutboxEvent.objects.filter(pk=made["overdue"].pk).update(service="old")
    names = {row.pk: name for name, row in made.items()}
    pending = {"failed", "held", "due", "overdue"}
    for query, found in (
        ({}, pending),
        ({"state": "waiting"}, pending),
        ({"state": "failed"}, {"failed"}),
        ({"state": "overdue"}, {"overdue"}),
        ({"state": "discarded"}, {"discarded"}),
        ({"state": "all"}, set(STANDING)),
        ({"state": "nonsense"}, set()),
        ({"name": "shop.order.created"}, pending - {"failed"}),
        ({"name": "shop.order.paid"}, {"failed"}),
        ({"name": "x\0"}, set()),
        ({"database": "default"}, pending),
    ):
        response = ada.get(url("changelist"), query)
        assert {names[pk] for pk in ids_in(response)} == found, query


def test_search_finds_ids_however_they_stand(ada):
    row = make(**STANDING["discarded"], event_id="order-7-created")
    make(event_id="order-8-created")
    for term in ("order-7", "order-7-created", str(row.pk), f" {row.pk.hex} "):
        assert ids_in(ada.get(url("changelist"), {"q": term})) == {row.pk}, term
    for term in ("ORDER-7", "rder-7", "%"):
        assert ids_in(ada.get(url("changelist"), {"q": term})) == set(), term


def test_the_order_is_that_of_publishing(ada):
    made = [make() for _ in range(3)]
    assert list(ada.get(url("changelist")).context["cl"].result_list) == made
    newest = ada.get(url("changelist"), {"o": "-5"}).context["cl"].result_list
    assert list(newest) == made[::-1]


# -- one event


@pytest.mark.parametrize("kind", STANDING)
def test_detail_page_explains_the_state(ada, kind):
    row = make(**STANDING[kind])
    response = ada.get(url("change", row.pk))
    words = page(response).words
    assert str(ROW_STATES[kind][1]) in words
    assert str(ROW_STATES[kind][2]) in words
    offered = {link["name"] for link in response.context["buttons"]["links"]}
    assert offered == {each.name for each in pages.ACTIONS.values() if kind in each.states}
    assert ("the shop has closed" in words) is (kind == "discarded")


# -- who may do what


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("decision", DECISIONS)
def test_each_action_needs_its_permission(decision, allowed):
    """With `view`, its own permission is enough, and all others together are not."""
    kind = pages.ACTIONS[decision].states[0]
    row = make(**STANDING[kind])
    client = client_of(user(*({"view", decision} if allowed else {*PERMISSIONS} - {decision})))
    assert (client.get(url(decision), {"seen": frozen(row)}).status_code == 200) is allowed
    assert (post(client, decision, row).status_code == 200) is allowed
    assert (stands(row) != kind) is allowed
    listed = client.get(url("changelist")).content.decode()
    assert (f'value="{decision}_selected"' in listed) is allowed
    fresh = make(**STANDING[kind])
    shown = client.get(url("change", fresh.pk)).content.decode()
    assert (f"ae-button-{decision}" in shown) is allowed


# -- deciding


@pytest.mark.parametrize("decision", DECISIONS)
def test_action_takes_only_rows_in_its_state(ada, decision):
    after = {"restore": "due", "discard": "discarded"}[decision]
    for kind, fields in STANDING.items():
        row = make(**fields)
        post(ada, decision, row)
        taken = kind in pages.ACTIONS[decision].states
        assert LogEntry.objects.filter(object_id=row.pk).count() == taken
        assert stands(row) == (after if taken else kind)


def test_row_leased_after_the_preview_is_skipped(ada, monkeypatch):
    row = make(**STANDING["failed"])
    plain = outbox.discard

    def later(*args: Any, **kwargs: Any) -> Any:
        OutboxEvent.objects.update(claim=uuid4())
        return plain(*args, **kwargs)

    monkeypatch.setattr(outbox, "discard", later)
    assert "it changed meanwhile" in said(post(ada, "discard", row))[0]
    assert stands(row) == "held"
    assert not LogEntry.objects.exists()


def test_discard_records_user_reason_and_message(ada):
    row = make(**STANDING["failed"])
    response = post(ada, "discard", row, reason=" ")
    assert "This field is required" in page(response).words
    assert stands(row) == "failed"
    response = post(ada, "discard", row, reason="the shop has closed", back="event")
    assert said(response) == ["1 event discarded."]
    assert "the shop has closed" in page(response).words
    kept = OutboxEvent.objects.get()
    assert (kept.discarded_by, kept.discard_reason) == ("ada", "the shop has closed")
    assert (bytes(kept.body), kept.envelope) == (bytes(row.body), row.envelope)
    assert LogEntry.objects.get().get_change_message() == "Discarded: the shop has closed"
    # Somebody else, or another tab.
    bob = client_of(user(*PERMISSIONS, name="bob"))
    assert said(post(bob, "discard", row)) == ["1 event skipped: it is discarded; restore it first"]
    assert OutboxEvent.objects.get().discarded_by == "ada"


def test_confirmation_shows_routes_and_duplicates(ada):
    made = [make(**STANDING["failed"]) for _ in range(2)]
    made.append(make(**STANDING["failed"], service="old", name="shop.order.paid"))
    response = ada.get(url("discard"), {"seen": frozen(*made, make(**STANDING["held"]))})
    words = page(response).words
    for word in (
        "Discard 3 events?",
        "2 shop.order.created events billing",
        "1 shop.order.paid events old",
        "Consequences",
        "RabbitMQ has not confirmed it yet; try again in a minute",
    ):
        assert word in words, word
    words = page(ada.get(url("restore"), {"seen": frozen(make(**STANDING["discarded"]))})).words
    assert "Possible duplicates" in words
    assert "handlers with once skip it" in words


def test_a_body_that_is_published_meanwhile(ada, monkeypatch):
    row = make()

    def publish(self, **_):
        OutboxEvent.objects.all().delete()
        raise OutboxEvent.DoesNotExist

    monkeypatch.setattr(OutboxEvent, "refresh_from_db", publish)
    assert str(row.pk) in said(ada.get(url("payload", row.pk)))[0]
