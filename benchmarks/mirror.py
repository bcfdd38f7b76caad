"""Rows per second of the mirror, beside a plain ``bulk_create`` of the same rows.

``python -m benchmarks.mirror [--messages 10000]``: archive messages with a traceback of 20 kB each
on a private broker, mirrored into an SQLite file and into a private PostgreSQL. The plain insert
reads, acks after commit, and knows neither duplicates nor outcomes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--messages", type=int, default=10_000)
    number = arguments.parse_args().messages
    if "BENCH_DATABASE" in os.environ:
        measure(number)
        return
    from postgresql import Postgres

    from broker import Node

    with tempfile.TemporaryDirectory() as directory:
        node = Node.start(Path(directory) / "node")
        server = Postgres.start()
        try:
            databases: dict[str, dict[str, Any]] = {
                "SQLite file": {
                    "ENGINE": "django.db.backends.sqlite3",
                    "NAME": str(Path(directory) / "archive.sqlite3"),
                },
                "PostgreSQL": {
                    "ENGINE": "django.db.backends.postgresql",
                    "NAME": "postgres",
                    "HOST": server.HOST,
                    "PORT": str(server.port),
                    "USER": server.USER,
                },
            }
            for name, database in databases.items():
                node.add_vhost(name)
                print(f"{name}, {number} messages:", flush=True)
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.mirror", "--messages", str(number)],
                    cwd=ROOT,
                    env=os.environ
                    | {
                        "BENCH_DATABASE": json.dumps(database),
                        "BENCH_BROKER": node.amqp_url(name),
                    },
                    check=True,
                )
        finally:
            server.end()
            node.end()


def measure(number: int) -> None:
    import django
    from celery import Celery
    from django.conf import settings

    settings.configure(
        SECRET_KEY="of a benchmark",
        USE_TZ=True,
        INSTALLED_APPS=["django_amqp_events"],
        DATABASES={"default": json.loads(os.environ["BENCH_DATABASE"])},
        AMQP_EVENTS={"SERVICE": "billing", "HANDLERS": {}, "AUTODISCOVER": []},
    )
    app = Celery("mirror", broker=os.environ["BENCH_BROKER"])
    app.set_default()
    django.setup()
    from django.core.management import call_command

    from django_amqp_events import conf, mirror, provisioning, registry, topology
    from django_amqp_events.models import ArchivedEvent

    found = conf.get_settings()
    provisioning.declare(app, found, topology.build(found, registry.get_registry()))
    call_command("migrate", verbosity=0)
    rates = {}
    for name in ("plain", "mirror"):
        ArchivedEvent.objects.all().delete()
        fill(app, number)
        began = time.perf_counter()
        if name == "mirror":
            mirror.Mirror(app=app, settings=found).run(until_empty=True)
        else:
            plain(app, found, number)
        # Until empty waits for half a second that nothing more comes.
        seconds = time.perf_counter() - began - (0.5 if name == "mirror" else 0)
        assert ArchivedEvent.objects.count() == number  # noqa: S101
        rates[name] = number / seconds
        print(f"  {name:6} {rates[name]:8.0f} rows/s", flush=True)
    print(f"  ratio  {rates['mirror'] / rates['plain']:8.2f}")


def plain(app: Any, found: Any, number: int) -> None:
    """Read, insert, commit, ack; the least that any mirror does."""
    from uuid import uuid4

    from django.db import transaction

    from django_amqp_events import archive, mirror
    from django_amqp_events.intake import Intake
    from django_amqp_events.models import ArchivedEvent, ArchivedFailure

    intake = Intake(app, "billing:archive", size=mirror.BATCH, timeout=10)
    done = 0
    while done < number:
        batch = intake.batch(wait=10)
        assert batch is not None  # noqa: S101
        now = datetime.now(UTC)
        rows, failures = [], []
        for message in batch.messages:
            entry = mirror._Entry(archive.read(message), message, uuid4())  # type: ignore[arg-type] # noqa: SLF001
            entry.id = entry.failure_id = entry.first_id
            rows.append(mirror._row(entry, found, now))  # noqa: SLF001
            failures.append(mirror._failure(entry, late=False, now=now))  # noqa: SLF001
        with transaction.atomic():
            ArchivedEvent.objects.bulk_create(rows)
            ArchivedFailure.objects.bulk_create(failures)
        intake.ack(batch)
        done += len(batch.messages)
    intake.close()


def fill(app: Any, number: int) -> None:
    from uuid import uuid4

    from django_amqp_events import envelope
    from django_amqp_events.broker import ConfirmChannel
    from django_amqp_events.envelope import Failure, Progress, Received

    line = '  File "/srv/billing/tax.py", line 28, in rate\n    raise TaxError(country)\n'
    failure = Failure(
        exception="billing.errors.TaxError",
        message="there is no tax rate for the country 'XX'",
        traceback="Traceback (most recent call last):\n" + line * 250,
        frames=tuple(
            {"file": "/srv/billing/tax.py", "line": n, "function": "rate", "module": "billing.tax"}
            for n in range(20)
        ),
    )
    channel = ConfirmChannel(app, timeout=60)
    for start in range(0, number, 500):
        messages = []
        for _ in range(start, min(start + 500, number)):
            name = "shop.order.created"
            message = envelope.event_message(
                exchange="events",
                name=name,
                body=envelope.encode_payload(name, {"order_id": 7, "text": "x" * 1000}),
                event_id=str(uuid4()),
                service="shop",
                published_at=datetime.now(UTC),
            )
            delivery = Received(
                queue="billing.send_invoice",
                exchange="events",
                routing_key=name,
                body=message.body,
                headers=message.headers,
                properties=message.properties,
            )
            messages.append(
                envelope.archive_copy(
                    delivery,
                    exchange="billing:archive",
                    reason="exhausted",
                    at=datetime.now(UTC),
                    worker="celery@one",
                    service="billing",
                    event=envelope.identify(delivery, trusted=False)[0],
                    progress=Progress(attempt=3),
                    handler="send_invoice",
                    failure=failure,
                )
            )
        errors = channel.publish(messages, mandatory=True, timeout=60)
        assert not any(errors), errors  # noqa: S101
    channel.close()


if __name__ == "__main__":
    main()
