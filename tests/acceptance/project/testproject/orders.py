"""A handler with ``newest`` that fails at random."""

from __future__ import annotations

import os
import random

from django.db import connections

from django_amqp_events import handler

ALIAS = os.environ["TESTPROJECT_ALIAS"]
TABLE = "CREATE TABLE orders (id integer PRIMARY KEY, version integer)"
#: Part of the runs that fail.
FAILURES = 0.2


@handler(
    "orders.updated",
    newest=("order_id", "version"),
    using=ALIAS,
    max_retries=30,
    retry_backoff=1,
    retry_backoff_max=2,
)
def write(order_id: int, version: int) -> None:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("DELETE FROM orders WHERE id = %s", [order_id])
        cursor.execute("INSERT INTO orders VALUES (%s, %s)", [order_id, version])
    if random.random() < FAILURES:
        raise ValueError("at random")
