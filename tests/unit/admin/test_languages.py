"""The admin in other languages: catalogues, templates, pages."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import django.conf
import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db.models import TextField
from django.db.models.functions import Cast
from django.test import Client, override_settings
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
    State,
)
from django_amqp_events.models.base import ReasonField
from django_amqp_events.monitor import alerts
from django_amqp_events.publish import outbox_rows, publisher
from django_amqp_events.publish.outbox_rows import Answer, Row
from django_amqp_events.reason_texts import TEXTS
from django_amqp_events.reasons import Reason, translated
from django_amqp_events.templatetags.amqp_events import text
from tests.archive_rows import add_replay, add_revision, make_outbox

from . import admin_world as world
from .admin_world import (
    client_of,
    make,
    overdue,
)
from .catalogues import (
    LANGUAGES,
    PACKAGE,
    marked,
    names,
    path,
    translations,
)
from .test_dashboard import snapshot
from .test_who_sees_what import BASE, addresses, selections

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


@pytest.mark.parametrize("language", LANGUAGES)
def test_catalogue_has_the_marked_texts_and_no_others(language: str) -> None:
    """A text that is not translated, or not certainly, is not compiled."""
    wanted, found = marked(), translations(language)
    assert len(wanted) > 500
    plurals = int(re.findall(r"nplurals=(\d)", found[""])[0])
    expected = {name: file for key, file in wanted.items() for name in names(key, plurals)}
    missing = {name: file for name, file in expected.items() if name not in found}
    assert missing == {}, "run `make messages`, then translate"
    assert found.keys() - expected.keys() == {""}, "run `make messages`"
    for key in wanted:
        texts = [text for text in key[1:] if text is not None]
        for form in (found[name] for name in names(key, plurals)):
            for pattern in (PERCENT, BRACE):
                allowed = [set(pattern.findall(text)) for text in texts]
                said = set(pattern.findall(form))
                assert set.intersection(*allowed) <= said <= set.union(*allowed), (key, form)
            assert sorted(TAG.findall(form)) in [sorted(TAG.findall(text)) for text in texts]
            for code in re.findall(r"<code>.*?</code>|`.*?`|events_\w+", texts[0]):
                assert code in form, (code, form)


@pytest.mark.parametrize("language", LANGUAGES)
def test_compiled_catalogue_is_current(language: str) -> None:
    source = path(language, "po").read_text(encoding="utf-8")
    written = re.findall(r'^msgstr(?:\[\d\])? ((?:".*"\n?)+)', source, re.MULTILINE)
    assert {literal_eval(f"({text})") for text in written} == {*translations(language).values()}
    assert "@" not in source
    assert "POT-Creation-Date" not in source
    assert not [line for line in source.splitlines() if line.startswith("#:")]


@pytest.mark.parametrize("language", LANGUAGES)
def test_plurals_are_djangos(language: str) -> None:
    """Django keeps catalogues apart whose plurals differ."""
    said = re.compile(r"Plural-Forms: (.*)\n")
    of_django = Path(django.conf.__file__).parent / "locale" / language / "LC_MESSAGES/django.mo"
    found = said.findall(of_django.read_bytes().decode(errors="replace"))
    own = said.findall(translations(language)[""])
    assert own[0].replace(" ", "") == found[0].replace(" ", "")


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
        waiting = make_outbox(claim="here", due=50)
        error = build_error(PublishNackedError, message, "nacked")
        answer = Answer(Row(id=waiting.pk, message=message, claim="here"), error)
        outbox_rows.record_failures("default", [answer])
        group: Any = FailureGroup(pk=uuid4(), exception="TaxError")
        group.open = 2
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
def pages(project: None, ada: Client) -> Callable[[], Iterator[tuple[str, str]]]:
    """Return what reads every page, with something of everything on them."""
    rows = [make(), make(), make(handler=""), make(State.DISCARDED), overdue()]
    row = rows[0]
    add_replay(row, revision=add_revision(row), error="a queue refused it", publishes=2)
    make(event_id=row.event_id, handler="book")
    make(unconfirmed=True, reason="poison")
    failure_groups.rebuild()
    states.discard({rows[1].pk: 0}, by="ada", reason="wrong", now=datetime.now(UTC))
    make_outbox(attempts=3, error="a queue refused it")
    make_outbox(due=-600)
    make_outbox(due=-600, service="shop")
    make_outbox(due=50)
    make_outbox(due=60, discarded_at=datetime.now(UTC), discarded_by="ada")
    title = Selection(handlers=["book"]).title()
    preview.preview_batch(batch_states.freeze(tables.rows(), by="ada", title=title))
    running = batch_states.freeze(tables.rows(), by="ada", title=title)
    batch_states.start(running.pk, by="ada", reason="fixed", rate=2.5, canary=1, threshold=20)
    snapshot()
    archive, chosen = f"{BASE}/archivedevent", selections()
    asked = [
        reverse("admin:index"), f"{archive}/?state=all", f"{archive}/?handler=nobody-here",
        f"{archive}/?state=all&batch={running.pk}.pending",
        *(
            f"{each}?seen={chosen[each.split('/')[3]]}" if "/decide/" in each else each
            for each in addresses(admin.site)
            if not each.endswith(("/history/", "/delete/"))
        ),
    ]  # fmt: skip

    def read() -> Iterator[tuple[str, str]]:
        for address in asked:
            response: Any = ada.get(address)
            if response.status_code == 200 and response["Content-Type"].startswith("text/html"):
                yield address, response.content.decode()

    return read


@pytest.fixture
def ada(db: None) -> Any:
    """A user with every permission."""
    return client_of(User.objects.create_superuser("ada", password="secret"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_page_opens_in_the_language(language: str, pages: Any) -> None:
    with override(language):
        found = [*pages()]
        assert len(found) > 30
        for address, html in found:
            assert gettext("AMQP events") in html, address


def test_no_page_says_anything_that_is_not_marked(
    pages: Any, monkeypatch: pytest.MonkeyPatch
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
    for name, html in pages():
        rest, number = html, 1
        while number:  # a sentence may have others in it
            rest, number = re.subn("\ue000[^\ue000\ue001]*\ue001", "", rest)
        texts = {WRITTEN.sub("", " ".join(text.split())) for text in Said(rest).found}
        if found := {text for text in texts if LETTERS.search(text)}:
            said[name] = found
    assert said == {}
