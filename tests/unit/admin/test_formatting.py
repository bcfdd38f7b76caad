"""Untrusted documents and charts in the admin: never an error, never a wrong value."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4
from xml.etree import ElementTree as ET

import pytest
from django.utils import translation
from django.utils.formats import date_format
from django.utils.timezone import localtime
from hypothesis import example, given, settings
from hypothesis import strategies as st

from django_amqp_events.admin import action_pages, charts, formatting
from django_amqp_events.admin.charts import Chart, Layer
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    ArchivedFailure,
    Replay,
    visible,
)
from django_amqp_events.templatetags.amqp_events import (
    WORD,
    age,
    ago,
    breakable,
    code,
    line,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)

text = st.text(
    st.characters() | st.characters(categories=["Cs"]) | st.sampled_from("\0\u202e\u2066\x1b\r\n")
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
KEYS = (
    "exception", "frames", "traceback", "history", "deaths", "cut", "at", "attempt", "worker",
    "type", "message", "file", "line", "function", "module", "queue", "reason", "count",
)  # fmt: skip
shapes = st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3)
documents = st.dictionaries(
    st.sampled_from(KEYS), json_values | shapes | st.lists(shapes, max_size=3)
)


def fits_a_page(value: str) -> None:
    value.encode()
    assert visible(value) == value


def event(**more: object) -> ArchivedEvent:
    return ArchivedEvent(
        pk=uuid4(),
        mirrored_at=NOW,
        last_failed_at=NOW,
        first_failed_at=NOW,
        state_since=NOW,
        **more,
    )


@given(text)
def test_visible_text_has_nothing_hidden(value):
    fits_a_page(visible(value))
    assert "\n" not in line(value)
    assert len(visible(value, 10)) <= 10 * 10


def test_visible_text_keeps_ordinary_characters():
    plain = "Grüße, 你好, مرحبا, שלום\n\tπ ≈ 3 😀 e\u0301"
    assert visible(plain) == plain
    assert visible("a\r\nb") == "a\nb"
    assert visible("\0\x1b\u202e\ud800\U000e0041") == "\\x00\\x1b\\u202e\\ud800\\U000e0041"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (86400 * 3.5, "3 d")],
)
def test_ages(seconds, words):
    assert age(NOW - timedelta(seconds=seconds), NOW) == words


def test_a_relative_time_has_the_exact_one() -> None:
    then = NOW - timedelta(minutes=2)
    for language, words in (("en", "2 min ago"), ("de", "vor 2 min"), ("ru", "2 мин назад")):
        with translation.override(language):
            shown = ago(then, NOW)
            assert shown.endswith(f">{words}</time>"), shown
            assert f'datetime="{then.isoformat()}"' in shown
            assert date_format(localtime(then), "DATETIME_FORMAT") in shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("shop.order.created", "shop.|order.|created"),
        ("billing.send_invoice", "billing.|send_|invoice"),
        ("billing:delay.8s", "billing:|delay.|8s"),
        ("InsufficientFundsError", "Insufficient|Funds|Error"),
        ("tickets.example/BILL-1207", "tickets.|example/|BILL-1207"),
        ("ends.", "ends."),
        ("<b>.x", "&lt;b&gt;.|x"),
        ("a\u202eb", "a\\u202eb"),
        ("x" * 60, f"{'x' * 24}|{'x' * 24}|{'x' * 12}"),
        ("", ""),
    ],
)
def test_a_name_wraps_between_its_parts(name: str, shown: str) -> None:
    assert breakable(name).replace("<wbr>", "|") == shown
    assert len(breakable("x." * 500).replace("<wbr>", "")) <= WORD


def test_commands_between_backticks_are_code() -> None:
    assert code("run `manage.py x` & `y`") == ("run <code>manage.py x</code> &amp; <code>y</code>")
    assert code("`<b>`") == "<code>&lt;b&gt;</code>"
    assert code("a ` b") == "a ` b"
    assert code("``") == "``"


@settings(max_examples=80)
@given(documents.map(json.dumps) | text, text)
@example('{"history": [{"at": "9999-12-31T23:59:59-14:00"}]}', "failed")
@example('{"exception": {"type": ["x"], "message": {"a": 1}}, "frames": [{"line": null}]}', "x")
def test_no_document_breaks_its_page(document, reason):
    failure = ArchivedFailure(failed_at=NOW, mirrored_at=NOW, reason=reason, document=document)
    found = failure.about
    last = formatting.failure(event(), found)
    for value in (
        last["exception"],
        last["message"],
        last["traceback"],
        *(
            line(each.get(name))
            for each in formatting.mappings(found.get("deaths"))
            for name in ("queue", "reason", "count")
        ),
    ):
        fits_a_page(value)
    steps = formatting.timeline(event(), [failure], [], [])
    assert steps == sorted(steps, key=lambda step: step.at)
    for step in steps:
        fits_a_page(step.what + step.who + step.note)


@given(st.binary(max_size=300), st.integers(0, 100))
def test_no_body_breaks_its_page(data, more):
    found = formatting.body(data, len(data) + more)
    fits_a_page(found["text"])
    assert found["cut"] == (found["shown"] < found["size"])
    assert formatting.body(b"ok\xff\x00", 4)["text"] == "ok\\xff\\x00"


def test_frames_take_the_place_of_a_traceback_that_was_left_out():
    frame = {"file": "/srv/shop/a.py", "line": 1, "function": "a"}
    shown = formatting.failure(event(), {"traceback": "", "frames": [frame]})["traceback"]
    assert shown == '  File "/srv/shop/a.py", line 1, in a'


@settings(max_examples=40)
@given(json_values, st.integers(0, 50))
def test_pretty_is_bounded(value, limit):
    found, cut = formatting.pretty(value, limit)
    fits_a_page(found)
    assert cut or len(found) >= 1


@pytest.mark.parametrize("depth", [500, 5_000])
def test_pretty_prints_deep_and_wide_values(depth):
    deep: object = [1] * 1_000
    for _ in range(depth):
        deep = [deep]
    found, cut = formatting.pretty(deep, 10_000)
    assert cut
    assert len(found) <= 10_000


@given(st.binary(max_size=60))
def test_no_headers_break_their_page(raw):
    headers, note = formatting.headers(event(headers_raw=raw))
    fits_a_page(note)
    for each in headers:
        fits_a_page("".join(each))


@settings(max_examples=40)
@given(st.dictionaries(text, json_values, max_size=5))
def test_headers_of_any_type(found):
    row = event()
    row.headers = found
    headers, _ = formatting.headers(row)
    assert len(headers) == len(found)
    for each in headers:
        fits_a_page("".join(each))


def test_timeline_is_complete_and_ordered():
    row = event(published_at=NOW - timedelta(hours=1), source="shop")
    history = [
        {"attempt": n, "at": f"2026-03-01T11:0{n}:00Z", "worker": "w", "exception": "E"}
        for n in (1, 2)
    ]
    first = ArchivedFailure(
        failed_at=NOW - timedelta(minutes=50),
        mirrored_at=NOW,
        reason="exhausted",
        document=json.dumps({"history": history}),
    )
    made = Replay(
        pk=uuid4(),
        number=1,
        handler="send_invoice",
        requested_at=NOW + timedelta(minutes=1),
        requested_by="ada",
        published_at=NOW + timedelta(minutes=2),
        finished_at=NOW + timedelta(minutes=3),
        state=Replay.State.FAILED,
    )
    again = ArchivedFailure(
        failed_at=NOW + timedelta(minutes=3), mirrored_at=NOW, reason="failed", replay_id=made.pk
    )
    late = ArchivedFailure(
        failed_at=NOW + timedelta(minutes=9), mirrored_at=NOW, reason="failed", late=True
    )
    settled = ArchiveAction(
        at=NOW + timedelta(minutes=5), action="discard", by="bob", reason="a test"
    )
    steps = formatting.timeline(row, [first, again, late], [made], [settled])
    assert [f"{step.what} {step.who}".strip() for step in steps] == [
        "published by shop",
        "attempt 1 failed on w",
        "attempt 2 failed on w",
        "archived: exhausted",
        "mirrored into this database",
        "replay 1 requested by ada",
        "replay 1 published to send_invoice",
        "replay 1: archived: failed",
        "replay 1: failed again",
        "discarded by bob",
        "archived: failed (late, no effect)",
    ]


@given(st.dictionaries(st.uuids(), st.integers(0, 2**31 - 1), min_size=1))
def test_selection_round_trips(seen):
    assert action_pages.decode_selection(action_pages.encode_selection(seen)) == seen


@given(st.text() | st.text("0123456789abcdef:,"))
def test_nothing_else_thaws(wrong):
    found = action_pages.decode_selection(wrong)
    assert found is None or all(isinstance(pk, UUID) for pk in found)


# -- charts ----------------------------------------------------------------------------------------


SPACE = "{http://www.w3.org/2000/svg}"


def read(chart: Chart) -> ET.Element:
    """The chart as XML; it has what a screen reader wants, and no style."""
    root = ET.fromstring(chart.svg.encode())  # noqa: S314 - ours
    assert root.get("role") == "img"
    assert root.get("aria-label")
    for each in root.iter():
        assert each.tag != f"{SPACE}style"
        for name, value in each.attrib.items():
            assert name not in {"style", "fill", "stroke"}
            assert not name.startswith("on")
            if name in {"x", "y", "width", "height"}:
                assert float(value) >= 0
    return root


def texts(root: ET.Element, tag: str = "text") -> list[str]:
    return [each.text or "" for each in root.iter(f"{SPACE}{tag}")]


def bars(layers: list[Layer], labels: list[str]) -> Chart:
    return charts.bars("Per hour", labels, layers, of="Hour")


def test_bars_are_stacked_and_labelled() -> None:
    chart = bars([("a", "archived", [3, 0]), ("b", "succeeded", [1, 0])], ["<10>", "11"])
    root = read(chart)
    first, last = root.iter(f"{SPACE}rect")
    assert (first.get("class"), last.get("class")) == ("a", "b")
    heights = [float(each.get("height", "")) for each in (first, last)]
    assert heights[0] == pytest.approx(3 * heights[1], rel=0.01)
    bottom = float(last.get("y", "")) + heights[1]
    assert bottom == pytest.approx(float(first.get("y", "")), abs=0.15)
    assert "<10>: archived 3, succeeded 1" in texts(root, "title")
    assert texts(root) == ["0", "4", "<10>", "11"]
    assert chart.columns == ("Hour", "archived", "succeeded")
    assert chart.rows == (("<10>", 3, 1), ("11", 0, 0))
    assert chart.legend == (("a", "archived"), ("b", "succeeded"))


@pytest.mark.parametrize(
    "chart",
    [
        bars([], []),
        bars([("a", "archived", [])], []),
        bars([("a", "archived", [0, 0])], ["1", "2"]),
    ],
)
def test_no_data_is_no_chart(chart: Chart) -> None:
    assert chart.svg == ""
    assert chart.columns
