"""A batch from its selection to the last published event: events per second, and memory.

``python -m benchmarks.batches [--events 100000] [--body 5000]``: a private broker, and an archive
in PostgreSQL. Prints the seconds for the selection, the preview and publishing, and the largest
memory of the process (VmHWM, MiB) after each.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import django
from celery import Celery
from django.conf import settings

from .ground import Ground

settings.configure(
    SECRET_KEY="of a benchmark",
    USE_TZ=True,
    INSTALLED_APPS=["django_amqp_events"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    AMQP_EVENTS={
        "SERVICE": "bench",
        "AUTODISCOVER": [],
        "HANDLERS": {"one": {"EVENTS": ["bench.happened"], "HANDLER": f"{__name__}.handle"}},
    },
)
app = Celery("batches", broker=os.environ.get("AMQP_URL", "amqp://"))
app.set_default()
django.setup()


def handle(**_: Any) -> None:
    """Never called: there is no worker."""


def peak() -> float:
    """Return the largest resident memory so far, in MiB."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def fill(number: int, size: int) -> None:
    from django_amqp_events.models import ArchivedEvent

    now, body = datetime.now(UTC), b'[[],{"note":"%s"},{}]' % (b"x" * size)
    for start in range(0, number, 500):
        ArchivedEvent.objects.bulk_create(
            ArchivedEvent(
                id=uuid4(), service="bench", handler="one", queue="bench.one",
                name="bench.happened", event_id=str(uuid4()), source="shop", first_failed_at=now,
                last_failed_at=now, mirrored_at=now, state_since=now, reason="exhausted",
                body=body, body_size=len(body), headers_raw=b"", content_type="application/json",
                content_encoding="utf-8",
            )
            for _ in range(min(500, number - start))
        )  # fmt: skip


def run(number: int) -> None:
    from django_amqp_events import conf
    from django_amqp_events.archive import tables
    from django_amqp_events.archive.batches import batch_states, preview
    from django_amqp_events.archive.batches.runner import Runner

    print(f"{'':10}  seconds  of CPU  events/s  peak MiB")
    print(f"{'before':10}  {'':7}  {'':6}  {'':8}  {peak():8.0f}", flush=True)
    began, used = time.monotonic(), time.process_time()

    def tell(what: str) -> None:
        """Print the costs since the last line."""
        nonlocal began, used
        took, cpu, rss = time.monotonic() - began, time.process_time() - used, peak()
        print(f"{what:10}  {took:7.1f}  {cpu:6.1f}  {number / took:8.0f}  {rss:8.0f}", flush=True)
        began, used = time.monotonic(), time.process_time()

    batch = batch_states.freeze(tables.rows(), by="benchmark")
    tell("frozen")
    plan = preview.preview_batch(batch)
    tell("dry run")
    if plan["eligible"] != number:
        raise SystemExit(f"{plan['eligible']} of {number} events can be replayed")
    batch_states.start(batch.pk, by="benchmark", reason="a benchmark")
    # No worker handles them: the batch ends when all are published.
    runner = Runner(
        settings=conf.get_settings(), stop=lambda: runner.published >= number, tell=print
    )
    runner.run()
    tell("published")
    counts = batch_states.count(batch.pk)
    tell("counted")
    if counts["published"] != number:
        raise SystemExit(f"{counts} of {number} events")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--events", type=int, default=100_000, help="in the batch (100000)")
    parser.add_argument("--body", type=int, default=5_000, help="bytes of each (5000)")
    options = parser.parse_args()
    from django.db import connections

    from django_amqp_events import conf
    from django_amqp_events.broker import publisher_pool, topology
    from django_amqp_events.broker.provisioning import startup
    from django_amqp_events.declare import registry

    with ExitStack() as stack:
        ground = Ground(stack)
        database = ground.database("postgresql")
        stack.callback(publisher_pool.close_pools)
        app.conf.broker_url = ground.node.amqp_url()
        raw, declared = conf.get_settings(), registry.get_registry()
        startup.declare(app, raw, topology.build(raw, declared))
        connections["default"].close()
        del connections["default"]
        configured = connections.configure_settings({"default": database})
        connections.databases["default"] = configured["default"]
        stack.callback(connections.close_all)
        fill(options.events, options.body)
        run(options.events)


if __name__ == "__main__":
    main()
