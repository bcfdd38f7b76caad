"""Groups of failures in the admin: list, page, what people write, what they decide."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.urls import reverse

from django_amqp_events.admin import ArchivedEventAdmin
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.models import (
    ArchivedEvent,
    FailureGroup,
    GroupAction,
    Replay,
    ReplayBatch,
    State,
)

from . import admin_world as world
from .admin_world import client_of, grouped, make, page, said, user

pytestmark = pytest.mark.django_db


def person(*permissions: str, name: str = "ada", groups: tuple[str, ...] = ("view",)) -> Any:
    """A user with these permissions on events and groups."""
    made = user(*permissions, name=name)
    for each in groups:
        made.user_permissions.add(Permission.objects.get(codename=f"{each}_failuregroup"))
    return client_of(made)


@pytest.fixture
def ada():
    return person(*world.PERMISSIONS, groups=("view", "assign"))


def url(name: str, *args: Any, site: str = "admin") -> str:
    return reverse(f"admin:django_amqp_events_failuregroup_{name}", args=args, current_app=site)


def listed(client: Any, **query: str) -> set[str]:
    response = client.get(url("changelist"), query)
    page(response)
    return {group.exception for group in response.context["cl"].result_list}


def fields(group: FailureGroup, **more: Any) -> dict[str, Any]:
    written = {"note": group.note, "assignee": group.assignee, "ticket": group.ticket}
    return {**written, "edits": group.edits, **more}


# -- list


def test_filters_and_search(ada):
    opened = grouped(make(exception="a.Open"))
    failure_groups.write(
        opened.pk, seen=0, by="", now=datetime.now(UTC), note="", assignee="bob", ticket=""
    )
    grouped(make(State.DISCARDED, exception="b.Right"))
    long_ago = dict.fromkeys(("mirrored_at", "state_since"), datetime.now(UTC) - timedelta(days=9))
    make(State.SUCCEEDED, exception="a.Back", handler="book", **long_ago)
    grouped(make(exception="a.Back", handler="book"))
    for query, found in (
        ({}, {"a.Open", "a.Back"}),
        ({"state": "open"}, {"a.Open", "a.Back"}),
        ({"state": "back"}, {"a.Back"}),
        ({"state": "right"}, {"b.Right"}),
        ({"state": "all"}, {"a.Open", "a.Back", "b.Right"}),
        ({"state": "nonsense"}, set()),
        ({"handler": "book"}, {"a.Back"}),
        ({"exception": "a.Open"}, {"a.Open"}),
        ({"assignee": "bob"}, {"a.Open"}),
        ({"assignee": ""}, {"a.Back"}),
        ({"assignee": "", "state": "all"}, {"a.Back", "b.Right"}),
        ({"handler": "bo\0ok"}, set()),
        ({"q": "a."}, {"a.Open", "a.Back"}),
        ({"q": "Right"}, {"b.Right"}),
        ({"q": "boo"}, {"a.Back"}),
        ({"q": "%"}, set()),
        ({"q": str(opened.pk)}, {"a.Open"}),
        ({"q": "a.", "state": "back"}, {"a.Back"}),
    ):
        assert listed(ada, **query) == found, query


def test_orders(ada):
    now = datetime.now(UTC)
    for _ in range(2):
        make(exception="a.Old", last_failed_at=now - timedelta(hours=5))
    grouped(make(exception="b.New", last_failed_at=now))
    for query, found, columns in (
        ({}, ["b.New", "a.Old"], {2: "desc"}),
        ({"o": "2"}, ["a.Old", "b.New"], {2: "asc"}),
        ({"o": "-1"}, ["a.Old", "b.New"], {1: "desc"}),
    ):
        shown = ada.get(url("changelist"), query).context["cl"]
        assert [group.exception for group in shown.result_list] == found, query
        assert shown.get_ordering_field_columns() == columns, query


# -- one group


def test_the_page_of_a_group(ada):
    row = make()
    make(State.SUCCEEDED)
    group = grouped(row)
    response = ada.get(url("change", group.pk))
    words = page(response).words
    for word in (
        "1 open event",
        "billing.errors.TaxError",
        "billing.tax in rate",
        str(group.pk),
        "ask the tax office",
        "rate = tax.rate(country)",
    ):
        assert word in words or word in response.content.decode(), word
    html = response.content.decode()
    events = reverse("admin:django_amqp_events_archivedevent_changelist")
    assert f'href="{events}?group={group.pk}"' in html
    found = ada.get(events, {"group": str(group.pk)})
    assert [each.pk for each in found.context["cl"].result_list] == [row.pk]


def test_the_last_failure_is_not_shown_to_a_user_who_may_not_see_its_event(ada, monkeypatch):
    group = grouped(make(message="a secret"))
    monkeypatch.setattr(
        ArchivedEventAdmin, "has_view_permission", lambda pages, request, row=None: row is None
    )
    response = ada.get(url("change", group.pk))
    assert response.status_code == 200
    assert "a secret" not in response.content.decode()


def test_an_event_leads_to_its_group(ada):
    row = make()
    group = grouped(row)
    html = ada.get(world.url("change", row.pk)).content.decode()
    assert f'href="{url("change", group.pk)}"' in html
    blind = person("view", name="eve", groups=())
    assert str(group.pk) not in blind.get(world.url("change", row.pk)).content.decode()


def test_a_group_is_replayed_in_the_background(broker):
    rows = [make() for _ in range(3)]
    group = grouped(*rows)
    make(exception="a.Other")
    bulk = person("view", "bulk_replay", name="bulk")
    html = bulk.get(url("change", group.pk)).content.decode()
    assert "Replay all in the background" in html
    response = bulk.post(url("batch", group.pk))
    batch = ReplayBatch.objects.get()
    assert response.status_code == 302
    assert response["Location"].endswith(f"/replaybatch/{batch.pk}/change/")
    assert (batch.state, batch.total, str(batch.title)) == ("draft", 3, f"All with group {group}")
    frozen = Replay.objects.values_list("event", flat=True)
    assert set(frozen) == {row.pk for row in rows}
    assert batch.group == group.pk
    replayer = person("view", "replay", name="r")
    assert "in the background" not in replayer.get(url("change", group.pk)).content.decode()
    assert replayer.post(url("batch", group.pk)).status_code == 403
    ArchivedEvent.objects.update(state=State.DISCARDED)
    assert "None of these events" in said(bulk.post(url("batch", group.pk)))[0]
    assert broker.messages == []


# -- who may what


def test_permissions_are_asked_for_again_in_each_view(broker):
    row = make()
    group = grouped(row)
    stranger = person("view", name="s", groups=())
    assert stranger.get(url("changelist")).status_code == 403
    assert stranger.get(url("change", group.pk)).status_code == 403
    viewer = person(name="v")
    words = page(viewer.get(url("change", group.pk))).words
    # Neither what is in events nor what he may not do.
    for word in ("ask the tax office", "Replay all", "Save"):
        assert word not in words
    for name in ("batch", "write"):
        assert viewer.post(url(name, group.pk), fields(group)).status_code == 403
    # Whoever may decide about events needs to see the group to do it from there.
    decider = person(*world.PERMISSIONS, name="d", groups=())
    assert decider.post(url("batch", group.pk)).status_code == 403
    assert broker.messages == []
    assert not GroupAction.objects.exists()


# -- what people write


NO_URLS = ("javascript:alert(1)", "http://", "https:///x", "ftp://host/1", "http://a b", "x")


def test_invalid_form_is_not_saved(ada):
    group = grouped(make())
    for wrong in (
        *({"ticket": ticket} for ticket in NO_URLS),
        {"assignee": "x" * 256},
        {"note": "x" * 5001},
        {"edits": ""},
        {"edits": "-1"},
        {"edits": str(2**40)},
    ):
        page(ada.post(url("write", group.pk), fields(group, note="mine") | wrong))
        assert not GroupAction.objects.exists(), wrong
        assert FailureGroup.objects.get().note == ""


def test_a_decision_is_in_the_history_of_the_group_of_its_event(ada, broker):
    row, other = make(), make(exception="a.Other")
    group, another = grouped(row), grouped(other)
    data = {"seen": world.frozen(other), "reason": "x"}
    assert ada.post(world.url("discard"), data).status_code == 302
    assert failure_groups.history(group, 10) == []
    [step] = failure_groups.history(another, 10)
    assert (step.what, step.by, step.text, step.events) == ("discarded", "ada", "x", 1)
