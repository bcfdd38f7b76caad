"""Search values: what is stored of a payload, and which events a search finds."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest
from django.db import connections

from django_amqp_events.archive import (
    replay,
    search_values,
    selection,
    tables,
)
from django_amqp_events.archive.selection import SearchTerm, Selection
from django_amqp_events.databases import user_code
from django_amqp_events.models import ArchivedEvent, ReplayBatch, SearchValue
from tests import archive_rows
from tests.commands import run_command
from tests.conftest import ONE, Database
from tests.doubles.broker import Broker
from tests.integration.archiving import archived, received, store, taken
from tests.services import BILLING

pytestmark = pytest.mark.usefixtures("archive_database")
#: Of what no database has a part in.

PAID = "shop.order.paid"
SETTINGS: dict[str, Any] = {
    **BILLING,
    "EDITING": True,
    "MAX_BODY": 100_000,
    "EVENTS": {
        PAID: {
            "SEARCH": ["order_id", "customer.email", "lines.sku", "tags", "paid", "total", "note"]
        },
    },
}


@pytest.fixture(autouse=True)
def billing(archive_database: Database, settings: Any) -> Any:
    settings.AMQP_EVENTS = SETTINGS
    return settings


def body_of(payload: Any) -> bytes:
    return json.dumps([[], payload, {}]).encode()


def make(number: int = 1, payload: Any = None, **fields: Any) -> ArchivedEvent:
    """Store an event as the mirror does."""
    fields.setdefault("body", body_of({"order_id": number} if payload is None else payload))
    row = archive_rows.make(number, **{"name": PAID, **fields})
    search_values.store(search_values.in_event(row), using=tables.database())
    return row


def values(row: ArchivedEvent | None = None) -> set[tuple[str, str]]:
    found = SearchValue.objects.all() if row is None else row.search_values.all()
    return set(found.values_list("path", "value"))


def found(*search: str, **more: Any) -> set[UUID]:
    wanted = Selection(search=search, state=None, **more)
    return set(wanted.queryset().values_list("pk", flat=True))


def boxed(text: str) -> set[UUID]:
    term = SearchTerm.parse_any(text)
    wanted = selection.matching([term] if term is not None else [], tables.database())
    return set(tables.rows().filter(wanted).values_list("pk", flat=True))


# -- what is stored -----------------------------------------------------------------------


def test_the_mirror_stores_the_values_of_a_new_event() -> None:
    message = received("1", name=PAID, payload={"order_id": 17, "customer": {"email": "ann@x.org"}})
    store([taken(archived(message))])
    store([taken(archived(message))])
    row = ArchivedEvent.objects.get()
    assert values(row) == {("order_id", "17"), ("customer.email", "ann@x.org")}


def test_scalars_are_text_and_lists_stand_for_their_elements() -> None:
    row = make(
        payload={
            "order_id": [1, 2, [3, "4"]],
            "customer": [{"email": "a@x"}, {"email": " b@x "}, {"phone": "5"}],
            "lines": [{"sku": "S1", "count": 2}, {"sku": "S1"}, {"sku": None}, "S9"],
            "tags": [],
            "paid": True,
            "total": 12.5,
            "note": {"text": "an object is not a value"},
        }
    )
    assert values(row) == {
        *(("order_id", each) for each in "1234"),
        ("customer.email", "a@x"),
        ("customer.email", "b@x"),
        ("lines.sku", "S1"),
        ("paid", "true"),
        ("total", "12.5"),
    }


@ONE
@pytest.mark.parametrize(
    "fields",
    [
        {"body": b"{nonsense"},
        {"body": b"[[17], {}, {}]"},
        {"body": body_of({"customer": "not an object", "note": None, "tags": ""})},
        {"name": "shop.order.created"},
        {"body": body_of({"order_id": 17, "note": "x" * 100_000})},
        {"content_encoding": "gzip"},
    ],
)
def test_an_event_without_values_is_stored_without_any(fields: dict[str, Any]) -> None:
    make(17, **fields)
    assert values() == set()


@ONE
def test_a_list_has_a_bounded_number_of_values() -> None:
    row = make(payload={"tags": [f"tag-{n}" for n in range(1_000)]})
    assert len(values(row)) == search_values.VALUES_PER_PATH


def test_text_that_a_database_refuses_is_found_all_the_same() -> None:
    row = make(payload={"note": "a\0b\ud800c"})
    assert found("note=a\0b\ud800c") == {row.pk}


def test_long_values_are_cut_and_found_by_their_start() -> None:
    long = "x" * 300
    one, other = make(1, {"note": long + "1"}), make(2, {"note": long + "2"})
    short = make(3, {"note": "x" * 255})
    assert found(f"note={long}1") == found(f"note={long}") == {one.pk, other.pk}
    assert found(f"note={'x' * 255}") == {short.pk}
    for start in (200, 254, 300):
        assert found(f"note={'x' * start}*") == {one.pk, other.pk, short.pk}


def mask(name: str, payload: dict[str, Any]) -> dict[str, Any]:
    if "broken" in payload:
        raise RuntimeError("it cannot redact this")
    customer = {**payload.get("customer", {}), "email": "***"}
    return {**payload, "customer": customer, "tags": payload.get("tags", [])[1:]}


@ONE
def test_what_is_redacted_is_not_stored(billing: Any) -> None:
    billing.AMQP_EVENTS = {**SETTINGS, "REDACT": f"{__name__}.mask"}
    make(1, {"order_id": 1, "customer": {"email": "ann@example.org"}, "tags": ["secret", "open"]})
    assert values() == {("order_id", "1"), ("tags", "open")}
    make(2, {"order_id": 2, "broken": True})
    assert len(values()) == 2


#: How many savepoints were open when the hook was called.
DEPTHS: list[int] = []


def depth() -> int:
    return len(connections[tables.database()].savepoint_ids)


def query(name: str, payload: dict[str, Any]) -> dict[str, Any]:
    DEPTHS.append(depth())
    with connections[tables.database()].cursor() as cursor:
        cursor.execute("SELECT * FROM nowhere")
    return payload


def test_a_hook_whose_query_fails_keeps_no_event_out(billing: Any) -> None:
    """On PostgreSQL it breaks the present transaction. No row is locked for it."""
    billing.AMQP_EVENTS = {**SETTINGS, "REDACT": f"{__name__}.query"}
    DEPTHS.clear()
    message = taken(archived(received(name=PAID)))
    store([message])
    assert (tables.rows().count(), values()) == (1, set())
    store([message])
    with user_code():
        assert [depth()] == DEPTHS, "it is not called again for what is stored"


@ONE
def test_an_edited_payload_adds_its_values(broker: Broker) -> None:
    row = make(17, handler="send_invoice")
    report = replay.edit(row.pk, row.version, {"order_id": 71}, by="ada", reason="typing error")
    assert report.published == [row.pk]
    assert values(row) == {("order_id", "17"), ("order_id", "71")}
    SearchValue.objects.all().delete()
    assert tables.repair(Selection(state=None).queryset(), search_values.correct).changed == 1
    assert values(row) == {("order_id", "17"), ("order_id", "71")}


# -- which events are found ---------------------------------------------------------------


def test_exact_values_and_starts_are_found() -> None:
    one, other = make(17), make(170)
    ann = make(3, {"customer": {"email": "ann@example.org"}})
    assert found("order_id=17") == {one.pk}
    assert found("order_id=17*") == {one.pk, other.pk}
    assert found("customer.email=ann@*") == {ann.pk}
    assert found("customer.email=*") == {ann.pk}
    assert found("customer.email=17") == set()
    assert found("order_id=1%") == found("order_id=1_0") == set()


def test_terms_of_one_path_are_alternatives_and_paths_must_all_match() -> None:
    one = make(1, {"order_id": 1, "note": "late"})
    other = make(2, {"order_id": 2, "note": "late"})
    make(3, {"order_id": 1, "note": "early"})
    assert found("order_id=1", "order_id=2", "note=late") == {one.pk, other.pk}
    assert found("order_id=1", "note=late") == {one.pk}
    assert found("order_id=1", "note=late", handlers=["book"]) == set()


def test_a_search_that_finds_many_finds_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FEW_VALUES", 3)
    rows = {make(number).pk for number in (17, 171, 172, 173, 174)}
    make(18)
    assert found("order_id=17*") == rows
    assert boxed("17*") == rows


@ONE
@pytest.mark.parametrize(
    "text", ["", "17", "order_id", "order_id=", "=17", "order id=17", "a..b=1"]
)
def test_what_is_not_a_search_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a search"):
        SearchTerm.parse(text)


def test_a_person_types_a_value_alone_or_with_its_path() -> None:
    row, other = make(17, {"order_id": 17, "note": "x=y"}), make(2, {"order_id": 2, "note": "17"})
    assert boxed("17") == {row.pk, other.pk}
    assert boxed(" order_id=17 ") == {row.pk}
    assert boxed("x=y") == {row.pk}
    assert boxed("note=x=y") == {row.pk}
    assert boxed("1*") == {row.pk, other.pk}
    assert boxed("*") == boxed("") == boxed("**") == set()


# -- commands -----------------------------------------------------------------------------


def test_index_stores_what_is_missing_and_deletes_what_is_outdated(billing: Any) -> None:
    rows = [make(number) for number in range(5)]
    foreign = make(9, service="shop")
    SearchValue.objects.filter(event=rows[0]).delete()
    SearchValue.objects.filter(event=rows[1]).update(value="wrong")
    SearchValue.objects.filter(event=foreign).update(value="kept")
    code, out, _ = run_command("events_archive", "index")
    assert (code, out.strip()) == (0, "5 events examined, 2 changed")
    assert values() == {("order_id", "kept"), *(("order_id", str(n)) for n in range(5))}
    billing.AMQP_EVENTS = {**SETTINGS, "EVENTS": {}}
    code, out, _ = run_command("events_archive", "index")
    assert (code, out.strip()) == (0, "5 events examined, 5 changed")
    assert values() == {("order_id", "kept")}


def test_a_stopped_index_keeps_what_it_has_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        make(number)
    SearchValue.objects.all().delete()
    monkeypatch.setattr(tables, "CHUNK", 1)
    answers = iter([False, False, True])
    done = tables.repair(
        Selection(state=None).queryset(), search_values.correct, stop=lambda: next(answers)
    )
    assert (done.seen, done.stopped) == (2, True)
    code, out, _ = run_command("events_archive", "index")
    assert (code, out.strip()) == (0, "4 events examined, 2 changed")
    assert len(values()) == 4


@ONE
def test_commands_match_by_value(broker: Broker) -> None:
    row = make(17)
    make(18)
    asked = ("--background", "--match", "order_id=17", "--comment", "fixed")
    assert run_command("events_replay", *asked)[0] == 0
    batch = ReplayBatch.objects.get()
    # The title does not contain the value.
    assert (batch.total, str(batch.title)) == (1, "All with a value of order_id")
    code, out, _ = run_command("events_archive", "export", "--match", "order_id=17")
    assert code == 0
    assert [json.loads(line)["event"]["id"] for line in out.splitlines()] == [str(row.pk)]
    code, out, _ = run_command("events_replay", "--match", "order_id=17", "--match", "order_id=9")
    assert (code, out.strip()) == (0, "1 of 1 event published")
    assert [message.event_id for message in broker.messages] == ["order-17"]


@ONE
def test_commands_refuse_a_search_that_finds_nothing_ever() -> None:
    code, _, err = run_command("events_replay", "--match", "orders_id=17")
    assert code == 2
    assert "no event has 'orders_id' in its SEARCH; did you mean 'order_id'?" in err
