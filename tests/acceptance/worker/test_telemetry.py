"""Traces across processes, with the real integrations of OpenTelemetry and Sentry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from django_amqp_events.message.types import Message
from tests.forked import REAL_START

from ..conftest import Make
from ..harness import Archive, Eyes, Service, until

DOCS = Path(__file__).resolve().parents[3] / "docs"
EVENT, HANDLER = "traced.order", "testproject.act"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

pytestmark = pytest.mark.timeout(180)

_REQUEST = """
from django.conf import settings
from django.test import Client
from django_amqp_events.publish import direct_publisher, publisher
# An exporter that is shut down before a late confirm drops the span.
direct_publisher.CONFIRM_WAIT_SECONDS = 30
settings.ROOT_URLCONF, settings.ALLOWED_HOSTS = "testproject.traced", ["testserver"]
publisher.KEPT_EVENTS = {kept}
assert Client().post("/orders/", {{"plan": {plan}}}).status_code == 200
"""


@pytest.fixture
def make_traced(fresh_eyes: Eyes, service: Make) -> Any:
    def make(tool: str, **options: Any) -> Service:
        environ = {"TESTPROJECT_TELEMETRY": tool, "TESTPROJECT_DOCS": str(DOCS)}
        if tool == "sentry":  # it changes Celery's modules, before others import from them
            environ[REAL_START] = "1"
        made = service(
            fresh_eyes, "traced", handlers="traced", environ=environ, **options
        ).declare()
        made.migrate()
        return made

    return make


def lines(service: Service, what: str) -> list[dict[str, Any]]:
    """Return what all processes have written, in order of time."""
    found = [
        json.loads(line)
        for path in service.where.glob(f"{what}.*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted(found, key=lambda line: line.get("start", 0))


def publish(service: Service, plan: list[str], kept: int = 5000) -> None:
    """Publish in a web request; with *kept* 0 its process leaves the row to a relay."""
    service.python(_REQUEST.format(plan=plan, kept=kept))


def mirrored(service: Service, state: str) -> list[dict[str, Any]]:
    """Mirror what comes until there are rows in that state."""

    def rows() -> list[dict[str, Any]]:
        service.command("events_mirror", "--until-empty")
        found: list[dict[str, Any]] = service.value(
            f"list(ArchivedEvent.objects.filter(state={state!r}).values())",
            "from django_amqp_events.models import ArchivedEvent",
        )
        return found

    return until(rows, 60, f"rows that are {state}")


def tree(spans: list[dict[str, Any]], parent: str | None = None, depth: int = 0) -> list[str]:
    found: list[str] = []
    for span in spans:
        if span["parent"] == parent:
            found.append(f"{'  ' * depth}{span['kind']} {span['name']} {span['status']}")
            found += tree(spans, span["id"], depth + 1)
    return found


# -- our spans ----------------------------------------------------------------------------


def test_one_trace_from_a_web_request_to_a_replay(make_traced: Any) -> None:
    traced = make_traced("opentelemetry", events={"PUBLISH": "outbox"})
    traced.worker("prefork", 1)
    publish(traced, ["unless:fixed"], kept=0)
    relay = (
        "from django.core.management import call_command as c\nc('events_relay', until_empty=True)"
    )
    traced.python(relay)
    (row,) = mirrored(traced, "archived")
    assert (row["attempts"], row["reason"]) == (3, "exhausted")
    (traced.where / "fixed").touch()
    assert traced.command("events_replay", "--all")[0] == 0
    mirrored(traced, "succeeded")
    spans = lines(traced, "spans")
    (request,) = [span for span in spans if span["kind"] == "SERVER"]
    one = [span for span in spans if span["trace"] == request["trace"]]
    assert tree(one) == [
        "SERVER POST orders/ UNSET",
        "  PRODUCER publish traced.order UNSET",
        "    CONSUMER process testproject.act ERROR",
        "    CONSUMER process testproject.act ERROR",
        "    CONSUMER process testproject.act ERROR",
        "    CONSUMER process testproject.act UNSET",
    ]
    attempts = [
        span["attributes"]["amqp_events.attempt"] for span in one if span["kind"] == "CONSUMER"
    ]
    assert attempts == [1, 2, 3, 1]
    assert {span["attributes"]["amqp_events.event_id"] for span in one[1:]} == {row["event_id"]}
    failed = next(span for span in one if span["status"] == "ERROR")
    assert failed["attributes"]["error.type"] == "ValueError"
    assert failed["exceptions"][0]["exception.message"] == "fixed is not there"


def test_the_celery_integration_and_ours_make_one_span_per_attempt(
    make_traced: Any, fresh_eyes: Eyes
) -> None:
    traced = make_traced("opentelemetry_and_celery")
    traced.worker("prefork", 1)
    publish(traced, ["fail", "ok"])
    event = until(lambda: traced.ledger(what="end"))[0]["event"]

    def processed() -> list[dict[str, Any]]:
        return [span for span in lines(traced, "spans") if span["kind"] == "CONSUMER"]

    # The last one is written after the handler's line.
    until(lambda: len(processed()) >= 2)
    fresh_eyes.empty("traced.testproject.act")
    spans, consumers = lines(traced, "spans"), processed()
    assert [span["name"] for span in consumers] == ["run/testproject.act"] * 2
    (producer,) = [span for span in spans if span["kind"] == "PRODUCER"]
    assert {span["trace"] for span in spans} == {producer["trace"]}
    assert {span["parent"] for span in consumers} == {producer["id"]}
    for number, span in enumerate(consumers, 1):
        about = span["attributes"]
        assert about["amqp_events.event_id"] == event
        assert about["amqp_events.attempt"] == number
        assert about["messaging.operation.type"] == "process"
        assert about["celery.task_name"] == HANDLER


# -- none of ours -------------------------------------------------------------------------


def test_sentry_continues_the_trace_and_reports_an_archived_event_once(
    make_traced: Any, fresh_eyes: Eyes
) -> None:
    traced = make_traced("sentry")
    worker = traced.worker("prefork", 1)
    headers = {
        "sentry-trace": f"{TRACE}-{PARENT}-1",
        "baggage": f"sentry-trace_id={TRACE},sentry-sample_rate=1.0,sentry-sampled=true",
    }
    event = fresh_eyes.event(EVENT, {"plan": ["fail"]}, headers=headers)
    Archive(fresh_eyes, "traced").wait(event)
    # The process that ran it is killed, so the integration reports nothing.
    slow = fresh_eyes.event("traced.slow", {})
    Archive(fresh_eyes, "traced").wait(slow)
    unread = fresh_eyes.message(EVENT, {})
    fresh_eyes.send(
        Message(exchange="events", routing_key=EVENT, body=b"no JSON", name=EVENT,
                headers=unread.headers, properties=unread.properties, event_id=unread.event_id)
    )  # fmt: skip
    Archive(fresh_eyes, "traced").wait(unread.event_id)
    until(lambda: unread.event_id in worker.log)

    def items() -> list[dict[str, Any]]:
        """Those about events, not about the killed process, which may still report itself."""
        found = lines(traced, "sentry")
        return [
            item
            for item in found
            if item.get("logger") != "multiprocessing"
            and item.get("transaction") != "testproject.slow"
        ]

    found = until(lambda: found if len(found := items()) >= 6 else [], 40, "6 items")
    assert len(found) == 6, found
    transactions = [item for item in found if item["type"] == "transaction"]
    assert [item["transaction"] for item in transactions] == [HANDLER] * 3
    for item in transactions:
        trace = item["contexts"]["trace"]
        assert (trace["trace_id"], trace["parent_span_id"]) == (TRACE, PARENT)
    events = [item for item in found if item["type"] == "event"]
    (raised,) = [item for item in events if "exception" in item]
    logged = {item["extra"]["event_id"]: item["extra"] for item in events if item is not raised}
    assert raised["exception"]["values"][-1]["type"] == "ValueError"
    assert raised["contexts"]["trace"]["trace_id"] == TRACE
    assert {each: about["archive_reason"] for each, about in logged.items()} == {
        slow: "exhausted",
        unread.event_id: "malformed",
    }
