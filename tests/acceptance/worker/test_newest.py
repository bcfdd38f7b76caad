"""``newest``: updates in any order, with failures, retries and a killed worker."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest

from ..conftest import Make
from ..harness import Archive, Eyes, Service, until

pytestmark = pytest.mark.timeout(600)

#: The number of updates, of which an order has a hundred; 10000 for the full run.
UPDATES = int(os.environ.get("NEWEST_UPDATES", "400"))
ORDERS = max(4, UPDATES // 100)
QUEUE = "core.testproject.write"


def ask(core: Service, query: str) -> Any:
    return core.value(
        "cursor.fetchall()",
        "from django.db import connections\n"
        f"cursor = connections['books'].cursor()\ncursor.execute({query!r})",
    )


def test_every_order_ends_at_its_newest_version(
    empty_database: dict[str, Any], fresh_eyes: Eyes, service: Make
) -> None:
    core = service(
        fresh_eyes,
        handlers="orders",
        environ={
            "TESTPROJECT_DATABASES": json.dumps({"books": empty_database}),
            "TESTPROJECT_ALIAS": "books",
        },
    )
    core.migrate("orders", alias="books")
    core.declare()
    versions = [(order, version) for order in range(ORDERS) for version in range(UPDATES // ORDERS)]
    random.shuffle(versions)
    fresh_eyes.send(
        *(
            fresh_eyes.message("orders.updated", {"order_id": order, "version": version})
            for order, version in versions
        )
    )
    workers = [core.worker("prefork", 1, "-Q", QUEUE) for _ in range(4)]
    for worker in workers:
        worker.wait_ready()
    workers[0].kill()
    entries = "SELECT count(*) FROM django_amqp_events_inboxentry"
    until(lambda: ask(core, entries) == [[len(versions)]], 300, "every event has been handled")
    fresh_eyes.drained("core", 60)
    newest = UPDATES // ORDERS - 1
    assert dict(ask(core, "SELECT id, version FROM orders")) == dict.fromkeys(range(ORDERS), newest)
    assert not Archive(fresh_eyes).collect()
