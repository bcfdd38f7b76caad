"""The admin in other languages: catalogues, templates, pages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import django.conf
import pytest
from django.contrib.auth.models import User
from django.db.models import TextField
from django.db.models.functions import Cast
from django.test import override_settings
from django.urls import reverse
from django.utils import translation
from django.utils.translation import gettext, override, trans_real

from django_amqp_events.archive import eligibility, replay, states, tables
from django_amqp_events.archive.batches import batch_states, preview
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.archive.selection import Selection
from django_amqp_events.broker.publish_errors import build_error, unroutable_error
from django_amqp_events.exceptions import (
    ConfigurationError,
    PublishNackedError,
)
from django_amqp_events.message.types import Message
from django_amqp_events.models import (
    Alert,
    ArchiveAction,
    ArchivedEvent,
    ArchivedFailure,
    FailureGroup,
    OutboxEvent,
    Replay,
    ReplayBatch,
    ReplayBatchAction,
    Revision,
    State,
)
from django_amqp_events.models.reason_field import ReasonField
from django_amqp_events.monitor import alerts
from django_amqp_events.publish import outbox_rows, publisher
from django_amqp_events.publish.outbox_rows import Answer, Row
from django_amqp_events.reason_texts import TEXTS
from django_amqp_events.reasons import Reason, translated
from django_amqp_events.templatetags.amqp_events import text

from . import admin_world as world
from .admin_world import (
    add_replay,
    client_of,
    frozen,
    make,
    overdue,
)
from .catalogues import (
    LANGUAGES,
    PACKAGE,
    compiled,
    marked,
    mo,
    path,
    po,
)
from .test_dashboard import snapshot
from .test_outbox import make as make_waiting

PERCENT = re.compile(r"%\((\w+)\)s|%%")
BRACE = re.compile(r"(?<!\()\{(\w*)\}")
TAG = re.compile(r"</?[a-z]+")
LETTERS = re.compile(r"[^\W\d_]{2,}")
#: Texts of templates that are the same in every language.
NAMES = {"RabbitMQ:"}
#: User text and names: the same in every language.
WRITTEN = re.compile(
    r"(?:billing|shop)[\w.:*-]*|send_invoice|\bbook\b|\bada\b|\bevents\b|\bTaxError\b|celery@[\w-]+"
    r"|nobody-here|exhausted|poison|expired|RabbitMQ|(?:/srv|application)/[\w./]+|utf-8|\bint\b"
    r"|\b\w+_selected\b|[0-9a-f]{8}-[0-9a-f-]{27}"
    # Texts of rows, snapshots and users, in English.
    r"|there is no tax rate for 'XX'|attempt 3 failed, and it was the last one|a queue refused it"
    r"|\bfixed(?: in 1\.2)?|a wrong number|\bwrong\b|\"(?:order_id|note)\": (?:\d|\"Grüße\")"
    r"|42 events wait for .*: start a worker|x-delivery-limit is 3|declared is 5|\bdue\b"
    r"|Take anything\."
    # Django caches this one.
    r"|^Search$|^empty$|^queue .*: different"
)

# -- catalogues -----------------------------------------------------------------------------


def test_catalogues_match_the_marked_texts() -> None:
    wanted = marked()
    assert len(wanted) > 500
    for language in LANGUAGES:
        found = {entry.key for entry in po(language)[1:]}
        missing = {key: file for key, file in wanted.items() if key not in found}
        assert missing == {}, "run `make messages`, then translate"
        assert found - wanted.keys() == set(), "run `make messages`"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated_and_looked_at(language: str) -> None:
    header, *entries = po(language)
    number = int(re.findall(r"nplurals=(\d)", header.forms[0])[0])
    for entry in entries:
        assert "fuzzy" not in entry.flags, entry
        assert len(entry.forms) == (1 if entry.plural is None else number), entry
        assert all(text.strip() for text in entry.forms.values()), entry


@pytest.mark.parametrize("language", LANGUAGES)
def test_placeholders_and_tags_are_those_of_the_text(language: str) -> None:
    for entry in po(language)[1:]:
        texts = [entry.text] if entry.plural is None else [entry.text, entry.plural]
        for pattern in (PERCENT, BRACE):
            names = [set(pattern.findall(text)) for text in texts]
            for form in entry.forms.values():
                said = set(pattern.findall(form))
                assert set.intersection(*names) <= said <= set.union(*names), (entry, form)
        tags = [sorted(TAG.findall(text)) for text in texts]
        for form in entry.forms.values():
            assert sorted(TAG.findall(form)) in tags, (entry, form)
            for code in re.findall(r"<code>.*?</code>|`.*?`|events_\w+", entry.text):
                assert code in form, (code, form)


@pytest.mark.parametrize("language", LANGUAGES)
def test_compiled_catalogue_is_current(language: str) -> None:
    assert mo(language) == compiled(po(language)), "run `make messages`"


@pytest.mark.parametrize("language", LANGUAGES)
def test_catalogue_header_is_clean(language: str) -> None:
    # Django keeps catalogues apart whose plurals differ.
    said = re.compile(r"Plural-Forms: (.*)\n")
    own = said.findall(po(language)[0].forms[0])
    of_django = Path(django.conf.__file__).parent / "locale" / language / "LC_MESSAGES/django.mo"
    found = said.findall(of_django.read_bytes().decode(errors="replace"))
    assert [own[0].replace(" ", "")] == [each.replace(" ", "") for each in found]
    text = path(language, "po").read_text()
    assert "@" not in text
    assert "POT-Creation-Date" not in text
    assert not [line for line in text.splitlines() if line.startswith("#:")]


# -- templates ------------------------------------------------------------------------------


class Texts(HTMLParser):
    """The texts of a template that a person sees or hears."""

    SAID = frozenset({"alt", "aria-label", "placeholder", "summary", "title", "value"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "button":  # its value is the form's
            self.found += [value for name, value in attrs if name in self.SAID and value]

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def forgotten(source: str) -> list[str]:
    """Return what a template says in one language only."""
    source = re.sub(r"{#.*?#}|{% comment.*?endcomment %}", "", source, flags=re.DOTALL)
    # Classes of CSS.
    source = re.sub(r"{% block bodyclass %}.*?{% endblock %}", "", source)
    source = re.sub(
        r"{% blocktrans(?:late)?\b.*?{% endblocktrans(?:late)? %}", "", source, flags=re.DOTALL
    )
    source = re.sub(r"{{.*?}}|{%.*?%}", "", source, flags=re.DOTALL)
    texts = (" ".join(text.split()) for text in Texts(source).found)
    return [text for text in texts if LETTERS.search(text) and text not in NAMES]


def test_no_template_says_anything_in_one_language_only() -> None:
    found = {path: forgotten(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.html")}
    assert len(found) > 20
    assert not {path.name: texts for path, texts in found.items() if texts}


# -- reasons --------------------------------------------------------------------------------

NESTED = Reason("both", first=Reason("not-overdue"), then=Reason("state", state="Zoë 100 %"))


def test_reasons_are_translated_on_pages() -> None:
    assert str(NESTED).startswith(str(Reason("not-overdue")))
    assert str(NESTED).endswith("; its state is Zoë 100 %")
    with override("de"):
        assert str(NESTED).endswith("; its state is Zoë 100 %")
        assert str(Reason("state", state=State.ARCHIVED.label)) == "its state is archived"
        state = Reason("state", state=State.ARCHIVED.label)
        assert translated(state) == "sein Zustand ist: archiviert"
        assert translated(NESTED).startswith("seine Neuzustellung ist nicht überfällig")
        assert translated(NESTED).endswith("; sein Zustand ist: Zoë 100 %")
        assert translated("archived") == "archived"
        assert text(None) == ""


def test_an_error_raised_with_a_reason_is_translated() -> None:
    error = ConfigurationError(Reason("not-overdue"))
    assert str(error) == str(Reason("not-overdue"))
    with override("de"):
        assert translated(error).startswith("seine Neuzustellung")
        assert translated(ValueError("no reason")) == "no reason"


def test_reasons_are_equal_by_code_and_values() -> None:
    assert Reason("state", state=State.ARCHIVED.label) == Reason("state", state="archived")
    assert Reason("state", state="queued") != Reason("state", state="archived")
    assert len({Reason("deleted"), Reason("deleted"), Reason("filtered")}) == 2
    with pytest.raises(KeyError):
        Reason("no such code")


class Placeholders(dict[str, int]):
    """Three of everything; the keys are the names that were asked for."""

    def __missing__(self, name: str) -> int:
        return self.setdefault(name, 3)


@pytest.mark.parametrize("code", TEXTS)
def test_a_reason_is_stored_the_same_in_every_language(code: str) -> None:
    asked = Placeholders()
    assert TEXTS[code] % asked
    nested = Reason("state", state=Reason("state-archived"))
    params = {name: 3 if name == "count" else [nested, "Zoë", 2.5] for name in asked}
    field, reason = ReasonField(), Reason(code, **params)
    column = field.get_prep_value(reason)
    for language in LANGUAGES:
        with override(language):
            assert field.get_prep_value(Reason(code, **params)) == column
            read = field.to_python(column)
            assert (read, hash(read), str(read)) == (reason, hash(reason), str(reason))
            assert read is not None
            assert read.translated()


def test_rows_are_written_the_same_in_every_language(project: None, db: None) -> None:
    """A page in German stores and groups what a command does."""
    assert len({json.dumps(_written(language)) for language in ("en", *LANGUAGES)}) == 1


def _written(language: str) -> list[Any]:
    """Write each kind of row that has a reason in a language; return its columns as stored."""
    rows = [make(event_id="7"), make(State.DISCARDED), make(State.QUEUED), make(handler="gone")]
    with override(language):
        since = datetime(2026, 1, 1, tzinfo=UTC)
        batch = batch_states.freeze(tables.rows(), by="", title=Selection(since=since).title())
        plan = preview.preview_batch(batch)
        seen = {row.pk: row.version for row in rows}
        batch_states.skip(batch.pk, eligibility.examine(seen, eligibility.REPLAY).skipped)
        batch_states.start(batch.pk, by="", reason="x")
        batch_states.pause(batch.pk, by="", note=Reason("canary-silent", count=2))
        backend = SimpleNamespace(
            publish=lambda messages, mandatory: [unroutable_error(each) for each in messages]
        )
        with patch.object(publisher, "backend", lambda settings: backend):
            replay.replay({rows[0].pk: rows[0].version}, by="ada")
        message = Message(
            exchange="events", routing_key="a.b", body=b"", headers={}, properties={}, event_id="7"
        )
        waiting = make_waiting(claim="here", due=50)
        error = build_error(PublishNackedError, message, "nacked")
        answer = Answer(Row(id=waiting.pk, message=message, claim="here"), error)
        outbox_rows.record_failures("default", [answer])
        group = FailureGroup(pk=uuid4(), exception="TaxError", open=2)
        alerts.update_alert("group_new", "", alerts._of_group(group), now=datetime.now(UTC))
    stored: list[Any] = [plan["skipped"]]
    for model, column in (
        (ReplayBatch, "title"),
        (ReplayBatch, "note"),
        (Replay, "error"),
        (ArchivedEvent, "error"),
        (OutboxEvent, "error"),
        (Alert, "details"),
    ):
        raw = Cast(column, TextField())
        found = sorted(model.objects.annotate(raw=raw).values_list("raw", flat=True))
        assert any(found), (model, column)
        stored.append(found)
    written: tuple[Any, ...] = (
        ArchiveAction,
        ArchivedFailure,
        Alert,
        OutboxEvent,
        Replay,
        ReplayBatchAction,
        ReplayBatch,
        ArchivedEvent,
    )
    for model in written:
        model._base_manager.all()._raw_delete("default")
    for skipped in stored[0]:
        del skipped["title"]
    return stored


# -- pages ----------------------------------------------------------------------------------


class Said(Texts):
    """The text of a page without scripts, code and user text."""

    SAID = Texts.SAID | {"aria-label"}
    FOREIGN = frozenset({"code", "option", "pre", "script", "style", "textarea"})

    def __init__(self, html: str) -> None:
        self._inside = 0
        super().__init__(html.replace("<wbr>", ""))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside += tag in self.FOREIGN
        if not (tag == "input" and dict(attrs).get("type") in ("hidden", "checkbox")):
            super().handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        self._inside -= tag in self.FOREIGN

    def handle_data(self, data: str) -> None:
        if not self._inside:
            super().handle_data(data)


@pytest.fixture
def project() -> Iterator[None]:
    with override_settings(**world.SETTINGS, AMQP_EVENTS={**world.EVENTS, "EDITING": True}):
        yield


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch, project: None, db: None) -> dict[str, str]:
    """Addresses of pages, with something of everything on them."""
    rows = [make(), make(), make(handler=""), make(State.DISCARDED), overdue()]
    row = rows[0]
    add_replay(row, revision=_revision(row), error="a queue refused it", publishes=2)
    make(event_id=row.event_id, handler="book")
    doubtful = make(unconfirmed=True, reason="poison")
    failure_groups.rebuild()
    failure_groups.fold_all_counts()
    row.refresh_from_db()
    states.discard({rows[1].pk: 0}, by="ada", reason="wrong", now=datetime.now(UTC))
    waiting = {
        "failed": make_waiting(attempts=3, error="a queue refused it"),
        "overdue": make_waiting(due=-600),
        "foreign": make_waiting(due=-600, service="shop"),
        "held": make_waiting(due=50),
        "discarded": make_waiting(due=60, discarded_at=datetime.now(UTC), discarded_by="ada"),
    }
    title = Selection(handlers=["book"]).title()
    draft = batch_states.freeze(tables.rows(), by="ada", title=title)
    preview.preview_batch(draft)
    running = batch_states.freeze(tables.rows(), by="ada", title=title)
    batch_states.start(running.pk, by="ada", reason="fixed", rate=2.5, canary=1, threshold=20)
    snapshot()

    def at(name: str, *args: Any, **query: str) -> str:
        return reverse(f"admin:django_amqp_events_{name}", args=args, query=query or None)

    seen = frozen(row, doubtful, rows[3])
    return {
        "index": reverse("admin:index"),
        "archive": at("archivedevent_changelist", state="all"),
        "archive-nothing": at("archivedevent_changelist", handler="nobody-here"),
        "event": at("archivedevent_change", row.pk),
        "event-discarded": at("archivedevent_change", rows[3].pk),
        "event-unconfirmed": at("archivedevent_change", doubtful.pk),
        "event-overdue": at("archivedevent_change", rows[4].pk),
        "edit": at("archivedevent_edit", row.pk, version=str(row.version)),
        "replay": at("archivedevent_replay", seen=seen),
        "discard": at("archivedevent_discard", seen=frozen(row)),
        "restore": at("archivedevent_restore", seen=seen),
        "force": at("archivedevent_force", seen=frozen(rows[4])),
        "resolve": at("archivedevent_resolve", seen=frozen(rows[4], row)),
        "groups": at("failuregroup_changelist"),
        "group": at("failuregroup_change", row.group_id),
        "batches": at("replaybatch_changelist"),
        "batch-draft": at("replaybatch_change", draft.pk),
        "batch-running": at("replaybatch_change", running.pk),
        "batch-events": at("archivedevent_changelist", state="all", batch=f"{running.pk}.pending"),
        "dashboard": at("dashboard_changelist"),
        "topology": at("dashboard_topology"),
        "outbox": at("outboxevent_changelist"),
        **{f"outbox-{name}": at("outboxevent_change", each.pk) for name, each in waiting.items()},
        "publish": at(
            "outboxevent_publish", seen=_ids(waiting["failed"], waiting["held"], waiting["overdue"])
        ),
        "give-up": at(
            "outboxevent_discard", seen=_ids(waiting["failed"], waiting["foreign"]), back="event"
        ),
    }


def _revision(row: Any) -> Revision:
    return Revision.objects.create(
        pk=uuid4(),
        event=row,
        number=1,
        body=b'[[], {"order_id": 8}, {}]',
        by="ada",
        at=datetime.now(UTC) - timedelta(hours=1),
        reason="a wrong number",
    )


def _ids(*rows: OutboxEvent) -> str:
    return ",".join(f"{row.pk.hex}:0" for row in rows)


@pytest.fixture
def ada(db: None) -> Any:
    """A user with every permission."""
    return client_of(User.objects.create_superuser("ada", password="secret"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_page_opens_in_the_language(language: str, pages: Any, ada: Any) -> None:
    with override(language):
        for name, address in pages.items():
            response = ada.get(address)
            assert response.status_code == 200, (name, response.get("Location"))
            assert gettext("AMQP events") in response.content.decode(), name


def test_no_page_says_anything_that_is_not_marked(
    pages: Any, ada: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def marks(function: Callable[..., str]) -> Callable[..., str]:
        def mark(*given: Any) -> str:
            # An empty form of a date is a name, and no text.
            text = function(*given)
            return text if given[0].endswith("_FORMAT") else f"\ue000{text}\ue001"

        return mark

    for name in ("gettext", "ngettext", "pgettext", "npgettext"):
        marking = marks(getattr(trans_real, name))
        # First where Django keeps what it looks up: it would keep the marking one for good.
        monkeypatch.setattr(vars(translation)["_trans"], name, marking)
        monkeypatch.setattr(trans_real, name, marking)
    said: dict[str, set[str]] = {}
    for name, address in pages.items():
        html = ada.get(address).content.decode()
        number = 1
        while number:  # a sentence may have others in it
            html, number = re.subn("\ue000[^\ue000\ue001]*\ue001", "", html)
        texts = {WRITTEN.sub("", " ".join(text.split())) for text in Said(html).found}
        if found := {text for text in texts if LETTERS.search(text)}:
            said[name] = found
    assert said == {}
