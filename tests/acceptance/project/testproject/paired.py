"""Two handlers of one event, one with ``once``, and a program that publishes it.

``python -m testproject.paired '{"mode": "outbox", "events": ["<id>", "<id>"]}'`` commits the first
event in a transaction that is rolled back, and the others in one that is committed, each with a row
in ``effects`` whose attempt is 0. With ``immediate`` they are published one by one, without rows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from django_amqp_events import current_event, handler

from . import ledger
from .steps import perform

TABLE = "CREATE TABLE effects (event varchar(64), attempt integer)"
EVENT = "paired.happened"
POLICY: dict[str, Any] = {
    "bind": True, "max_retries": 1, "retry_backoff": 1, "retry_jitter": False,
    "dont_autoretry_for": ["testproject.steps.Never"],
}  # fmt: skip


@handler(EVENT, **POLICY)
def call(self: Any, plan: list[str]) -> None:
    perform(self, plan)


@handler(EVENT, **POLICY, once=True)
def effect(self: Any, plan: list[str]) -> None:
    event = current_event()
    assert event is not None
    _insert(event.id, event.attempt)
    perform(self, plan)


def _insert(event_id: str, attempt: int) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO effects VALUES (%s, %s)", [event_id, attempt])


def main(mode: Any, events: list[str], plan: list[str]) -> None:
    from django.db import transaction

    from django_amqp_events import Options, publish_event

    def publish(event_id: str) -> None:
        publish_event(EVENT, {"plan": plan}, options=Options(event_id=event_id, mode=mode))

    if mode == "immediate":
        for event_id in events:
            publish(event_id)
            ledger.write("accepted", events=[event_id])
        return
    rolled_back, *committed = events
    with transaction.atomic():
        _insert(rolled_back, 0)
        publish(rolled_back)
        transaction.set_rollback(True)
    with transaction.atomic():
        for event_id in committed:
            _insert(event_id, 0)
            publish(event_id)


if __name__ == "__main__":
    import django

    django.setup()
    main(**json.loads(sys.argv[1]))
