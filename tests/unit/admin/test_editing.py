"""Editing in the admin: the editor, its preview and its permissions."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from django.contrib.admin.models import LogEntry
from django.test import override_settings

from django_amqp_events.admin import formatting
from django_amqp_events.archive import replay
from django_amqp_events.declare.newest import Version
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.exceptions import UnroutableError
from django_amqp_events.models import (
    ArchivedEvent,
    LatestVersion,
    Replay,
    Revision,
)
from django_amqp_events.worker import inbox
from tests.archive_rows import add_replay, seen

from . import admin_world as world
from .admin_world import (
    PERMISSIONS,
    client_of,
    frozen,
    make,
    page,
    said,
    url,
    user,
)

pytestmark = pytest.mark.django_db

RIGHTS = ("view", "view_payload", "edit")
SETTINGS: dict[str, Any] = {
    **world.EVENTS,
    "EDITING": True,
    "MAX_BODY": 2 * formatting.SHOWN,
    "HANDLERS": {
        **world.EVENTS["HANDLERS"],
        "strict": {
            "EVENTS": ["shop.order.*"],
            "HANDLER": f"{__name__}.needs_an_order",
            "STRICT": True,
        },
        "once": {
            "EVENTS": ["shop.order.*"],
            "HANDLER": f"{__name__}.needs_an_order",
            "ONCE": True,
        },
        "newest": {
            "EVENTS": ["shop.order.*"],
            "HANDLER": f"{__name__}.needs_a_version",
            "NEWEST": ["order_id", "version"],
        },
    },
}


def needs_an_order(order_id: int, note: str = "") -> None:
    """Handles an order."""


def needs_a_version(order_id: int, version: int) -> None:
    """Handles an order, unless a newer one was handled."""


def redact(name: str, payload: dict[str, Any]) -> dict[str, Any]:
    assert name.startswith("shop.")
    return {**payload, "note": "***"}


def fails(name: str, payload: dict[str, Any]) -> dict[str, Any]:
    raise ValueError(f"I quote {payload['note']}")


def returns_text(name: str, payload: dict[str, Any]) -> Any:
    return str(payload)


@pytest.fixture
def project(pages_of_a_project):
    with override_settings(AMQP_EVENTS=SETTINGS):
        yield


@pytest.fixture
def ada():
    return client_of(user(*RIGHTS, "replay"))


def form(row: ArchivedEvent, payload: Any = None, **more: str) -> dict[str, str]:
    given = {"order_id": 8, "note": "Grüße"} if payload is None else payload
    text = given if isinstance(given, str) else json.dumps(given)
    return {"version": str(row.version), "payload": text, "step": "review", **more}


def publish(row: ArchivedEvent, payload: Any = None, **more: str) -> dict[str, str]:
    return form(row, payload, **{"step": "publish", "reason": "a wrong number", **more})


def text_of(response: Any) -> str:
    """The text in the editor."""
    found: str = response.context["form"].initial["payload"]
    return found


# -- editor, diff, publish ------------------------------------------------------------------


def test_from_the_button_to_the_replay(ada, broker):
    row = make()
    detail = ada.get(url("change", row.pk))
    [link] = [b["url"] for b in detail.context["buttons"]["links"] if b["name"] == "edit"]
    editor = ada.get(link)
    assert json.loads(text_of(editor)) == {"order_id": 7, "note": "Grüße"}
    words = page(editor).words
    for word in (row.event_id, "send_invoice", "the original payload", "new replay id"):
        assert word in words, word
    fields = {**page(editor).fields, "payload": '{"order_id": 8, "note": "Grüße"}'}
    review = ada.post(editor.context["action_url"], {**fields, "step": "review"})
    assert review.context["own"] == [
        (" ", "{"),
        ("-", '  "order_id": 7,'),
        ("+", '  "order_id": 8,'),
        (" ", '  "note": "Grüße"'),
        (" ", "}"),
    ]
    html = review.content.decode()
    assert html.count('class="ae-added"') == html.count('class="ae-removed"') == 1
    assert not broker.messages
    assert ArchivedEvent.objects.get().version == 0
    fields = {**page(review).fields, "step": "publish", "reason": "a wrong number"}
    done = ada.post(review.context["action_url"], fields, follow=True)
    assert "1 event published with the edited payload" in said(done)[0]
    [message] = broker.messages
    assert json.loads(message.body) == [[], {"order_id": 8, "note": "Grüße"}, {}]
    revision = Revision.objects.get()
    assert (revision.by, revision.reason) == ("ada", "a wrong number")
    words = page(ada.get(url("change", row.pk))).words
    for word in (
        "replay 1 of revision 1 requested by ada",
        "Revision 1",
        '- "order_id": 7,',
        '+ "order_id": 8,',
    ):
        assert word in words, word


def test_nothing_is_published_without_a_reason(ada, broker):
    row = make()
    for reason in ("", "  "):
        response = ada.post(url("edit", row.pk), publish(row, reason=reason))
        assert "This field is required." in page(response).words
        assert "own" in response.context
    assert not broker.messages
    assert not Revision.objects.exists()


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ('{"order_id": 8,}', "This is not valid JSON"),
        ({"order": 8}, "missing a required argument: 'order_id'"),
    ],
)
def test_form_error_keeps_the_text(ada, broker, payload, why):
    row = make(handler="strict")
    for step in ("review", "publish"):
        response = ada.post(url("edit", row.pk), {**publish(row, payload), "step": step})
        assert why in page(response).words
        assert "errorlist" in response.content.decode()
        written = payload if isinstance(payload, str) else json.dumps(payload)
        assert response.context["form"]["payload"].value() == written
    assert not broker.messages


def test_preview_returns_to_the_editor_with_the_text(ada):
    row = make()
    response = ada.post(url("edit", row.pk), form(row, '{"order_id":  9}', step="edit"))
    assert text_of(response) == '{"order_id":  9}'


def test_editing_begins_with_the_last_revision(ada, broker):
    row = make()
    broker.errors = [UnroutableError("nobody"), UnroutableError("nobody")]
    for number in (8, 9):
        row.refresh_from_db()
        told = ada.post(url("edit", row.pk), publish(row, {"order_id": number}), follow=True)
        assert said(told) == ["1 event not published: nobody", "The edit is kept as a revision."]
    assert not LogEntry.objects.exists()
    row.refresh_from_db()
    assert json.loads(text_of(ada.get(url("edit", row.pk))))["order_id"] == 9
    ada.post(url("edit", row.pk), publish(row, {"order_id": 10}))
    assert list(Revision.objects.values_list("number", flat=True)) == [1, 2, 3]


def test_a_body_that_cannot_be_read_can_be_fixed(ada, broker):
    row = make(body=b'[[], {"order_id": 7,}, {}]', reason="malformed")
    response = ada.get(url("edit", row.pk))
    assert text_of(response) == '[[], {"order_id": 7,}, {}]'
    assert "is not a valid payload" in page(response).words
    assert "Edit and replay" in page(ada.get(url("change", row.pk))).words
    ada.post(url("edit", row.pk), publish(row, {"order_id": 7}))
    assert json.loads(broker.messages[0].body) == [[], {"order_id": 7}, {}]
    # What JavaScript makes of a cut emoji, which no browser gets but as an escape.
    cut = make(body=b'[[], {"note": "\\ud83d"}, {}]')
    assert text_of(ada.get(url("edit", cut.pk))) == '{\n  "note": "\\ud83d"\n}'
    binary = make(body=b"\x89\0\xff", reason="malformed")
    assert text_of(ada.get(url("edit", binary.pk))) == "{}"


def test_too_large_body_names_the_function(ada):
    row = make(body=b'[[], {"note": "' + b"x" * formatting.SHOWN + b'"}, {}]')
    assert "replay.edit()" in page(ada.get(url("change", row.pk))).words
    response = ada.get(url("edit", row.pk), follow=True)
    assert "replay.edit()" in said(response)[0]


def test_a_handler_that_runs_once_is_said_plainly(ada):
    row = make(handler="once")
    for response in (ada.get(url("edit", row.pk)), ada.post(url("edit", row.pk), form(row))):
        assert "an edited replay does nothing and counts as succeeded" in page(response).words


def test_an_edited_payload_is_checked_for_its_version(ada):
    row = make(handler="newest", body=b'[[], {"order_id": 7, "version": 4}, {}]')
    words = page(ada.post(url("edit", row.pk), form(row, {"order_id": 7, "version": "x"}))).words
    assert "must be an integer or a time in ISO format" in words
    newest = get_registry().handlers["newest"]
    LatestVersion.objects.create(
        id=inbox.latest_key("billing", newest, Version("7", 5, is_time=False)),
        service="billing", handler="newest", thing="7", version=5, is_time=False,
        event_id="x", handled_at=datetime.now(UTC),
    )  # fmt: skip
    for version, said_so in ((5, True), (6, False)):
        payload = {"order_id": 7, "version": version}
        words = page(ada.post(url("edit", row.pk), form(row, payload))).words
        assert ("1 of 1 is superseded" in words) == said_so, words


def test_possible_duplicates_are_named(ada):
    row = make(reason="poison", replays=1)
    add_replay(row, state=Replay.State.SUCCEEDED)
    words = page(ada.get(url("edit", row.pk))).words
    assert "A replay has already succeeded" in words
    assert "This event is poison" in words


def test_stale_form_names_the_change(ada, broker):
    row = make()
    replay.replay(seen(row), by="bob", reason="")
    broker.windows.clear()
    for step in ("review", "publish", "edit"):
        response = ada.post(url("edit", row.pk), {**publish(row), "step": step}, follow=True)
        [told] = said(response)
        assert "another user or tab changed it first; its state is now replaying" in told
    assert not broker.messages
    # And the one who comes with a plain replay.
    stale = make()
    ada.post(url("edit", stale.pk), publish(stale))
    done = ada.post(url("replay"), {"seen": frozen(stale)}, follow=True)
    assert "another user or tab changed it first" in said(done)[-1]


def test_a_forged_version_publishes_nothing(ada, broker):
    row = make()
    for version in ("", "x", "-1", "9" * 11, "²"):
        response = ada.post(url("edit", row.pk), publish(row, version=version), follow=True)
        assert "Nothing was published" in said(response)[0], version
    assert not broker.messages


# -- who may --------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [None, *RIGHTS])
def test_editing_needs_edit_and_payload_permissions(missing, broker):
    row = make()
    rights = [each for each in (*PERMISSIONS, "edit") if each != missing]
    somebody = client_of(user(*rights))
    allowed = missing is None
    assert somebody.get(url("edit", row.pk)).status_code == (200 if allowed else 403)
    done = somebody.post(url("edit", row.pk), publish(row))
    assert done.status_code == (302 if allowed else 403)
    assert len(broker.messages) == allowed
    if missing != "view":
        other = make()
        html = somebody.get(url("change", other.pk)).content.decode()
        assert (url("edit", other.pk) in html) == allowed


def test_disabled_editing_hides_the_editor(ada, broker):
    row = make()
    with override_settings(AMQP_EVENTS={**SETTINGS, "EDITING": False}):
        assert "Edit and replay" not in page(ada.get(url("change", row.pk))).words
        for answer in (
            ada.get(url("edit", row.pk), follow=True),
            ada.post(url("edit", row.pk), publish(row), follow=True),
        ):
            assert "EDITING" in said(answer)[0]
    assert not broker.messages


# -- redaction ------------------------------------------------------------------------------


def hooked(name: Any) -> Any:
    return override_settings(AMQP_EVENTS={**SETTINGS, "REDACT": name})


def test_redacted_values_are_never_published(ada, broker):
    row = make()
    with hooked(f"{__name__}.redact"):
        assert ada.get(url("edit", row.pk)).status_code == 403
        assert ada.post(url("edit", row.pk), publish(row)).status_code == 403
        assert ada.get(url("payload", row.pk)).status_code == 403
        words = page(ada.get(url("change", row.pk))).words
        assert "Edit and replay" not in words
        assert "Redacted by this project." in words
        assert '"note": "***"' in words
        assert "Grüße" not in words
        boss = client_of(user(*RIGHTS, "view_raw", name="boss"))
        assert json.loads(text_of(boss.get(url("edit", row.pk))))["note"] == "Grüße"
    assert not broker.messages


def test_a_hook_that_fails_hides_the_payload(ada, broker, caplog):
    row = make()
    ada.post(url("edit", row.pk), publish(row))
    for hook, kind in (
        (f"{__name__}.fails", "ValueError"),
        (f"{__name__}.returns_text", "TypeError"),
        ("nowhere.to.be.found", "ModuleNotFoundError"),
        (["a.b"], "ModuleNotFoundError"),
    ):
        with hooked(hook):
            words = page(ada.get(url("change", row.pk))).words
        assert f"failed with {kind}; the payload is hidden" in words
        for text in (words, caplog.text):
            assert "Grüße" not in text


def test_undecodable_body_stays_hidden(ada):
    for row in (
        make(body=b"sword:fish", reason="malformed"),
        make(body=b"sword:" * formatting.SHOWN),
    ):
        with hooked(f"{__name__}.redact"):
            html = ada.get(url("change", row.pk)).content.decode()
        assert "sword:" not in html
        assert "The payload cannot be decoded" in html or "too long to decode" in html


def unenforceable(order_id: Celery) -> None:
    """Has a type hint that pydantic cannot enforce."""


def test_an_edit_is_kept_when_its_settings_are_wrong(ada, broker):
    typed = {"EVENTS": ["shop.order.*"], "HANDLER": f"{__name__}.unenforceable", "VALIDATE": True}
    with override_settings(AMQP_EVENTS={**SETTINGS, "HANDLERS": {"typed": typed}}):
        row = make(handler="typed")
        shown = page(ada.post(url("edit", row.pk), form(row, {"order_id": "mine"})))
    assert "cannot be enforced" in shown.words
    assert "mine" in shown.words
    assert broker.messages == []
