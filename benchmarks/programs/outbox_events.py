"""Publishes by the outbox: up to COMMIT, up to the confirm, and by the relay."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from .given import payload
from .publish_events import declare
from .service_events import happened
from .serving import at_a_pace, serve, timed

# The lines above set up Django.
# isort: split
from django.db import connection, transaction

from django_amqp_events import conf
from django_amqp_events.broker.connection import celery_app
from django_amqp_events.message import encoding
from django_amqp_events.publish import outbox, outbox_rows
from django_amqp_events.publish.relay import Relay


def statement() -> dict[str, Any]:
    """Return the statement that writes a row of the outbox, for the bare INSERT."""
    found: list[tuple[str, Any]] = []

    def watch(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("INSERT"):
            found.append((sql, tuple(params)))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(watch):
        happened.publish(**payload())
    sql, params = found[0]
    # SQLite's driver gets memoryviews.
    plain = [bytes(each) if isinstance(each, memoryview) else each for each in params]
    return {"statement": base64.b64encode(pickle.dumps((sql, plain))).decode()}


def now(ends: list[float]) -> None:
    """Note the time of the commit."""
    ends.append(time.perf_counter())


def commits(number: int, rate: float) -> dict[str, Any]:
    """Publish in transactions: seconds from the start to COMMIT, and to the confirm."""
    given, committed, published = payload(), [], []
    for _ in at_a_pace(number, rate):
        ends: list[float] = []
        began = time.perf_counter()
        with transaction.atomic():
            # The first callback after the commit.
            transaction.on_commit(partial(now, ends))
            happened.publish(**given)
        published.append(time.perf_counter() - began)
        committed.append(ends[0] - began)
    return {"committed": committed, "published": published}


def left() -> dict[str, Any]:
    """Count the pending rows."""
    return {"rows": outbox.rows("default").count()}


def relay(number: int) -> dict[str, Any]:
    """Insert pending rows, and relay them."""
    found = conf.get_settings()
    outbox_rows.insert(
        [
            encoding.event_message(
                exchange="events", name=happened.name,
                body=encoding.encode_payload(happened.name, payload()), event_id=f"event-{n}",
                service=found.service, published_at=datetime.now(UTC),
            )
            for n in range(number)
        ],
        alias="default", service=found.service, held=False,
    )  # fmt: skip
    relaying = Relay(app=celery_app(found), settings=found, alias="default")
    with timed() as answer:
        counts = relaying.run(until_empty=True)
    return {**answer, "accepted": counts.published}


if __name__ == "__main__":
    serve(declare=declare, statement=statement, commits=commits, left=left, relay=relay)
