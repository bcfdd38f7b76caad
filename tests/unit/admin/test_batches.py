"""Replay batches in the admin: freezing, dry run, buttons, progress. No broker."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from django_amqp_events.archive import states, tables
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.models import (
    ArchivedEvent,
    FailureGroup,
    Replay,
    ReplayBatch,
    State,
)
from tests.archive_rows import add_replay

from . import admin_world as world
from .admin_world import client_of, grouped, ids_in, make, page, said, select

pytestmark = pytest.mark.django_db

NOBODY = UUID("c0ffee00-0000-4000-8000-000000000000")
ACTS = ("start", "look", "pause", "resume", "cancel")


def staff(*permissions: str, name: str = "ada") -> User:
    return world.user("view", *permissions, name=name)


@pytest.fixture
def ada() -> Client:
    return client_of(staff("bulk_replay"))


def url(name: str, *args: Any, site: str = "admin") -> str:
    return reverse(f"admin:django_amqp_events_replaybatch_{name}", args=args, current_app=site)


def drafted(number: int = 2, **more: Any) -> ReplayBatch:
    for _ in range(number):
        make(**more)
    return batch_states.freeze(tables.rows(), by="ada", title="a few")


def running(number: int = 2, **more: Any) -> ReplayBatch:
    batch = drafted(number)
    batch_states.start(batch.pk, by="ada", **{"reason": "fixed", **more})
    batch.refresh_from_db()
    return batch


# -- freezing in the list -----------------------------------------------------------------


def test_selected_events_are_frozen_and_the_dry_run_is_shown(ada: Client) -> None:
    rows = [make(reason="poison"), make(unconfirmed=True), make(handler="gone")]
    make()
    add_replay(rows[0], state=Replay.State.SUCCEEDED)
    form = select(rows, "background")
    response = ada.post(world.url("changelist"), form, follow=True)
    (batch,) = batch_states.rows()
    assert response.redirect_chain[-1][0] == url("change", batch.pk)
    assert (batch.total, str(batch.name), batch.created_by) == (3, "3 selected events", "ada")
    words = page(response).words
    assert "2 of 3 events can be replayed" in words
    assert "there is no handler 'gone'" in words
    assert "1 of 2 is poison" in words
    assert "1 of 2 may already be published" in words
    assert "1 of 2 already has a successful replay" in words
    assert "billing.send_invoice" in words
    assert "Start" in words
    assert not tables.rows().exclude(state=State.ARCHIVED).exists()


@pytest.mark.parametrize(("number", "cap"), [(51, 60), (60, 60), (63, 60)])
def test_all_events_of_a_list_are_those_that_it_listed(
    ada: Client, monkeypatch: pytest.MonkeyPatch, number: int, cap: int
) -> None:
    for module in ("lists", "replay_batch_pages"):
        monkeypatch.setattr(f"django_amqp_events.admin.{module}.CAP", cap)
    began = datetime.now(UTC)
    rows = [
        make(state_since=began, last_failed_at=began + timedelta(seconds=each))
        for each in range(number)
    ]
    make(handler="book", state_since=began, last_failed_at=began)
    address = world.url("changelist") + "?handler=send_invoice&failed=day"
    listed = page(ada.get(address))
    most = min(number, cap)
    assert f"Select all {most} archived events" in listed.words
    make(last_failed_at=began + timedelta(days=1), state_since=datetime.now(UTC))
    at = listed.fields["listed_at"]
    ada.post(address, select(rows[-1:], "background", select_across="1", listed_at=at))
    (batch,) = batch_states.rows()
    frozen = batch_states.events(batch.pk).order_by("position")
    assert list(frozen.values_list("event", flat=True)) == [row.pk for row in rows[-most:]]
    assert batch.total == most
    # The other actions as well.
    form = select(rows[-1:], "discard", select_across="1", listed_at=at)
    asked = client_of(staff("discard", name="bob")).post(address, form)
    assert asked.context["count"] == number


def test_an_event_that_fails_again_after_the_list_was_shown_is_left_out(ada: Client) -> None:
    changed, row = make(), make()
    listed = page(ada.get(world.url("changelist")))
    ArchivedEvent.objects.filter(pk=changed.pk).update(state_since=datetime.now(UTC))
    form = select([changed, row], "background", listed_at=listed.fields["listed_at"])
    ada.post(world.url("changelist"), form)
    (batch,) = batch_states.rows()
    assert list(batch_states.events(batch.pk).values_list("event", flat=True)) == [row.pk]


@pytest.mark.parametrize("may_see", [True, False])
def test_a_batch_of_a_group_names_it(may_see: bool) -> None:
    group = grouped(make())
    ticket = "https://tickets.example/7"
    FailureGroup.objects.update(ticket=ticket)
    user = staff("bulk_replay")
    if may_see:
        user.user_permissions.add(Permission.objects.get(codename="view_failuregroup"))
    batch = batch_states.freeze(tables.rows(), by="ada", title="a few", group=group.pk)
    html = client_of(user).get(url("change", batch.pk)).content.decode()
    assert (f"/failuregroup/{group.pk}/" in html) == may_see
    assert (ticket in html) == may_see


def test_the_list_leads_to_the_events_that_failed_again(ada: Client) -> None:
    batch = running(2)
    batch_states.events(batch.pk).update(state="failed")
    batch_states.count(batch.pk)
    html = ada.get(url("changelist")).content.decode()
    [link] = re.findall(r'<a href="([^"]*)">2 failed again</a>', html)
    link = link.replace("&amp;", "&")
    assert ids_in(ada.get(link)) == set(tables.rows().values_list("pk", flat=True))
    assert ids_in(ada.get(link.replace(".failed", ".skipped"))) == set()
    for wrong in ("x", f"{batch.pk}.x", f"{NOBODY}"):
        assert ids_in(ada.get(world.url("changelist"), {"state": "all", "batch": wrong})) == set()
    events = ada.get(url("change", batch.pk)).context["events_url"]
    assert len(ids_in(ada.get(events))) == 2


def test_view_permission_shows_no_button() -> None:
    eve = staff(name="eve")
    eve.user_permissions.add(Permission.objects.get(codename="view_replaybatch"))
    client = client_of(eve)
    batch = running()
    shown = page(client.get(url("change", batch.pk)))
    assert "submit" not in str(shown.fields)
    for act in ACTS:
        assert client.post(url(act, batch.pk)).status_code == 403
    # The events that a batch names are archived events.
    eve.user_permissions.remove(Permission.objects.get(codename="view_archivedevent"))
    other = client_of(User.objects.get(pk=eve.pk))
    assert other.get(url("change", batch.pk)).status_code == 403
    assert other.get(url("changelist")).status_code == 403


def test_a_site_without_batches_has_no_action() -> None:
    root = User.objects.create_superuser("root", password="secret")
    make()
    found = client_of(root).get(world.url("changelist", site="office")).content.decode()
    assert "replay_selected" in found
    assert "background_selected" not in found


# -- the buttons --------------------------------------------------------------------------


def test_a_reason_is_required_and_values_are_checked(ada: Client) -> None:
    batch = drafted()
    for form in (
        {"reason": " ", "threshold": "20"},
        {"reason": "fixed", "rate": "0"},
        {"reason": "fixed", "rate": "nan"},
        {"reason": "fixed", "rate": "inf"},
        {"reason": "fixed", "canary": "0"},
        {"reason": "fixed", "threshold": "101"},
    ):
        response = ada.post(url("start", batch.pk), form)
        assert "errorlist" in page(response).tags or b"errorlist" in response.content
        batch.refresh_from_db()
        assert batch.state == "draft", form


def test_start_pause_resume_cancel(ada: Client) -> None:
    batch = drafted()
    form = {"reason": "tax table\x07 <b>fixed</b>", "rate": "5", "canary": "1", "threshold": ""}
    done = ada.post(url("start", batch.pk), {**form, "version": batch.version}, follow=True)
    assert said(done)[0].startswith("Started")
    batch.refresh_from_db()
    assert (batch.state, batch.rate, batch.canary, batch.threshold) == ("running", 5, 1, None)
    assert b"<b>fixed</b>" not in done.content
    assert "No process runs this batch" in page(done).words
    for act, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        ada.post(url(act, batch.pk), {"version": batch.version})
        batch.refresh_from_db()
        assert batch.state == state
    late = "Nothing was done: the batch has changed. It is cancelled now."
    form = {"reason": "late", "version": str(batch.version)}
    for act in ("pause", "start"):
        assert said(ada.post(url(act, batch.pk), form, follow=True))[-1] == late
    assert not LogEntry.objects.exists()
    words = page(ada.get(url("change", batch.pk))).words
    for step in ("created ada", "started ada", "paused ada", "resumed ada", "cancelled ada"):
        assert step in words


def test_look_again(ada: Client) -> None:
    batch = drafted(3)
    row = tables.rows()[0]
    states.discard({row.pk: row.version}, by="bob", reason="x", now=datetime.now(UTC))
    ada.post(url("look", batch.pk))
    words = page(ada.get(url("change", batch.pk))).words
    assert "2 of 3 events can be replayed" in words
    assert "another user or tab changed it first; its state is now discarded" in words
