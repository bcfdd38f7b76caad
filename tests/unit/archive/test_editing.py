"""Edited payloads: refused, published, concurrent and recorded edits."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from django_amqp_events import event
from django_amqp_events.archive import editing, eligibility, replay, states
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.exceptions import (
    InvalidEditError,
    PublishTimeoutError,
    UnroutableError,
)
from django_amqp_events.message import headers
from django_amqp_events.message.decoding import decode
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    Replay,
    Revision,
    State,
)
from django_amqp_events.reasons import Reason
from tests import archive_rows
from tests.archive_rows import NOW, again
from tests.conftest import ONE, Database
from tests.doubles.broker import Broker
from tests.event_messages import delivered

BODY = b'[[], {"order_id":  7, "country": "XX"}, {}]'

pytestmark = pytest.mark.usefixtures("archive_database", "broker")


def handle(order_id: int, country: str = "DE", **_: Any) -> None:
    """Handles anything that has an order."""


def fixed(order_id: int, country: str) -> None:
    """Accepts two arguments."""


def contract(order_id: int, country: str = "DE") -> None:
    if country == "XX":
        raise ValueError("there is no such country")


def careful(order_id: int, total: Decimal = Decimal(0)) -> None:
    assert isinstance(total, Decimal), "a Decimal"


SETTINGS: dict[str, Any] = {
    "SERVICE": "billing",
    "AUTODISCOVER": [],
    "MAX_BODY": 1000,
    "EDITING": True,
    "EVENTS": {
        "shop.order.paid": {"CONTRACT": f"{__name__}.contract"},
        "shop.order.shipped": {"CONTRACT": f"{__name__}.careful"},
    },
    "HANDLERS": {
        "send_invoice": {"EVENTS": ["shop.order.*"], "HANDLER": f"{__name__}.handle"},
        "strict": {"EVENTS": ["shop.#"], "HANDLER": f"{__name__}.fixed", "STRICT": True},
        "loose": {"EVENTS": ["shop.#"], "HANDLER": f"{__name__}.fixed"},
        "once": {"EVENTS": ["shop.#"], "HANDLER": f"{__name__}.handle", "ONCE": True},
    },
}


@pytest.fixture(autouse=True)
def billing(archive_database: Database, settings: Any) -> Any:
    settings.AMQP_EVENTS = SETTINGS
    return settings


def make(body: bytes = BODY, **fields: Any) -> ArchivedEvent:
    headers_raw = ArchivedEvent.pack_headers({"traceparent": "00-1"})
    values = {"body": body, "headers_raw": headers_raw, "correlation_id": "basket-5"}
    return archive_rows.make(**{**values, "published_at": NOW, **fields})


def edit(row: ArchivedEvent, payload: Any = None, **more: Any) -> replay.Report:
    given = {"order_id": 7, "country": "FR"} if payload is None else payload
    options = {"by": "ada", "reason": "no such country", **more}
    return replay.edit(row.pk, options.pop("version", row.version), given, **options)


def draft(row: ArchivedEvent, payload: Any, handler: str = "send_invoice") -> editing.Draft:
    return editing.draft(row, get_registry().handlers[handler], payload)


def problems(row: ArchivedEvent, payload: Any, handler: str = "send_invoice") -> str:
    with pytest.raises(InvalidEditError) as raised:
        draft(row, payload, handler)
    return " | ".join(map(str, raised.value.problems))


# -- what is written ------------------------------------------------------------------------


@ONE
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "This is not valid JSON: Expecting value, in line 1, column 1."),
        ('{\n "a": 1,\n}', "in line 2"),
        ("[1]", "The payload must be a JSON object"),
        ('"x"', "The payload must be a JSON object"),
        ("null", "The payload must be a JSON object"),
        ('{"a": 1, "a": 2}', "The name 'a' appears twice"),
        ('{"b": {"a": 1, "a": 2}}', "The name 'a' appears twice"),
        ('{"a": NaN}', "NaN is not valid JSON"),
        ('{"a": -Infinity}', "-Infinity is not valid JSON"),
        ('{"a": ' + "[" * 100_000 + "}", "This is not valid JSON"),
        ('{"a": ' + "9" * 5_000 + "}", "This is not valid JSON"),
    ],
    ids=range(11),
)  # fmt: skip
def test_invalid_payload_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidEditError) as raised:
        editing.parse(text)
    assert why in str(raised.value) or (why == "in line 2" and "line 3" in str(raised.value))


@ONE
@pytest.mark.parametrize(
    ("payload", "handler", "why"),
    [
        ({"country": "FR"}, "send_invoice", "missing a required argument: 'order_id'"),
        ({"order_id": 7, "country": "FR", "x": 1}, "strict", "unexpected keyword argument 'x'"),
        ({"order_id": 7, "country": "x" * 1000}, "send_invoice", "more than MAX_BODY (1000)"),
        ({"order_id": "\ud800"}, "send_invoice", "cannot be written as JSON"),
        ({"order_id": float("inf")}, "send_invoice", "cannot be written as JSON"),
        ({"order_id": json.loads("[" * 300 + "]" * 300)}, "loose", "nested deeper than 200"),
    ],
    ids=range(6),
)  # fmt: skip
def test_a_payload_that_cannot_be_handled_is_refused(payload: Any, handler: str, why: str) -> None:
    assert why in problems(make(), payload, handler)


@ONE
def test_contract_validates_an_edit() -> None:
    row = make(b'[[], {"order_id": 7}, {}]', name="shop.order.paid")
    why = "The event's contract rejects it: ValueError: there is no such country."
    assert why in problems(row, {"order_id": 7, "country": "XX"})
    assert "does not match its contract" in problems(row, {"order_id": 7, "county": "FR"})
    assert draft(row, {"order_id": 8, "country": "FR"}).notes == ()


@ONE
def test_contract_with_python_types_allows_editing() -> None:
    row = make(b'[[], {"order_id": 7, "total": "1.50"}, {}]', name="shop.order.shipped")
    [note] = draft(row, {"order_id": 7, "total": "1.60"}).notes
    assert note.code == "contract-own"
    assert "AssertionError: a Decimal" in str(note)


@ONE
def test_hints_that_are_enforced_validate_an_edit(settings: Any) -> None:
    events = {"shop.order.shipped": {"CONTRACT": f"{__name__}.careful", "VALIDATE": True}}
    row = make(b'[[], {"order_id": 7, "total": "x"}, {}]', name="shop.order.shipped")
    settings.AMQP_EVENTS = SETTINGS | {"EVENTS": events}
    assert "total: Input should be a valid decimal" in problems(row, {"order_id": 7, "total": "y"})
    edited = draft(row, {"order_id": 7, "total": "1.60"})
    assert (edited.body, edited.notes) == (b'[[],{"order_id":7,"total":"1.60"},{}]', ())
    loose = {**SETTINGS["HANDLERS"]["loose"], "VALIDATE": True}
    settings.AMQP_EVENTS = SETTINGS | {"HANDLERS": {"loose": loose}}
    wrong = problems(row, {"order_id": "y", "country": "FR"}, "loose")
    assert "hints of handler 'loose': order_id: Input should be a valid integer" in wrong


@ONE
def test_an_older_version_is_upcast_for_the_check(settings: Any) -> None:
    newer = event("shop.order.v2")(fixed)

    @newer.upcast_from("shop.order.paid")
    def with_country(payload: dict[str, Any]) -> dict[str, Any]:
        return {"order_id": payload["id"], "country": "DE"}

    handlers = {"loose": {"EVENTS": ["shop.order.v2"], "HANDLER": f"{__name__}.fixed"}}
    settings.AMQP_EVENTS = SETTINGS | {"HANDLERS": handlers, "EVENTS": {"shop.order.paid": {}}}
    row = make(b'[[], {"id": 7}, {}]', name="shop.order.paid", handler="loose")
    assert draft(row, {"id": 8}, "loose").notes == ()
    assert "with_country failed" in problems(row, {"order_id": 8}, "loose")


@ONE
def test_ignored_keys_are_named() -> None:
    [note] = draft(make(), {"order_id": 7, "country": "FR", "contry": "FR"}, "loose").notes
    assert note == Reason("not-taken", handler="'loose'", names="'contry'")


@ONE
def test_values_without_a_name_stay() -> None:
    row = make(b'[[7], {"country": "XX"}, {}]')
    assert draft(row, {"country": "FR"}).body == b'[[7],{"country":"FR"},{}]'


# -- what is published ----------------------------------------------------------------------


def test_an_edited_replay_is_the_event_with_another_body(broker: Broker) -> None:
    row = make()
    report = edit(row)
    assert (report.published, report.skipped, report.returned) == ([row.pk], [], [])
    now = again(row)
    assert (now.state, now.version, now.replays) == (State.REPLAYING, 2, 1)
    assert bytes(now.body) == BODY
    [message] = broker.messages
    assert message.body == b'[[],{"order_id":7,"country":"FR"},{}]'
    made = Replay.objects.get()
    for key, value in {
        headers.EVENT_ID: "order-1",
        headers.EVENT_NAME: "shop.order.created",
        headers.EVENT_SERVICE: "shop",
        headers.EVENT_CORRELATION_ID: "basket-5",
        headers.EVENT_PUBLISHED_AT: "2026-03-01T12:00:00.000000Z",
        headers.EVENT_REPLAY_ID: str(made.pk),
        headers.EVENT_HANDLER: "send_invoice",
        "traceparent": "00-1",
    }.items():
        assert message.headers[key] == value, key
    assert (message.exchange, message.routing_key) == ("billing:replay", "billing.send_invoice")
    revision = Revision.objects.get()
    assert made.revision == revision
    assert (revision.number, revision.by) == (1, "ada")
    assert revision.reason == "no such country"
    assert bytes(revision.body) == message.body
    assert revision.payload == {"order_id": 7, "country": "FR"}
    action = ArchiveAction.objects.get()
    assert (action.action, action.by, action.replay_id) == ("edit", "ada", made.pk)


CLOUD = b'{"specversion": "1.0", "subject": "x", "data": {"order_id": 7}}'


@ONE
@pytest.mark.parametrize(
    ("body", "content_type", "content_encoding", "headers_"),
    [
        (b'{"order_id": 7}', "application/json", "utf-8", {}),
        (b'{"order_id": 7}', "application/json", "utf-8", {"ce-specversion": "1.0"}),
        (CLOUD, "application/cloudevents+json", "utf-8", {}),
        # What makes the event malformed may be its properties; an edit writes JSON in UTF-8.
        (CLOUD, "text/html", "utf-8", {"ce-specversion": "1.0"}),
        (CLOUD, "application/json", "latin-1", {}),
        (CLOUD, "application/json", "latin-1", {"ce-specversion": "1.0"}),
        (CLOUD, "application/cloudevents+json", "gzip", {}),
    ],
)
def test_an_edit_keeps_the_format_and_is_readable(
    broker: Broker, body: bytes, content_type: str, content_encoding: str, headers_: Any
) -> None:
    readable = content_type != "text/html" and content_encoding == "utf-8"
    row = make(
        body,
        reason="exhausted" if readable else "malformed",
        content_type=content_type,
        content_encoding=content_encoding,
        headers_raw=ArchivedEvent.pack_headers(headers_),
    )
    assert isinstance(eligibility.target(row), Reason) is not readable
    assert edit(row).published == [row.pk]
    [message] = broker.messages
    assert decode(delivered(message, ""), 1_000).kwargs == {"order_id": 7, "country": "FR"}
    assert Revision.objects.get().payload == {"order_id": 7, "country": "FR"}
    if readable:
        assert message.properties["content_type"] == content_type
        assert "task" not in message.headers
        assert (b'"subject": "x"' in message.body or b'"subject":"x"' in message.body) is (
            body == CLOUD
        )


def test_editing_starts_from_the_last_revision(broker: Broker) -> None:
    row = make()
    broker.errors = [UnroutableError("nobody is bound")]
    report = edit(row)
    assert [str(each.why) for each in report.returned] == ["nobody is bound"]
    # The same once more is no mistake: it was not published.
    assert edit(again(row)).published == [row.pk]
    revisions = list(Revision.objects.all())
    assert [each.number for each in revisions] == [1, 2]
    # What was not published has no number.
    assert {each.revision: each.number for each in Replay.objects.all()} == {
        revisions[0]: None, revisions[1]: 1,
    }  # fmt: skip
    # As it was published is as it was published.
    failed(row)
    assert replay.replay(seen(row), by="bob").published == [row.pk]
    assert broker.messages[-1].body == BODY
    assert Replay.objects.get(number=2).revision is None


def seen(row: ArchivedEvent) -> dict[Any, int]:
    return {row.pk: again(row).version}


def failed(row: ArchivedEvent) -> None:
    """It failed again, as the mirror notes it."""
    now = again(row)
    replay_ = Replay.objects.get(event=row, number=now.replays)
    states.failed_again({replay_.pk: NOW}, now=NOW)
    ArchivedEvent.objects.filter(pk=row.pk).update(state="archived", version=now.version + 1)


def test_interrupted_edit_is_published_as_edited(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, plain = make(), make(event_id="order-2")

    class Killed(BaseException):
        pass

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(replay, "publish_claimed", die)
        with pytest.raises(Killed):
            edit(row)
        with pytest.raises(Killed):
            replay.replay(seen(plain), by="bob")
    assert not broker.messages
    assert again(row).state == State.QUEUED
    assert replay.resume(lease=-1) == 2
    bodies = {each.headers[headers.EVENT_ID]: each for each in broker.messages}
    assert bodies["order-1"].body == b'[[],{"order_id":7,"country":"FR"},{}]'
    assert bodies["order-2"].body == BODY
    made = Replay.objects.get(event=row)
    assert bodies["order-1"].headers[headers.EVENT_REPLAY_ID] == str(made.pk)
    assert (again(row).state, made.publishes) == (State.REPLAYING, 2)


@ONE
def test_unconfirmed_edit_is_published_as_edited(broker: Broker) -> None:
    """The same replay id has the same body; with a new id both could run."""
    row = make()
    broker.errors = [PublishTimeoutError("no confirm in 10 s")]
    edit(row)
    assert again(row).unconfirmed
    report = edit(again(row), {"order_id": 8})
    [skipped] = report.skipped
    assert skipped.why == Reason("unconfirmed")
    assert replay.replay(seen(row), by="bob").published == [row.pk]
    first, second = broker.messages
    assert first.body == second.body != BODY
    assert first.headers[headers.EVENT_REPLAY_ID] == second.headers[headers.EVENT_REPLAY_ID]
    assert Revision.objects.count() == 1


@ONE
def test_forced_replay_keeps_the_edited_payload(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eligibility, "OVERDUE_SECONDS", -10_000_000)
    edited, plain = make(), make(event_id="order-2")
    edit(edited)
    replay.replay(seen(plain), by="bob")
    for row in (edited, plain):
        assert replay.replay(seen(row), by="bob", force=True).published == [row.pk]
    bodies = [each.body for each in broker.messages]
    assert bodies[0] == bodies[2] != BODY
    assert bodies[1] == bodies[3] == BODY
    assert {each.revision_id for each in Replay.objects.filter(event=edited)} == {
        Revision.objects.get().pk
    }


# -- what differs ---------------------------------------------------------------------------


@ONE
def test_diff_shows_context() -> None:
    before = editing.written({**{f"k{n}": n for n in range(20)}, "country": "XX"})
    after = editing.written({**{f"k{n}": n for n in range(20)}, "country": "FR"})
    lines = editing.diff(before, after)
    assert [kind for kind, _ in lines] == [" ", " ", " ", "-", "+", " "]
    assert lines[3] == ("-", '  "country": "XX"')
    twice = editing.diff(before, after.replace('"k0"', '"K0"'))
    assert twice.count(("…", "")) == 1
    assert editing.diff(before, before) == []
    long = "\n".join(map(str, range(3 * editing.COMPARED_LINES)))
    assert ("+", "x") in editing.diff(long, f"{long}\nx")
    assert editing.diff("", "a") == [("+", "a")]
    assert editing.diff("a", "") == [("-", "a")]


@ONE
def test_a_diff_of_long_texts_ends() -> None:
    before = "\n".join(f"{n % 7}" for n in range(100_000))
    after = "\n".join(f"{n % 11}" for n in range(100_000))
    lines = editing.diff(before, after)
    assert len(lines) <= 2 * editing.COMPARED_LINES + 1
    assert lines[-1][1].endswith("more lines")
