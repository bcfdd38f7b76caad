"""A row by a bare INSERT, and plain Celery's ``apply_async`` after the commit."""

from __future__ import annotations

import base64
import pickle
import time
from functools import partial
from typing import Any
from uuid import uuid4

from django.db import connection, transaction

from .given import payload
from .publish_plain import declare, one_by_one
from .service_plain import tasks
from .serving import at_a_pace, serve

TABLE = "django_amqp_events_outboxevent"


def _statement(encoded: str) -> tuple[str, Any]:
    # From our own process; JSON has no dates and no bytes.
    found: tuple[str, Any] = pickle.loads(base64.b64decode(encoded))  # noqa: S301
    return found


def now(ends: list[float]) -> None:
    """Note the time of the commit."""
    ends.append(time.perf_counter())


def commits(number: int, rate: float, statement: str, after: bool) -> dict[str, Any]:
    """Insert in transactions: seconds from the start to COMMIT, and to the publish *after* it."""
    sql, params = _statement(statement)
    given, committed, published = payload(), [], []
    publish = tasks[0].apply_async
    for _ in at_a_pace(number, rate):
        ends: list[float] = []
        row = uuid4()
        values = [row.hex if connection.vendor == "sqlite" else row, *params[1:]]
        began = time.perf_counter()
        with transaction.atomic():
            transaction.on_commit(partial(now, ends))
            with connection.cursor() as cursor:
                cursor.execute(sql, values)
            if after:
                transaction.on_commit(lambda: publish(kwargs=given))
        published.append(time.perf_counter() - began)
        committed.append(ends[0] - began)
    return {"committed": committed, "published": published}


def empty() -> dict[str, Any]:
    """Delete the rows and return their number."""
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {TABLE}")  # noqa: S608 - a constant
        return {"rows": cursor.rowcount}


if __name__ == "__main__":
    serve(declare=declare, one_by_one=one_by_one, commits=commits, empty=empty)
