"""Archived events as JSON lines: nothing is left out, and nothing is shown that is redacted."""

from __future__ import annotations

import json
import os
import signal
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_amqp_events.archive import export, tables
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    State,
)
from django_amqp_events.publish import publisher
from tests import archive_rows
from tests.commands import run_command
from tests.conftest import ONE, Database

NOW = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
pytestmark = pytest.mark.usefixtures("archive_database")


def redact(name: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "card": "***"}


def odd(name: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"card": object()}


@pytest.fixture(autouse=True)
def billing(archive_database: Database, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    settings.AMQP_EVENTS = {"SERVICE": "billing", "AUTODISCOVER": [], "HANDLERS": {}}

    def nobody(_: Any) -> Any:
        raise AssertionError("something is to be published")

    monkeypatch.setattr(publisher, "backend", nobody)
    return settings


def make(number: int = 1, state: State = State.ARCHIVED, **fields: Any) -> ArchivedEvent:
    """An event with everything that can belong to one."""
    values = {
        "last_failed_at": NOW + timedelta(seconds=number),
        "correlation_id": "basket-\U0001f9fa",
        "published_at": NOW,
        "version": 7,
        "detail": "it is \u202e odd",
        "attempts": 6,
        "replays": 1,
        "body": b'[[], {"card": "card-41", "name": "Gr\xc3\xbc\xc3\x9fe"}, {}]',
        "headers_raw": ArchivedEvent.pack_headers({"a": 1, "b": b"\0\xff"}),
    }
    row = archive_rows.make(number, state, at=NOW, **{**values, **fields})
    revision = archive_rows.add_revision(row, body=b'[[],{"card":"card-42"},{}]')
    replay = archive_rows.add_replay(row, revision=revision, state="failed")
    for each in (None, replay):
        document = json.dumps({"traceback": "Traceback\n…"})
        archive_rows.add_failure(row, replay=each, document=document)
    failure_groups.rebuild()
    row.refresh_from_db()
    for action in ("discard", "restore", "edit"):
        ArchiveAction.objects.create(
            event=row, at=NOW, action=action, by="ada", reason=f"to {action}",
            group_id=row.group_id, replay_id=replay.pk if action == "edit" else None,
        )  # fmt: skip
    return row


def exported(*, raw: bool = True) -> list[str]:
    return list(export.export(tables.rows(), sight=lambda _: "raw" if raw else "redacted"))


def test_a_line_has_every_column_of_every_row() -> None:
    """Byte for byte; for a receiver, the tables are not needed."""
    row = make(body=bytes(range(256)))
    [line] = exported()
    assert line.isascii()
    assert line.endswith("}\n")
    document = json.loads(line)
    event = document["event"]
    assert b64decode(event["body"]) == bytes(range(256))
    assert b64decode(event["headers_raw"]) == bytes(row.headers_raw)
    assert datetime.fromisoformat(event["last_failed_at"]) == row.last_failed_at
    assert (event["id"], event["detail"]) == (str(row.pk), row.detail)
    columns = {field.name for field in ArchivedEvent._meta.concrete_fields}
    assert columns - event.keys() == {"group"}
    [revision], [replay], failures = (
        document[name] for name in ("revisions", "replays", "failures")
    )
    assert b64decode(revision["body"]) == b'[[],{"card":"card-42"},{}]'
    assert replay["revision"] == revision["id"]
    assert {failure["replay"] for failure in failures} == {None, replay["id"]}
    # Those of one moment are in their order, too.
    assert [action["action"] for action in document["actions"]] == ["discard", "restore", "edit"]


@ONE
def test_an_export_reads_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CHUNK", 3)
    monkeypatch.setattr(tables, "CHUNK_BYTES", 10)
    rows = {make(number, body=b"x" * 6).pk for number in range(8)}
    found = [UUID(json.loads(line)["event"]["id"]) for line in exported()]
    assert found == sorted(found)
    assert set(found) == rows


# -- redaction ------------------------------------------------------------------------------


@ONE
def test_a_redacted_export_has_nothing_of_the_body(billing: Any) -> None:
    make(1)
    make(2, body=b"card-41", reason="malformed")
    billing.AMQP_EVENTS = {**billing.AMQP_EVENTS, "REDACT": f"{__name__}.redact"}
    lines = exported(raw=False)
    text = "".join(lines)
    for secret in ("card-41", "card-42", "Y2FyZC00MQ", 'body"', "headers_raw"):
        assert secret not in text
    documents = {json.loads(line)["event"]["event_id"]: json.loads(line) for line in lines}
    assert documents["order-1"]["payload"] == {"card": "***", "name": "Grüße"}
    assert documents["order-1"]["revisions"][0]["payload"] == {"card": "***"}
    assert documents["order-2"]["payload"] is None
    assert "cannot be redacted" in documents["order-2"]["problem"]
    for body in (b'[[], {"total": NaN}, {}]', b'[[], {"total": -Infinity}, {}]'):
        row = make(1, body=body)
        only = tables.rows().filter(pk=row.pk)
        [line] = export.export(only, sight=lambda _: "redacted")
        document = json.loads(line, parse_constant=pytest.fail)
        assert document["payload"] is None
        assert "redacted payload is not valid JSON" in document["problem"]


@ONE
@pytest.mark.parametrize("hook", [f"{__name__}.odd", "no.where"])
def test_a_hook_that_fails_hides_the_payload(billing: Any, hook: str) -> None:
    make()
    billing.AMQP_EVENTS = {**billing.AMQP_EVENTS, "REDACT": hook}
    [line] = exported(raw=False)
    assert json.loads(line)["payload"] is None
    assert "redact" in json.loads(line)["problem"]


# -- the command ----------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str, str]:
    return run_command("events_archive", *arguments)


def test_filters_of_an_export() -> None:
    for number, state in enumerate((State.ARCHIVED, State.SUCCEEDED, State.ARCHIVED)):
        make(number, state=state, handler="book" if number == 2 else "send_invoice")
    for filters, count in (
        (["--state", "succeeded"], 1),
        (["--handler", "book"], 1),
        (["--state", "archived", "--event", "shop.order.created"], 2),
        (["--since", "1h"], 0),
        (["--reason", "exhausted", "--until", "2026-03-01T12:30:16.5+00:00"], 2),
    ):
        code, out, err = command("export", *filters)
        assert (code, len(out.splitlines())) == (0, count), filters
        assert f"{count} event" in err


@ONE
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["index", "--raw"], "index takes only filters"),
        (["index", "--since", "1d", "--until", "2d"], "--since is not before --until"),
        (["export", "--handler", "typo"], "there is no handler 'typo' and no"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str) -> None:
    code, _, err = command(*arguments)
    assert (code, text in err) == (2, True), err


@ONE
def test_export_redacts_by_default(billing: Any) -> None:
    row = make()
    billing.AMQP_EVENTS = {**billing.AMQP_EVENTS, "REDACT": f"{__name__}.redact"}
    code, out, err = command("export")
    assert (code, err) == (0, "1 event exported, redacted\n")
    assert json.loads(out)["payload"] == {"card": "***", "name": "Grüße"}
    with CaptureQueriesContext(connections[tables.database()]) as few:
        exported(raw=False)
    for number in range(2, 9):
        archive_rows.add_revision(row, number)
    with CaptureQueriesContext(connections[tables.database()]) as many:
        exported(raw=False)
    assert len(many) == len(few)
    code, out, err = command("export", "--raw")
    assert (code, err) == (0, "1 event exported\n")
    assert "body" in json.loads(out)["event"]


@ONE
def test_an_export_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    make(1)
    make(2)
    real = export.export

    def interrupted(*args: Any, **options: Any) -> Any:
        for line in real(*args, **options):
            yield line
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(export, "export", interrupted)
    code, out, err = command("export")
    assert (code, len(out.splitlines())) == (1, 1)
    assert "1 event exported; stopped" in err
