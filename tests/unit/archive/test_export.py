"""Archived events out and in again: nothing is lost, nothing is overwritten, nothing published."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connections
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext

from django_amqp_events.archive import export, tables
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.management import base
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    ArchivedFailure,
    Replay,
    Revision,
    SearchValue,
    State,
)
from django_amqp_events.publish import publisher
from tests import archive_rows
from tests.commands import run_command
from tests.conftest import Database

NOW = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
MODELS: tuple[Any, ...] = (
    SearchValue, ArchiveAction, ArchivedFailure, Replay, Revision, ArchivedEvent,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("archive_database")
#: Of what no database has a part in.
ONE = pytest.mark.parametrize("archive_database", ["sqlite"], indirect=True)


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
        "claim": uuid4(),
        "body": b'[[], {"card": "card-41", "name": "Gr\xc3\xbc\xc3\x9fe"}, {}]',
        "headers_raw": ArchivedEvent.pack_headers({"a": 1, "b": b"\0\xff"}),
    }
    row = archive_rows.make(number, state, at=NOW, **{**values, **fields})
    revision = Revision.objects.create(
        id=uuid4(), event=row, number=1, body=b'[[],{"card":"card-42"},{}]', by="ada", at=NOW,
        reason="wrong card",
    )  # fmt: skip
    replay = Replay.objects.create(
        id=uuid4(), event=row, number=1, revision=revision, handler="send_invoice",
        state="failed", requested_at=NOW, requested_by="ada", publishes=1,
    )  # fmt: skip
    for each in (None, replay):
        ArchivedFailure.objects.create(
            id=uuid4(), event=row, replay=each, reason="failed", failed_at=NOW, mirrored_at=NOW,
            document=json.dumps({"traceback": "Traceback\n…"}),
        )  # fmt: skip
    failure_groups.group_ungrouped()
    row.refresh_from_db()
    for action in ("discard", "restore", "edit"):
        ArchiveAction.objects.create(
            event=row, at=NOW, action=action, by="ada", reason=f"to {action}", group=row.group,
            replay=replay if action == "edit" else None,
        )  # fmt: skip
    return row


def everything() -> dict[str, list[dict[str, Any]]]:
    """Return all columns of all rows but the numbers that a database gives."""
    return {
        model.__name__: [
            {
                key: bytes(value) if isinstance(value, memoryview) else value
                for key, value in row.items()
                if not (model in (ArchiveAction, SearchValue) and key == "id")
            }
            for row in model.objects.order_by(
                *([] if model is ArchivedEvent else ["event_id"]), "pk"
            ).values()
        ]
        for model in MODELS
    }


def wipe() -> None:
    for model in MODELS:
        QuerySet(model).using(tables.database())._raw_delete(tables.database())


def exported(*, raw: bool = True) -> list[str]:
    return list(export.export(tables.rows(), sight=lambda _: "raw" if raw else "redacted"))


def refused(lines: Iterable[str]) -> list[str]:
    return [each.why for each in export.import_events(lines).refused]


def changed(line: str, **event: Any) -> str:
    document = json.loads(line)
    document["event"].update(event)
    return json.dumps(document)


# -- round trip -----------------------------------------------------------------------------


def test_export_round_trips() -> None:
    for number in range(5):
        make(number, body=bytes(range(256)) if number == 3 else b"[]")
    make(6, state=State.SUCCEEDED, published_at=None, claim=None)
    cloudevents = "application/cloudevents+json; charset=utf-8"
    make(7, content_type=cloudevents, content_encoding="latin-1")
    before = everything()
    lines = exported()
    assert len(lines) == 7
    assert all(line.isascii() and line.endswith("}\n") for line in lines)
    wipe()
    done = export.import_events(lines)
    assert (done.events, done.known, done.refused) == (7, 0, [])
    # The decisions of one moment are in their order, too.
    assert everything() == before
    # Once more is no mistake.
    done = export.import_events(lines)
    assert (done.events, done.known, done.refused) == (0, 7, [])
    assert everything() == before
    assert exported() == lines


@ONE
def test_an_export_reads_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "CHUNK", 3)
    monkeypatch.setattr(export, "CHUNK_BYTES", 10)
    rows = {make(number, body=b"x" * 6).pk for number in range(8)}
    found = [UUID(json.loads(line)["event"]["id"]) for line in exported()]
    assert found == sorted(found)
    assert set(found) == rows


# -- what is not taken ----------------------------------------------------------------------


def test_conflicting_row_is_kept() -> None:
    row = make()
    [line] = exported()
    ArchivedEvent.objects.filter(pk=row.pk).update(state="succeeded", version=8)
    before = everything()
    assert refused([line]) == ["it exists with other content: state, version"]
    assert everything() == before
    ArchivedEvent.objects.filter(pk=row.pk).update(state="archived", version=7)
    ArchiveAction.objects.create(event=row, at=NOW, action="discard")
    assert refused([line]) == ["it exists with other content: actions"]


@ONE
def test_replaying_event_is_not_imported() -> None:
    make(state=State.QUEUED)
    lines = exported()
    wipe()
    [why] = refused(lines)
    assert "the mirror would publish it again" in why
    assert not ArchivedEvent.objects.exists()


def test_a_line_that_is_wrong_leaves_the_others() -> None:
    make(1)
    make(2)
    good, other = exported()
    document = json.loads(good)
    wipe()
    replay = document["replays"][0]
    wrong = [
        "{",
        "[]",
        "[" * 100_000,
        json.dumps({**document, "version": 2}),
        json.dumps({**document, "kind": "outbox"}),
        json.dumps({**document, "redacted": True}),
        json.dumps({**document, "failures": 1}),
        json.dumps({**document, "event": {}}),
        changed(good, state="lost"),
        changed(good, body="=!"),
        changed(good, body_size=1),
        changed(good, id="x"),
        changed(good, service=None),
        changed(good, service={"a": 1}),
        changed(good, handler="x" * 256),
        changed(good, published_at="yesterday"),
        changed(good, published_at="2026-01-01T00:00:00"),
        changed(good, published_at="0001-01-01T00:00:00+00:00"),
        changed(good, last_failed_at="9999-12-31T23:59:59+00:00"),
        changed(good, version=-5),
        changed(good, version=2**80),
        changed(good, name="a\0b"),
        changed(good, name="a\ud800b"),
        good.replace("order-", "order-\udcff"),
        changed(good, id="\ud800"),
        changed(good, headers_raw="AAAAAQ=="),
        changed(good, surplus=1),
        changed(good, group=None),
        json.dumps({**document, "replays": [{**replay, "state": "lost"}]}),
        json.dumps({**document, "replays": [{**replay, "revision": str(uuid4())}]}),
        json.dumps({**document, "replays": [replay, replay]}),
        json.dumps({**document, "replays": []}),
    ]
    done = export.import_events([*wrong, "\n", other])
    assert [each.line for each in done.refused] == list(range(1, len(wrong) + 1))
    assert done.events == 1
    assert [str(pk) for pk in ArchivedEvent.objects.values_list("pk", flat=True)] == [
        json.loads(other)["event"]["id"]
    ]
    assert Replay.objects.count() == 1


@pytest.mark.parametrize("archive_database", ["mariadb"], indirect=True)
def test_failures_larger_than_one_statement_may_be() -> None:
    make(1)
    document = json.loads(exported()[0])
    wipe()
    failure, *_ = document["failures"]
    document["failures"] = [
        {**failure, "id": str(uuid4()), "document": "x" * 1_000_000} for _ in range(20)
    ]
    done = export.import_events([json.dumps(document)])
    assert (done.events, done.refused) == (1, [])
    assert ArchivedFailure.objects.count() == 20


def test_parts_of_another_event_are_not_taken_over() -> None:
    make(1)
    [line] = exported()
    document = json.loads(line)
    document["event"]["id"] = str(uuid4())
    [why] = refused([json.dumps(document)])
    assert "the database refuses it (IntegrityError" in why
    assert ArchivedEvent.objects.count() == 1


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
        wipe()
        make(1, body=body)
        document = json.loads(exported(raw=False)[0], parse_constant=pytest.fail)
        assert document["payload"] is None
        assert "the result of the redaction hook is not valid JSON" in document["problem"]
    wipe()
    assert (
        refused(lines)
        == ["it was exported without its body, which is redacted; export it with --raw"] * 2
    )


@ONE
@pytest.mark.parametrize("hook", [f"{__name__}.odd", "no.where"])
def test_a_hook_that_fails_hides_the_payload(billing: Any, hook: str) -> None:
    make()
    billing.AMQP_EVENTS = {**billing.AMQP_EVENTS, "REDACT": hook}
    [line] = exported(raw=False)
    assert json.loads(line)["payload"] is None
    assert "redaction hook" in json.loads(line)["problem"]


# -- the command ----------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str, str]:
    return run_command("events_archive", *arguments)


def test_export_file_is_private(tmp_path: Path) -> None:
    for number, state in enumerate((State.ARCHIVED, State.SUCCEEDED, State.ARCHIVED)):
        make(number, state=state, handler="book" if number == 2 else "send_invoice")
    path = tmp_path / "files" / "events.jsonl"
    path.parent.mkdir()
    code, out, _ = command("export", "--output", str(path))
    assert (code, out) == (0, "3 events exported\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    before = everything()
    wipe()
    code, out, _ = command("import", str(path), "--dry-run")
    assert (code, out) == (0, "3 events would be imported, 0 already exist\n")
    assert not ArchivedEvent.objects.exists()
    assert command("import", str(path))[:2] == (0, "3 events imported, 0 already exist\n")
    assert everything() == before
    for filters, count in (
        (["--state", "succeeded"], 1),
        (["--handler", "book"], 1),
        (["--state", "archived", "--event", "shop.order.created"], 2),
        (["--since", "1h"], 0),
        (["--reason", "exhausted", "--until", "2026-03-01T12:30:16.5+00:00"], 2),
    ):
        code, out, err = command("export", "--output", "-", *filters)
        assert (code, len(out.splitlines())) == (0, count), filters
        assert f"{count} event" in err


@ONE
def test_stdout_has_nothing_but_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    make(1)
    make(2)
    monkeypatch.setattr(base, "PROGRESS_SECONDS", 0.0)
    code, out, err = command("export", "--output", "-")
    assert (code, out) == (0, "".join(exported()))
    assert "1 exported" in err


@ONE
def test_refused_rows_are_reported(tmp_path: Path) -> None:
    make()
    path = tmp_path / "events.jsonl"
    command("export", "--output", str(path))
    with path.open("ab") as lines:
        lines.write(b'{}\n{"kind": "\xff"}\n')
    code, out, _ = command("import", str(path))
    assert code == 1
    assert "0 events imported, 1 already exist" in out
    assert "line 2 (no event): it is not an archived event that" in out
    assert "line 3 (no event): it is not valid UTF-8" in out
    code, out, _ = command("import", str(path), "--format", "json")
    document = json.loads(out)
    assert (document["result"], document["exit_code"], document["known"]) == ("imported", 1, 1)
    assert document["refused"][0]["line"] == 2


@ONE
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["export"], "export needs --output"),
        (["export", "x"], "export takes --output FILE"),
        (["import"], "import needs the file"),
        (["import", "/no/such/file"], "No such file"),
        (["import", "x", "--handler", "book"], "import takes --dry-run and no filters"),
        (["export", "--output", "/no/such/folder/x"], "No such file"),
        (["export", "--output", "."], ".: it is a folder"),
        (["export", "--output", "-", "--since", "yesterday"], "--since: 'yesterday' is neither"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str) -> None:
    code, _, err = command(*arguments)
    assert (code, text in err) == (2, True), err


@ONE
def test_export_redacts_by_default(billing: Any, tmp_path: Path) -> None:
    row = make()
    billing.AMQP_EVENTS = {**billing.AMQP_EVENTS, "REDACT": f"{__name__}.redact"}
    path = tmp_path / "events.jsonl"
    code, out, _ = command("export", "--output", str(path))
    assert (code, out) == (0, "1 event exported, redacted\n")
    assert json.loads(path.read_text())["payload"] == {"card": "***", "name": "Grüße"}
    with CaptureQueriesContext(connections[tables.database()]) as few:
        exported(raw=False)
    for number in range(2, 9):
        Revision.objects.create(
            id=uuid4(), event_id=row.pk, number=number, body=b"[[],{},{}]", at=NOW
        )
    with CaptureQueriesContext(connections[tables.database()]) as many:
        exported(raw=False)
    assert len(many) == len(few)
    code, out, _ = command("export", "--output", str(path), "--raw", "--format", "json")
    assert (code, json.loads(out)["redacted"]) == (0, False)
    assert "body" in json.loads(path.read_text())["event"]


@ONE
def test_interrupted_export_is_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(1)
    make(2)
    real = export.export

    def interrupted(*args: Any, **options: Any) -> Any:
        for line in real(*args, **options):
            yield line
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(export, "export", interrupted)
    path = tmp_path / "events.jsonl"
    code, out, _ = command("export", "--output", str(path))
    assert code == 1
    assert "1 event exported; stopped, the incomplete export is in " in out
    assert not path.exists()
    assert len(path.with_name("events.jsonl.part").read_text().splitlines()) == 1
