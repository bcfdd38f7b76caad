"""The dashboard without any broker: pages, permissions, queries, what is stale or hostile."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_amqp_events.broker import connection as connection_module
from django_amqp_events.models import (
    Alert,
    ArchivedEvent,
    Snapshot,
    State,
)
from django_amqp_events.monitor import statistics
from tests.archive_rows import add_failure, make_group

from .admin_world import (
    Page,
    client_of,
    grouped,
    make,
    overdue,
    staff,
)
from .admin_world import (
    page as parsed,
)

pytestmark = pytest.mark.django_db
PAGES = ("changelist", "find", "topology")


@pytest.fixture(autouse=True)
def no_broker(monkeypatch):
    def fail(*_: Any, **__: Any) -> Any:
        pytest.fail("a page talks to the broker")

    monkeypatch.setattr(connection_module, "connection", fail)


def url(page: str = "changelist", site: str = "admin") -> str:
    return reverse(f"admin:django_amqp_events_dashboard_{page}", current_app=site)


@pytest.fixture
def ada():
    return client_of(staff("view_dashboard", "view_archivedevent"))


def read(client: Any, page: str = "changelist", site: str = "admin") -> Page:
    response = client.get(url(page, site))
    assert response.status_code == 200, response.status_code
    html = response.content.decode()
    found = Page(html)
    assert not found.violations
    for start in html.split("<svg xmlns")[1:]:
        ET.fromstring("<svg xmlns" + start.partition("</svg>")[0] + "</svg>")  # noqa: S314 - ours
    return found


def snapshot(at: datetime | None = None, *, seen: bool = True, **more: Any) -> Snapshot:
    """One as the watcher writes it."""
    at = at or datetime.now(UTC)
    queue = {"role": "handler", "state": "ok", "severity": "ok", "meaning": "empty"}
    queues = {
        "billing.send_invoice": {
            **queue,
            "severity": "error",
            "meaning": "42 events wait for billing.send_invoice, no consumer: start a worker",
            "ready": 42,
            "unacked": 3,
            "consumers": 0,
            "prefetch": {"measured": 48, "rate": 1},
        },
        "billing:delay.8s": {**queue, "role": "delay", "ready": 5, "consumers": 0},
        "billing:archive": {**queue, "role": "archive", "ready": 0, "consumers": 1},
    }
    document = {
        "version": 1,
        "broker": {"error": "", "away": 0, "seen_at": at.isoformat()},
        "queues": queues,
        "archive": {"new_hour": 0},
        "outbox": [
            {"database": "default", "severity": "error", "total": 7, "lag": 90.0, "meaning": "due"}
        ],
        "mirror": {"lag": 61.0, "waiting": 8, "empty_at": at.isoformat()},
        **more,
    }
    if not seen:
        document["queues"], document["mirror"] = {}, {}
    return Snapshot.objects.create(
        at=at, service="billing", seen=seen, open=4, document=json.dumps(document)
    )


def alert(kind: str, key: str = "", text: str = "look: at it") -> None:
    now = datetime.now(UTC)
    Alert.objects.create(service="billing", kind=kind, key=key, details=text, since=now, last=now)


def tiles(client: Any) -> dict[str, str]:
    html = client.get(url()).content.decode()
    found = re.findall(r'class="ae-tile .*?<dt>(.*?)</dt><dd>(?:<(?:a|time) .*?>)?(.*?) *<', html)
    return dict(found)


def test_dashboard_shows_open_events_and_queues(ada):
    make(last_failed_at=datetime.now(UTC) - timedelta(minutes=5))
    make()
    overdue()
    alert("abyss", "billing:abyss", "look at the logs")
    snapshot()
    assert tiles(ada) == {
        "Open": "2",
        "Oldest": "2 h ago",
        "Overdue": "1",
        "Mirror lag": "1 min 1 s",
        "Outbox lag": "1 min 30 s",
    }
    words = read(ada).words
    for word in (
        "Messages in the abyss: billing:abyss",
        "42 events wait for billing.send_invoice",
        "prefetch count 48 (measured)",
        "prefetch count 1 (rate limit)",
        "Outbox in database “default”: due",
        "And 12 empty delay queues.",
    ):
        assert word in words, word
    assert "Stale" not in words
    assert "alert(1)" not in words


def test_an_outbox_with_an_alert_is_described_once(ada):
    snapshot()
    alert("outbox_lag", "default", "The oldest event is old: due")
    words = read(ada).words
    assert "The oldest event is old: due" in words
    assert "Outbox in database" not in words


def test_alerts_and_queues_lead_to_what_they_are_about():
    snapshot()
    group = grouped(make())
    for kind, key in (
        ("group_new", str(group.pk)), ("group_back", "nonsense"), ("growth", ""),
        ("outbox_lag", "default"), ("abyss", "billing:abyss"), ("mirror_lag", ""), ("own", ""),
    ):  # fmt: skip
        alert(kind, key)
    base = "/admin/django_amqp_events/"
    archive = {
        f"{base}failuregroup/{group.pk}/change/",
        f"{base}archivedevent/?failed=hour",
        f"{base}archivedevent/?handler=send_invoice",
        f"{base}outboxevent/?database=default",
    }
    topology = {f"{base}dashboard/topology/"}
    views = ("view_archivedevent", "view_failuregroup", "view_outboxevent")
    everything = set(read(client_of(staff("view_dashboard", *views))).links)
    assert everything >= archive | topology
    assert not [each for each in everything if "nonsense" in each]
    limited = set(read(client_of(staff("view_dashboard", name="grace"))).links)
    assert limited >= topology
    assert not [each for each in limited if each.startswith(tuple(archive))]


def test_missing_snapshots_name_the_command(ada):
    make()
    for page in ("changelist", "topology"):
        assert "Start events_mirror" in read(ada, page).words
    assert "not read yet" in read(ada).words


def test_unreachable_broker_shows_the_last_snapshot(ada):
    now = datetime.now(UTC)
    snapshot(now - timedelta(minutes=9))
    snapshot(now, seen=False, broker={"error": "no connection", "away": 540.0})
    words = read(ada).words
    assert "Stale since" in words
    assert "RabbitMQ did not answer (no connection" in words
    assert "Queues are shown as of" in words
    assert "42 events wait for billing.send_invoice" in words
    assert "statistics are not being collected" not in words


def test_a_watcher_that_is_gone_is_said(ada):
    snapshot(datetime.now(UTC) - timedelta(minutes=9))
    words = read(ada).words
    assert "Stale since" in words
    assert "statistics are not being collected" in words


def test_forged_snapshot_breaks_no_page(ada):
    no_number = {"code": "queue-rejected", "count": "x"}
    documents = [
        json.dumps(
            {
                "queues": {"billing.q": {"severity": "error", "meaning": each}},
                "outbox": [{"database": "default", "severity": "error", "meaning": each}],
            }
        )
        for each in ("3 events wait", None, no_number, {"code": "both", "first": no_number})
    ]
    for document in ("", "[]", "no JSON", "{}", '{"queues": {"q": {}}}', *documents):
        now = datetime.now(UTC)
        Snapshot.objects.create(at=now, service="billing", seen=True, document=document)
        with override_settings(LANGUAGE_CODE="de"):
            for page in PAGES:
                read(ada, page)


def test_the_topology_shows_every_binding_and_queue(ada):
    snapshot()
    response = ada.get(url("topology"))
    words = parsed(response).words
    assert "events billing.send_invoice shop.order.*" in words
    ready = {queue["name"]: queue["ready"] for queue in response.context["queues"]}
    assert (ready["billing.send_invoice"], ready["billing:delay.8s"]) == (42, 5)
    assert ready["billing:delay.16s"] is None


# -- figures


def test_the_figures_of_the_archive():
    now = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    for hours in (0.4, 0.9, 3, 10, 50, 100, 500):
        moment = now - timedelta(hours=hours)
        # Its attempts took longer than an hour.
        first = moment - timedelta(hours=2)
        make(first_failed_at=first, last_failed_at=moment, mirrored_at=moment)
    # It failed again just now, and is not new.
    make(mirrored_at=now - timedelta(days=9), last_failed_at=now - timedelta(minutes=1))
    make(State.SUCCEEDED, state_since=now - timedelta(minutes=50), mirrored_at=now,
         last_failed_at=now)  # fmt: skip
    # A past event that was given to a handler has not failed.
    make(reason="backfill", last_failed_at=now - timedelta(days=99))
    found = statistics.open_events()
    assert (found.open, found.capped) == (8, False)
    assert found.oldest == now - timedelta(hours=500)
    since = now - statistics.HOUR
    assert statistics.new_since(since, 9, service="billing") == 3


def test_series_and_groups_are_those_of_the_rows():
    now = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    this = now.replace(minute=0)
    first, last = this - timedelta(hours=23), this + timedelta(minutes=59)
    few, many = make_group(handler="a"), make_group(handler="b")
    row = make(group=few)
    make(group=many)
    make(group=many)
    for at, late in (
        (first, False), (this, False), (last, False), (last, True),
        (first - timedelta(seconds=1), False), (this + timedelta(hours=1), False),
    ):  # fmt: skip
        add_failure(row, failed_at=at, mirrored_at=now, late=late)
    make(State.SUCCEEDED, state_since=this)
    make(State.DISCARDED, state_since=first)
    make(State.DISCARDED, state_since=first - timedelta(seconds=1))
    with CaptureQueriesContext(connection) as found:
        series = statistics.hourly_series(now)
    assert len(found) == 3
    assert list(series) == [this - timedelta(hours=back) for back in reversed(range(24))]
    counts = {hour: count for hour, count in series.items() if any(count.values())}
    assert counts == {
        first: {"archived": 1, "succeeded": 0, "discarded": 1},
        this: {"archived": 2, "succeeded": 1, "discarded": 0},
    }
    assert [group.open for group in statistics.top_groups()] == [2, 1]
    ArchivedEvent.objects.update(state=State.DISCARDED)
    assert statistics.top_groups() == []


def test_figures_end_at_a_cap(monkeypatch, ada):
    monkeypatch.setattr(statistics, "READ_ROWS", 2)
    now = datetime.now(UTC)
    for minutes in range(5):
        make(first_failed_at=now, last_failed_at=now - timedelta(minutes=minutes))
    found = statistics.open_events()
    assert (found.open, found.capped) == (2, True)
    assert tiles(ada)["Open"] == "2+"
