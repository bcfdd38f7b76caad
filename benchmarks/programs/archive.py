"""Fill, mirror and replay the archive, also without the library."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from .given import payload
from .publish_events import declare
from .service_events import app, happened, queue
from .serving import serve, timed

# The lines above set up Django.
# isort: split
from django.db import connection, transaction

from django_amqp_events import conf
from django_amqp_events.archive import mirror, replay, row_writer
from django_amqp_events.archive.entries import Entry, read_entries
from django_amqp_events.broker.batch_reader import BatchReader
from django_amqp_events.broker.confirms import ConfirmChannel
from django_amqp_events.message import archive_message, decoding, encoding
from django_amqp_events.message.types import Failure, Progress, Received
from django_amqp_events.models import ArchivedEvent, ArchivedFailure
from django_amqp_events.publish import publisher

SERVICE, HANDLER = "bench", "bench.handler0"
ARCHIVE = f"{SERVICE}:archive"
#: Seconds that the mirror waits for further messages before it reports an empty queue.
IDLE = 0.5
LINE = '  File "/srv/bench/tax.py", line 28, in rate\n    raise TaxError(country)\n'
#: A traceback of 20 kB.
FAILURE = Failure(
    exception="bench.errors.TaxError",
    message="there is no tax rate for the country 'XX'",
    traceback="Traceback (most recent call last):\n" + LINE * 250,
    frames=tuple(
        {"file": "/srv/bench/tax.py", "line": n, "function": "rate", "module": "bench.tax"}
        for n in range(20)
    ),
)
#: Ids and versions of the rows for the next replay.
_seen: dict[UUID, int] = {}


def fill(number: int) -> dict[str, Any]:
    """Publish archive messages, each with a traceback."""
    channel = ConfirmChannel(app, timeout=60)
    body = encoding.encode_payload(happened.name, payload())
    for start in range(0, number, 500):
        messages = []
        for _ in range(min(500, number - start)):
            now = datetime.now(UTC)
            message = encoding.event_message(
                exchange="events", name=happened.name, body=body, event_id=str(uuid4()),
                service="shop", published_at=now,
            )  # fmt: skip
            delivery = Received(
                queue=queue(0), exchange="events", routing_key=happened.name, body=message.body,
                headers=message.headers, properties=message.properties,
            )  # fmt: skip
            messages.append(
                archive_message.build(
                    delivery, exchange=ARCHIVE, reason="exhausted", at=now, worker="celery@one",
                    service=SERVICE, event=decoding.identify(delivery, trusted=False)[0],
                    progress=Progress(attempt=3), handler=HANDLER, failure=FAILURE,
                )
            )  # fmt: skip
        if errors := [error for error in channel.publish(messages, mandatory=True)
                      if error]:  # fmt: skip
            raise errors[0]
    channel.close()
    return {}


def mirrored() -> dict[str, Any]:
    """Run the mirror until the archive queue is empty."""
    before = ArchivedEvent.objects.count()
    with timed() as answer:
        mirror.Mirror(app=app, settings=conf.get_settings()).run(until_empty=True)
    answer["seconds"] -= IDLE
    return {**answer, "rows": ArchivedEvent.objects.count() - before}


def inserted(number: int) -> dict[str, Any]:
    """Read, insert in bulk, commit, ack: the minimum of any mirror.

    It handles no duplicates, groups or outcomes of replays.
    """
    found = conf.get_settings()
    with timed() as answer:
        intake = BatchReader(app, ARCHIVE, found, size=mirror.BATCH)
        done = 0
        while done < number:
            batch = intake.batch(wait=10)
            if batch is None:
                break
            rows, failures = [], []
            for entry in read_entries(batch.messages, found):
                assert isinstance(entry, Entry)  # noqa: S101
                entry.begin(entry.now)
                rows.append(row_writer.new_row(entry))
                failures.append(row_writer._failure(entry, late=False))  # noqa: SLF001
            with transaction.atomic():
                ArchivedEvent.objects.bulk_create(rows)
                ArchivedFailure.objects.bulk_create(failures)
            intake.ack(batch, range(len(batch.messages)))
            done += len(batch.messages)
        intake.close()
    return {**answer, "rows": ArchivedEvent.objects.count()}


def clear() -> dict[str, Any]:
    """Empty the archive."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {ArchivedEvent._meta.db_table} CASCADE")  # noqa: SLF001
    else:
        ArchivedEvent.objects.all().delete()
    return {}


def archived(number: int) -> dict[str, Any]:
    """Create rows that can be replayed."""
    now = datetime.now(UTC)
    body = encoding.encode_payload(happened.name, payload())
    rows = [
        ArchivedEvent(
            id=uuid4(), service=SERVICE, handler=HANDLER, queue=queue(0), name=happened.name,
            event_id=str(uuid4()), source="shop", first_failed_at=now, last_failed_at=now,
            mirrored_at=now, state_since=now, reason="exhausted", body=body, body_size=len(body),
            headers_raw=b"", content_type="application/json", content_encoding="utf-8",
        )
        for _ in range(number)
    ]  # fmt: skip
    ArchivedEvent.objects.bulk_create(rows, batch_size=500)
    _seen.clear()
    _seen.update((row.pk, row.version) for row in rows)
    return {}


def replayed() -> dict[str, Any]:
    """Replay those rows in bulk."""
    with timed() as answer:
        published = replay.replay(_seen, by="benchmark").published
    return {**answer, "accepted": len(published)}


def one_by_one() -> dict[str, Any]:
    """Loop over the rows: read, publish, wait for the confirm, one UPDATE."""
    backend, done = publisher.backend(conf.get_settings()), 0
    with timed() as answer:
        for pk in _seen:
            row = ArchivedEvent.objects.get(pk=pk)
            message = encoding.retry_message(
                row.received, row.event, exchange=f"{SERVICE}:replay", routing_key=queue(0),
                service=SERVICE, handler=HANDLER, replay_id=str(uuid4()),
            )  # fmt: skip
            (error,) = backend.publish([message], mandatory=True)
            if error is not None:
                raise error
            done += ArchivedEvent.objects.filter(pk=pk, state="archived").update(state="replaying")
    return {**answer, "accepted": done}


def grow(rows: int) -> dict[str, Any]:
    """Copy a row until there are *number* rows (PostgreSQL)."""
    if not ArchivedEvent.objects.exists():
        archived(1)
    columns = [str(field.column) for field in ArchivedEvent._meta.concrete_fields]  # noqa: SLF001
    values = {
        "id": "md5('grown' || n || clock_timestamp())::uuid",
        "event_id": "md5('grown' || n || random())::uuid::text",
    }
    table = ArchivedEvent._meta.db_table  # noqa: SLF001
    missing = rows - ArchivedEvent.objects.count()
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) "  # noqa: S608 - names of our own columns
            f"SELECT {', '.join(values.get(name, name) for name in columns)} "
            f"FROM (SELECT * FROM {table} LIMIT 1) one, generate_series(1, %s) n",
            [max(0, missing)],
        )
        cursor.execute("ANALYZE")
    return {"rows": ArchivedEvent.objects.count()}


if __name__ == "__main__":
    serve(
        declare=declare, fill=fill, mirrored=mirrored, inserted=inserted, clear=clear,
        archived=archived, replayed=replayed, one_by_one=one_by_one, grow=grow,
    )  # fmt: skip
