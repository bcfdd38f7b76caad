"""What the outbox costs: a publish up to its COMMIT, and the relay, each beside its yardstick.

``python -m benchmarks.outbox [--database sqlite|postgresql] [--number 300] [--events 20000]``, on a
private broker and a private database. Prints, for each round and in turn, so that a machine with
other work is fair to both:

* ``publish()`` in a transaction, from its begin to its COMMIT, and the same row by a bare INSERT;
* events per second of ``events_relay``, and of Celery's ``apply_async`` with confirms, one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django
from celery import Celery
from django.conf import settings

ROOT = Path(__file__).resolve().parent.parent
NAME = "bench.happened"
PAYLOAD = {"order_id": 7, "total": "19.90", "note": "x" * 400}

app = Celery("outbox", set_as_current=False)
app.conf.update(
    broker_transport_options={"confirm_publish": True},
    task_ignore_result=True,
    task_default_queue_type="quorum",
)


@app.task(name="bench.task")
def task(**payload: Any) -> None:
    """Nobody runs it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--number", type=int, default=300, help="transactions of each kind (300)")
    parser.add_argument("--events", type=int, default=20_000, help="for the relay (20000)")
    parser.add_argument("--rounds", type=int, default=3, help="of relay and Celery (3)")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "scripts"))
    from postgresql import Postgres

    from broker import Node

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if options.database == "postgresql":
            server = Postgres.start()
            stack.callback(server.end)
            database = {
                "ENGINE": "django.db.backends.postgresql", "NAME": "postgres",
                "HOST": server.HOST, "PORT": str(server.port), "USER": server.USER,
            }  # fmt: skip
        else:
            database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(Path(folder) / "db")}
        node = Node.start(Path(folder) / "broker")
        stack.callback(node.end)
        app.conf.broker_url = node.amqp_url("/")
        settings.configure(
            SECRET_KEY="of a benchmark",
            INSTALLED_APPS=["django_amqp_events"],
            DATABASES={"default": database},
            AMQP_EVENTS={
                "SERVICE": "bench", "AUTODISCOVER": [], "CELERY_APP": "benchmarks.outbox.app",
            },
        )  # fmt: skip
        django.setup()
        # This module under its own name, for CELERY_APP.
        sys.modules.setdefault("benchmarks.outbox", sys.modules[__name__])
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        queue()
        print(f"{options.database}, RabbitMQ {node_version(node)}")
        commits(options.number)
        relays(options.events, options.rounds)
        from django.db import connections

        from django_amqp_events import courier

        courier.close_couriers()
        connections.close_all()


def node_version(node: Any) -> str:
    return str(node.http("GET", "/api/overview")["rabbitmq_version"])


def queue() -> None:
    """A quorum queue for the events; Celery declares one for its task."""
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        channel.exchange_declare("events", "topic", durable=True, auto_delete=False)
        channel.queue_declare(
            "events", durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"}
        )
        channel.queue_bind("events", "events", "#")


def commits(number: int) -> None:
    from django.db import connection, transaction

    from django_amqp_events import outbox, publish_event

    # The row as the library writes it.
    statements: list[tuple[str, Any]] = []

    def watch(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("INSERT"):
            statements.append((sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(watch):
        publish_event(NAME, PAYLOAD)
    sql, params = statements[0]

    def timed(work: Callable[[], object]) -> float:
        ends: list[float] = []
        began = time.perf_counter()
        with transaction.atomic():
            # First of all that happens after the commit.
            transaction.on_commit(lambda: ends.append(time.perf_counter()))
            work()
        return ends[0] - began

    def bare() -> None:
        fresh = [outbox.new_id(), *params[1:]]
        fresh[0] = fresh[0].hex if connection.vendor == "sqlite" else fresh[0]
        with connection.cursor() as cursor:
            cursor.execute(sql, fresh)

    ours, theirs = [], []
    for _ in range(number):
        theirs.append(timed(bare))
        outbox.rows("default").all().delete()
        ours.append(timed(lambda: publish_event(NAME, PAYLOAD)))
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(
        f"  publish() up to COMMIT {statistics.median(ours) * 1e3:.3f} ms, bare INSERT of the same "
        f"row {statistics.median(theirs) * 1e3:.3f} ms (medians of {number}): {ratio:.2f} x"
    )


def relays(events: int, rounds: int) -> None:
    from datetime import UTC, datetime

    from django_amqp_events import broker, conf, envelope, outbox
    from django_amqp_events.relay import Relay

    given = conf.get_settings()
    ratios = []
    for _ in range(rounds):
        outbox.insert(
            [
                envelope.event_message(
                    exchange="events", name=NAME, body=envelope.encode_payload(NAME, PAYLOAD),
                    event_id=f"event-{n}", service="bench", published_at=datetime.now(UTC),
                )
                for n in range(events)
            ],
            alias="default", service="bench", held=False,
        )  # fmt: skip
        began, cpu = time.perf_counter(), time.process_time()
        counts = Relay(app=broker.celery_app(given), settings=given, alias="default").run(
            until_empty=True
        )
        ours = counts.published / (time.perf_counter() - began)
        our_cpu = (time.process_time() - cpu) / counts.published
        if counts.published != events:
            raise SystemExit(f"the relay published {counts.published} of {events} events")
        began, cpu = time.perf_counter(), time.process_time()
        number = max(events // 20, 200)
        for _ in range(number):
            task.apply_async(kwargs=PAYLOAD)
        theirs = number / (time.perf_counter() - began)
        their_cpu = (time.process_time() - cpu) / number
        ratios.append(ours / theirs)
        print(
            f"  relay {ours:,.0f} events/s (CPU {our_cpu * 1e6:.0f} µs each), Celery apply_async "
            f"{theirs:,.0f}/s (CPU {their_cpu * 1e6:.0f} µs each): {ratios[-1]:.1f} x"
        )
    print(f"  relay, median of {rounds} rounds: {statistics.median(ratios):.1f} x")


if __name__ == "__main__":
    main()
