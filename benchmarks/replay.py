"""Bulk replays, beside replays that are confirmed and noted one by one.

``python -m benchmarks.replay [--events 10000]``: a private broker, and an archive in SQLite and in
PostgreSQL. Prints events per second of both ways, and how many times faster the bulk is.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import django
from celery import Celery
from django.conf import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

BODY = b'[[],{"order_id":7,"note":"%s"},{}]' % (b"x" * 1000)

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
app = Celery("replay", broker=os.environ.get("AMQP_URL", "amqp://"))
app.set_default()
django.setup()


def handle(**_: Any) -> None:
    """Is never called: there is no worker."""


@contextmanager
def archive(**entry: Any) -> Iterator[None]:
    """Put the archive into this database."""
    from django.core.management import call_command
    from django.db import connections

    connections["default"].close()
    del connections["default"]
    connections.databases["default"] = connections.configure_settings({"default": entry})["default"]
    call_command("migrate", verbosity=0)
    yield
    connections["default"].close()


def fill(number: int) -> dict[UUID, int]:
    from django_amqp_events.models import ArchivedEvent

    now = datetime.now(UTC)
    ArchivedEvent.objects.bulk_create(
        [
            ArchivedEvent(
                id=uuid4(), service="bench", handler="one", queue="bench.one",
                name="bench.happened", event_id=str(uuid4()), source="shop", first_failed_at=now,
                last_failed_at=now, mirrored_at=now, state_since=now, reason="exhausted",
                body=BODY, body_size=len(BODY), headers_raw=b"", content_type="application/json",
                content_encoding="utf-8",
            )
            for _ in range(number)
        ],
        batch_size=500,
    )  # fmt: skip
    archived = ArchivedEvent.objects.filter(state="archived")
    return dict(archived.order_by("pk").values_list("pk", "version"))


def bulk(seen: dict[UUID, int]) -> int:
    from django_amqp_events import replay

    return len(replay.replay(seen, by="benchmark").published)


def one_by_one(seen: dict[UUID, int]) -> int:
    """What a loop over the rows would do: read, publish, wait for the confirm, one UPDATE."""
    from django_amqp_events import envelope, publisher
    from django_amqp_events.conf import get_settings
    from django_amqp_events.models import ArchivedEvent

    backend, done = publisher.backend(get_settings()), 0
    for pk in seen:
        row = ArchivedEvent.objects.get(pk=pk)
        message = envelope.replay_copy(
            row.received, row.event, exchange="bench:replay", routing_key="bench.one",
            handler="one", replay_id=str(uuid4()),
        )  # fmt: skip
        (error,) = backend.publish([message], mandatory=True)
        if error is not None:
            raise error
        done += ArchivedEvent.objects.filter(pk=pk, state="archived").update(state="replaying")
    return done


def rate(run: Callable[[dict[UUID, int]], int], number: int) -> float:
    seen = fill(number)
    began = time.monotonic()
    done = run(seen)
    if done != number:
        raise SystemExit(f"{done} of {number} events were published")
    return number / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--events", type=int, default=10_000, help="replayed in bulk (10000)")
    number = parser.parse_args().events
    from postgresql import Postgres

    from broker import Node
    from django_amqp_events import broker, conf, provisioning, registry, topology

    with tempfile.TemporaryDirectory() as folder:
        node = Node.start(Path(folder) / "broker")
        server = Postgres.start()
        try:
            app.conf.broker_url = node.amqp_url("/")
            raw, declared = conf.get_settings(), registry.get_registry()
            provisioning.declare(app, raw, topology.build(raw, declared))
            print("events/s      one by one      bulk     ratio")
            for kind, entry in {
                "SQLite": {
                    "ENGINE": "django.db.backends.sqlite3",
                    "NAME": str(Path(folder) / "db.sqlite3"),
                },
                "PostgreSQL": {
                    "ENGINE": "django.db.backends.postgresql", "NAME": "postgres",
                    "HOST": server.HOST, "PORT": str(server.port), "USER": server.USER,
                },
            }.items():  # fmt: skip
                with archive(**entry):
                    slow = rate(one_by_one, max(1, number // 10))
                    fast = rate(bulk, number)
                print(f"{kind:12}  {slow:10.0f}  {fast:8.0f}  {fast / slow:7.1f}x", flush=True)
        finally:
            broker.close_pools()
            server.end()
            node.end()


if __name__ == "__main__":
    main()
