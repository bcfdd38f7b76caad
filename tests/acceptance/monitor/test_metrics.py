"""``events_worker --metrics-port``: what Prometheus scrapes is what happened, in every pool."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import apt_install
from machine import free_ports
from tests import forked

from ..conftest import POOLS, Make
from ..harness import Eyes, Service, Worker, until

pytestmark = pytest.mark.timeout(180)

DOCS = Path(__file__).resolve().parents[3] / "docs"
#: What Debian's package would start.
UNITS = ("prometheus.service", "prometheus-node-exporter.service")
ACT = "testproject.act"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def events_worker(service: Service, *arguments: str, folder: object = "") -> Worker:
    return service.start("events_worker", *arguments, PROMETHEUS_MULTIPROC_DIR=str(folder))


def scrape(port: int) -> Samples:
    """Return the value of each sample of this project by name and sorted labels."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("amqp_events_")
    }


def counters(samples: Samples) -> dict[str, float]:
    """Return the totals of the handler ``act``, and of the others together."""
    found: Counter[str] = Counter()
    for (name, labels), value in samples.items():
        if name.endswith("_total"):
            found[name] += int(value)
        if name == "amqp_events_handler_seconds_count" and ("handler", ACT) in labels:
            found["runs"] += int(value)
    return dict(found)


@pytest.mark.parametrize("pool", POOLS)
def test_metrics_are_what_happened(
    fresh_eyes: Eyes, service: Make, pool: str, tmp_path: Path
) -> None:
    core = service(
        fresh_eyes,
        events={"METRICS": True, "PUBLISH": "outbox"},
        environ={"TESTPROJECT_SNAPSHOTS": "3"},
    ).declare()
    core.migrate()
    (port,) = free_ports(1)
    worker = events_worker(
        core, "-P", pool, "-c", "2", "--metrics-port", str(port), folder=tmp_path / "metrics"
    ).wait_ready()
    for number in range(20):
        fresh_eyes.event("core.act", {"plan": ["ok"]}, event_id=f"ok-{number}")
    fresh_eyes.event("core.act", {"plan": ["fail", "ok"]}, event_id="retried")
    fresh_eyes.event("core.act.once", {"plan": ["fail", "ok"]}, event_id="archived")
    fresh_eyes.event("core.act", {"case": "no plan"}, event_id="no-arguments")
    # Published by the relay beside the worker: this process ends before it has.
    core.python(
        "import os\n"
        "from django.db import transaction\n"
        "from django_amqp_events import publish_event\n"
        "with transaction.atomic():\n"
        "    transaction.on_commit(lambda: os._exit(0))\n"
        "    publish_event('core.act', {'plan': ['ok']})\n",
        check=False,
    )
    core.python(
        "from django_amqp_events.models import OutboxEvent\n"
        "from django.utils.timezone import now\n"
        "OutboxEvent.objects.update(due_at=now())"
    )
    expected = {
        "amqp_events_handled_total": 22,
        "amqp_events_retried_total": 1,
        "amqp_events_archived_total": 2,
        "amqp_events_published_total": 1,
        "runs": 24,
    }
    until(lambda: counters(scrape(port)) == expected, 40, "everything is counted")

    samples = scrape(port)
    act = (("event", "core.act"), ("handler", ACT))
    assert samples["amqp_events_handled_total", act] == 22
    assert samples["amqp_events_archived_total", (*act, ("reason", "arguments"))] == 1
    assert samples["amqp_events_start_lag_seconds_count", (("handler", ACT),)] == 24

    def failed_again() -> bool:
        core.python(
            "from django.core.management import call_command\n"
            "call_command('events_replay', '--handler', 'testproject.once')",
            check=False,
        )
        # A second replay may come before the first is counted.
        return counters(scrape(port))["amqp_events_archived_total"] >= 3

    until(failed_again, 40, "the archived event is replayed, and archived again")

    def seen_later() -> Samples:
        """Return the samples with a snapshot of now; the first may be from before the workers."""
        samples = scrape(port)
        measured = any(name.endswith("queue_prefetch") for name, _ in samples)
        return samples if measured and samples["amqp_events_archive_open", ()] == 2 else {}

    # A snapshot is taken every 30 s.
    samples = until(seen_later, 70, "a later snapshot")
    assert samples["amqp_events_broker_up", ()] == 1
    queue = (("queue", f"core.{ACT}"), ("role", "handler"))
    assert samples["amqp_events_queue_consumers", queue] >= 1
    counts = {labels: n for (name, labels), n in samples.items() if name.endswith("queue_prefetch")}
    assert {dict(labels)["queue"] for labels in counts} >= {f"core.{ACT}"}
    assert min(counts.values()) >= 1
    assert samples["amqp_events_outbox_pending", (("database", "default"),)] == 0
    never = {"amqp_events_replayed_total", "amqp_events_superseded_total"}
    assert {base(name) for name, _ in samples} == documented() - never
    assert worker.stop() == 0


def test_a_replaying_process_counts_its_replays(fresh_eyes: Eyes, service: Make) -> None:
    core = service(fresh_eyes, events={"METRICS": True}).declare()
    output = core.python(
        "from django_amqp_events import signals\n"
        "from django_amqp_events.context import ReceivedEvent\n"
        "from django_amqp_events.monitor import metrics\n"
        "event = ReceivedEvent(id='1', name='core.act')\n"
        "signals.event_replayed.send('core', handler='testproject.act', event=event)\n"
        "odd = ReceivedEvent(id='1', name='x' * 200)\n"
        "signals.event_archived.send('core', handler=None, event=odd, reason='unknown')\n"
        "from prometheus_client import generate_latest\n"
        "print(generate_latest().decode())"
    )
    labels = 'event="core.act",handler="testproject.act"'
    assert f"amqp_events_replayed_total{{{labels}}} 1.0" in output
    assert 'amqp_events_archived_total{event="",handler="",reason="unknown"} 1.0' in output


def test_metrics_have_to_be_switched_on(fresh_eyes: Eyes, service: Make) -> None:
    core = service(fresh_eyes)
    worker = events_worker(core, "--metrics-port", "9")
    assert worker.wait() == 1
    assert "--metrics-port needs AMQP_EVENTS['METRICS'] = True" in worker.log
    counting = service(fresh_eyes, events={"METRICS": True})
    worker = events_worker(counting, "--metrics-port", "9")
    assert worker.wait() == 1
    assert "--metrics-port needs PROMETHEUS_MULTIPROC_DIR" in worker.log


def documented() -> set[str]:
    page = (DOCS / "metrics.md").read_text()
    return set(re.findall(r"^\| `(amqp_events_[a-z_]+)`", page, re.MULTILINE))


def base(name: str) -> str:
    return re.sub(r"_(bucket|sum|count|created)$", "", name)


def test_dashboard_and_rules_use_documented_metrics() -> None:
    for file in ("dashboard.json", "rules.yaml"):
        text = (DOCS / "metrics" / file).read_text()
        used = set(map(base, re.findall(r"\bamqp_events_[a-z_]+", text)))
        assert used
        assert used <= documented(), file
    panels = json.loads((DOCS / "metrics" / "dashboard.json").read_text())["panels"]
    assert len(panels) >= 10


@pytest.mark.slow
def test_prometheus_accepts_the_rules() -> None:
    if shutil.which("promtool") is None:
        apt_install.install(["prometheus"], why="promtool checks the alert rules", units=UNITS)
    done = forked.run(
        ["promtool", "test", "rules", "rules.test.yaml"], cwd=DOCS / "metrics",
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
