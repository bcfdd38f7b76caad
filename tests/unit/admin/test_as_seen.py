"""An action does what its page showed, and any error is told: a table of all actions and faults."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import User
from django.db import InterfaceError, OperationalError
from django.test import Client
from django.test.html import Element, parse_html
from django.urls import reverse

import django_amqp_events
from django_amqp_events.archive import eligibility, replay, states, tables
from django_amqp_events.archive.batches import batch_states, preview
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.exceptions import ConfigurationError
from django_amqp_events.models import (
    ArchivedEvent,
    ArchivedFailure,
    Replay,
    ReplayBatch,
    State,
)
from django_amqp_events.publish import outbox
from tests.archive_rows import add_failure, add_replay, make_outbox

from . import admin_world as world
from .admin_world import client_of, grouped, make, page, said, select

pytestmark = pytest.mark.django_db


@pytest.fixture
def root() -> Client:
    return client_of(User.objects.create_superuser("root", password="secret"))


def url(model: str, name: str, *args: Any) -> str:
    return reverse(f"admin:django_amqp_events_{model}_{name}", args=args)


def batch_in(state: str) -> ReplayBatch:
    make()
    batch = batch_states.freeze(tables.rows(), by="ada")
    if state != "draft":
        batch_states.start(batch.pk, by="ada", reason="fixed")
    if state == "paused":
        batch_states.pause(batch.pk, by="ada")
    return batch_states.rows().get(pk=batch.pk)


# -- what the page showed -----------------------------------------------------------------


def resumed_and_paused(pk: UUID) -> None:
    batch_states.resume(pk, by="bob")
    batch_states.pause(pk, by="", note="the canary failed")


def paused_and_resumed(pk: UUID) -> None:
    batch_states.pause(pk, by="bob")
    batch_states.resume(pk, by="bob")


#: The state that a page shows, its button, and what happens before the click.
STALE: list[tuple[str, str, Callable[[UUID], object]]] = [
    ("paused", "resume", resumed_and_paused),
    ("paused", "resume", lambda pk: batch_states.resume(pk, by="bob")),
    ("paused", "resume", lambda pk: batch_states.cancel(pk, by="bob")),
    ("paused", "cancel", resumed_and_paused),
    ("running", "pause", paused_and_resumed),
    ("running", "pause", lambda pk: batch_states.pause(pk, by="", note="the canary failed")),
    ("running", "cancel", paused_and_resumed),
    ("draft", "start", lambda pk: batch_states.start(pk, by="bob", reason="mine")),
    ("draft", "cancel", lambda pk: batch_states.start(pk, by="bob", reason="mine")),
]


@pytest.mark.parametrize(("state", "act", "meanwhile"), STALE)
def test_a_button_changes_only_what_its_page_showed(
    root: Client, state: str, act: str, meanwhile: Callable[[UUID], object]
) -> None:
    batch = batch_in(state)
    shown = page(root.get(url("replaybatch", "change", batch.pk)))
    meanwhile(batch.pk)
    [before] = batch_states.rows().values()
    form = {**shown.fields, "reason": "fixed"}
    answer = root.post(url("replaybatch", act, batch.pk), form, follow=True)
    assert said(answer)[0].startswith("Nothing was done: the batch has changed.")
    assert [before] == list(batch_states.rows().values())


@pytest.mark.parametrize("version", ["", "x", "-1", "1.5", "9" * 30])
def test_a_button_without_a_version_does_nothing(root: Client, version: str) -> None:
    batch = batch_in("paused")
    root.post(url("replaybatch", "resume", batch.pk), {"version": version})
    assert batch_states.rows().get().state == "paused"


def test_a_draft_that_is_deleted_is_gone(root: Client) -> None:
    batch = batch_in("draft")
    shown = page(root.get(url("replaybatch", "change", batch.pk)))
    answer = root.post(url("replaybatch", "cancel", batch.pk), shown.fields, follow=True)
    assert said(answer) == ["Draft deleted."]
    assert not batch_states.rows().exists()
    assert not batch_states.events(batch.pk).exists()


def test_an_event_of_the_outbox_that_was_discarded_again_is_not_restored(root: Client) -> None:
    row = make_outbox(discarded_at=datetime.now(UTC) - timedelta(minutes=1), attempts=2)
    shown = page(root.get(url("outboxevent", "change", row.pk)))
    [link] = [link for link in shown.links if "/restore/" in link]
    asked = page(root.get(link))
    outbox.restore([row.pk], alias="default")
    outbox.discard([row.pk], alias="default", by="bob", reason="it must not be published")
    form = {**asked.fields, "reason": ""}
    answer = root.post(link.partition("?")[0], form, follow=True)
    assert "1 event skipped" in said(answer)[0]
    row.refresh_from_db()
    assert row.discarded_by == "bob"


def test_all_discarded_events_are_those_that_the_list_showed(
    root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    minute, behind = timedelta(minutes=1), datetime.now(UTC) - timedelta(hours=1)
    # The clock of the archive's database says nothing about rows of the outbox.
    monkeypatch.setattr(tables, "clock", lambda: behind)
    rows = [make_outbox(discarded_at=datetime.now(UTC) - minute) for _ in range(60)]
    later, address = make_outbox(), url("outboxevent", "changelist") + "?state=discarded"
    shown = page(root.get(address))
    outbox.discard([later.pk], alias="default", by="bob", reason="it must not be published")
    form = {**shown.fields, **select(rows[:50], "restore", select_across="1")}
    assert root.post(address, form).context["count"] == 60


def test_saving_a_group_without_a_change_blocks_no_one(root: Client) -> None:
    group = grouped(make())
    form = {"note": "", "assignee": "", "ticket": "", "edits": group.edits}
    address = url("failuregroup", "write", group.pk)
    assert root.post(address, form).status_code == 302
    ticket = {"ticket": "https://jira/browse/BILL-7"}
    assert said(root.post(address, {**form, **ticket}, follow=True)) == ["Saved: ticket."]
    # The same values again, as after a double click.
    assert root.post(address, {**form, **ticket}).status_code == 302
    late = page(root.post(address, {**form, "note": "mine"}))
    assert "another user has changed this group" in late.words
    group.refresh_from_db()
    assert (group.ticket, group.note) == ("https://jira/browse/BILL-7", "")


# -- every form and every fault -----------------------------------------------------------


def locked() -> Exception:
    cause = sqlite3.OperationalError("database is locked")
    cause.sqlite_errorcode = sqlite3.SQLITE_BUSY
    exc = OperationalError("database is locked")
    exc.__cause__ = cause
    return exc


FAULTS: dict[str, Callable[[], Exception]] = {
    "locked": locked,
    "unreachable": lambda: OperationalError("server closed the connection"),
    "closed": lambda: InterfaceError("connection already closed"),
    "settings": lambda: ConfigurationError("SERVICE is missing"),
}


Form = tuple[str, dict[str, Any], Any, str]


def event_form(_client: Client, name: str) -> Form:
    row = world.overdue() if name in ("force", "resolve") else make(world.BEFORE[name])
    function = "replay" if name in ("replay", "force") else "decide"
    return world.url(name), {"seen": world.frozen(row), "reason": "x"}, replay, function


def list_form(_client: Client, action: str) -> Form:
    return world.url("changelist"), select([make()], action), batch_states, "freeze"


def outbox_form(client: Client, name: str) -> Form:
    discarded_at = datetime.now(UTC) if name == "restore" else None
    row = make_outbox(attempts=1, discarded_at=discarded_at)
    asked = page(client.get(url("outboxevent", "change", row.pk)))
    [link] = [link for link in asked.links if f"/decide/{name}/" in link]
    form = {**page(client.get(link)).fields, "reason": "x"}
    return url("outboxevent", name), form, outbox, name


def batch_form(_client: Client, act: str) -> Form:
    state = {"resume": "paused", "start": "draft", "look": "draft"}
    batch = batch_in(state.get(act, "running"))
    form = {"version": batch.version, "reason": "fixed"}
    module, name = (preview, "preview_batch") if act == "look" else (batch_states, act)
    return url("replaybatch", act, batch.pk), form, module, name


def group_form(_client: Client, name: str) -> Form:
    group = grouped(make())
    broken = {"write": (failure_groups, "write"), "batch": (batch_states, "freeze")}
    form = {"note": "x", "edits": group.edits}
    return url("failuregroup", name, group.pk), form, *broken[name]


#: Return the URL and fields of each form, and the function that fails.
FORMS: dict[Callable[[Client, str], Form], tuple[str, ...]] = {
    event_form: world.DECISIONS,
    list_form: ("background",),
    outbox_form: ("discard", "restore"),
    batch_form: ("start", "look", "pause", "resume", "cancel"),
    group_form: ("write", "batch"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form, names in FORMS.items() for name in names]
)
def test_every_form_tells_an_error(
    root: Client, monkeypatch: pytest.MonkeyPatch, form: Any, name: str, fault: str
) -> None:
    address, fields, module, function = form(root, name)

    def fail(*_: Any, **__: Any) -> Any:
        exc = FAULTS[fault]()
        raise exc

    monkeypatch.setattr(module, function, fail)
    answer = root.post(address, fields)
    assert answer.status_code == 302, answer.content[:300]
    told = said(root.get(answer["Location"]))
    words = {"locked": "locked", "settings": "SERVICE is missing"}.get(fault, "unreachable")
    assert [each for each in told if words in each], told


@pytest.mark.parametrize("exc", [locked(), ValueError("a mistake")], ids=["locked", "mistake"])
def test_what_was_done_before_an_error_is_told(
    root: Client, monkeypatch: pytest.MonkeyPatch, exc: Exception
) -> None:
    monkeypatch.setattr(
        "django_amqp_events.admin.action_pages.parts", lambda ids: [ids[:2], ids[2:]]
    )
    rows = [make() for _ in range(3)]
    real, calls = states.discard, []

    def discard(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            raise exc if isinstance(exc, OperationalError) else OperationalError("a mistake")
        return real(*args, **options)

    monkeypatch.setitem(replay._DECISIONS, eligibility.DISCARD, discard)
    form = {"seen": world.frozen(*rows), "reason": "old"}
    told = said(root.post(world.url("discard"), form, follow=True))
    assert told[0] == "2 events discarded."
    assert told[1].startswith("1 event not processed. Stopped: ")
    assert ArchivedEvent.objects.filter(state=State.DISCARDED).count() == 2


# -- the clock of another machine ---------------------------------------------------------


def test_the_last_failure_is_that_of_the_last_replay(root: Client) -> None:
    """Although the worker of the first run has a clock that is ahead."""
    now = tables.clock()
    row = make(replays=1, failure=world.document(traceback="of the first run"))
    ArchivedFailure.objects.update(failed_at=now + timedelta(hours=2))
    add_failure(
        row,
        replay=add_replay(row, state=Replay.State.FAILED),
        failed_at=now,
        mirrored_at=now,
        document=json.dumps(world.document(traceback="of the replay")),
    )
    shown = page(root.get(world.url("change", row.pk))).words
    assert "of the replay" in shown
    assert "of the first run" not in shown


# -- what refreshes -----------------------------------------------------------------------

TEMPLATES = Path(str(django_amqp_events.__file__)).parent / "templates"


def source(path: Path) -> str:
    """Return a template with those that it includes, without tags of templates."""
    text = path.read_text(encoding="utf-8")
    included = re.sub(r'{% include "([^"]+)".*?%}', lambda m: source(TEMPLATES / m[1]), text)
    return re.sub(r"{%.*?%}|{{.*?}}", "", included)


def controls(element: Element, live: bool = False) -> Iterator[str]:
    """Yield the controls in the parts of a template that refresh by themselves."""
    live = live or any(name == "data-live" for name, _ in element.attributes)
    if live and element.name in {"button", "form", "input", "select", "textarea"}:
        yield element.name
    for child in element.children:
        if isinstance(child, Element):
            yield from controls(child, live)


def test_no_part_that_refreshes_has_a_control() -> None:
    """What a click does must not change under the pointer."""
    pages = {path.name: source(path) for path in TEMPLATES.rglob("*.html")}
    live = {name: html for name, html in pages.items() if "data-live" in html}
    assert len(live) > 3
    assert {name: [*controls(parse_html(html))] for name, html in live.items()} == {
        name: [] for name in live
    }


# -- "Select all": filters to which rows come without a change of state --------------------


def fails_in_another_way() -> object:
    return make(exception="billing.errors.LateError", state_since=PAST)


def fails_to_be_published() -> object:
    return make_outbox(attempts=1, created_at=PAST)


PAST = datetime.now(UTC) - timedelta(days=1)
#: The list with its filter, the action, and a row that matches since the list was shown.
COMES: list[tuple[str, str, str, Callable[[], object]]] = [
    ("archivedevent", "state=overdue", "resolve", world.overdue),
    ("archivedevent", "exception=billing.errors.LateError", "discard", fails_in_another_way),
    ("archivedevent", "exception=billing.errors.LateError", "background", fails_in_another_way),
    ("outboxevent", "state=failed", "discard", fails_to_be_published),
]


@pytest.mark.parametrize(("model", "query", "action", "come"), COMES)
def test_all_rows_are_those_that_the_list_showed(
    root: Client, model: str, query: str, action: str, come: Callable[[], Any]
) -> None:
    rows = [come() for _ in range(51)]
    address = f"{url(model, 'changelist')}?{query}"
    shown = page(root.get(address))
    form = {**shown.fields, **select(rows[:50], action, select_across="1")}
    if action != "background":
        assert root.post(address, form).context["total"] == 51
    come()
    answer = root.post(address, form)
    assert said(root.get(answer["Location"]))[0].startswith("More events match the filters")
    assert not batch_states.rows().exists()
