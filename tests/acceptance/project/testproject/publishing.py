"""Publish events as a process of a service does, and write down what was accepted.

``python -m testproject.publishing '{"count": 1000, "seed": 1, "mode": "outbox"}'``

With ``outbox`` a transaction commits, and for every ten, another one with an event of its own is
rolled back; with ``immediate`` the call returns, and what it refused is
published again under the same id, as the documents ask for. Each event is written down before it
is tried and after it was accepted: between the two nobody can know.
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import nullcontext, suppress
from typing import Any, Final, Literal
from uuid import UUID

import django

#: Bytes of a large event.
LARGE: Final = 1_000_000
#: Transactions that commit for each one that does not.
COMMITS: Final = 10


class RolledBack(Exception):
    """Rolls a transaction back."""


def main(
    *, count: int, seed: str, mode: Literal["outbox", "immediate"] = "outbox", size: int = 10,
    pause: float = 0.0, passing: float = 0.1, lasting: float = 0.05, deadly: float = 0.0,
    hanging: float = 0.0, large: float = 0.0, work: float = 0.0, patience: float = 120.0,
) -> None:  # fmt: skip
    """Publish *count* events in transactions of *size*.

    Shares of them fail once, fail for good, kill their process or hang; a share of all is large.
    """
    from django.db import DatabaseError, InterfaceError, close_old_connections, transaction

    from django_amqp_events import Options, PublishError, publish_event
    from django_amqp_events.publish import direct_publisher

    from . import ledger
    from .faulty import EVENT, content_of

    # A busy machine confirms late, and what is late is a relay's: most rows are not about that.
    direct_publisher.CONFIRM_WAIT_SECONDS = 10.0  # type: ignore[misc]
    chance = random.Random(seed)
    shares = {"passing": passing, "lasting": lasting, "deadly": deadly, "hanging": hanging}
    plans = [*shares, "fine"]
    weights = [*shares.values(), 1 - sum(shares.values())]
    events: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        (plan,) = chance.choices(plans, weights)
        event_id = str(UUID(int=chance.getrandbits(128), version=4))
        payload: dict[str, Any] = {"number": number, "plan": plan, "work": work}
        if chance.random() < large:
            payload["padding"] = "x" * LARGE
        events.append((event_id, payload))

    def publish(part: list[tuple[str, dict[str, Any]]]) -> None:
        with transaction.atomic() if mode == "outbox" else nullcontext():
            for event_id, payload in part:
                publish_event(EVENT, payload, options=Options(event_id=event_id, mode=mode))

    def publish_and_roll_back() -> None:
        with suppress(RolledBack), transaction.atomic():
            publish_event(EVENT, {"number": -1, "plan": "fine"}, options=Options(mode=mode))
            raise RolledBack

    size = size if mode == "outbox" else 1
    for first in range(0, count, size):
        part = events[first : first + size]
        ledger.write(
            "intent",
            events=[event_id for event_id, _ in part],
            contents=[content_of(**payload) for _, payload in part],
        )
        deadline = time.monotonic() + patience
        while True:
            try:
                if mode == "outbox" and first % (COMMITS * size) == 0:
                    publish_and_roll_back()
                publish(part)
            except (PublishError, DatabaseError, InterfaceError) as exc:
                ledger.write("refused", events=[event_id for event_id, _ in part], why=str(exc))
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                # As any process does that is no request: a connection that is lost stays so.
                close_old_connections()
            else:
                break
        ledger.write("accepted", events=[event_id for event_id, _ in part])
        time.sleep(pause)
    ledger.write("published everything")


if __name__ == "__main__":
    django.setup()
    main(**json.loads(sys.argv[1]))
