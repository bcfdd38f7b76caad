"""The cost of VALIDATE: publishing and handling with and without it, in turn.

``python -m benchmarks.validation [--events 2000] [--rounds 7]``: no broker, so that nothing hides
the cost. Publishing goes to a backend that confirms at once, handling runs through the in-memory
broker. Prints the microseconds of CPU time per event and, of each round's pair, the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import django
from django.conf import settings

settings.configure(
    SECRET_KEY="of a benchmark",
    USE_TZ=True,
    LOGGING_CONFIG=None,
    INSTALLED_APPS=["django_amqp_events"],
    AMQP_EVENTS={"SERVICE": "bench", "PUBLISH": "immediate", "BACKEND": "memory"},
)
django.setup()

from django_amqp_events import event  # noqa: E402 - needs Django's settings
from django_amqp_events.decorators import Event  # noqa: E402
from django_amqp_events.exceptions import PublishError  # noqa: E402
from django_amqp_events.message.types import Message  # noqa: E402
from django_amqp_events.publish.pending import Backend  # noqa: E402
from django_amqp_events.publish.publisher import divert  # noqa: E402
from django_amqp_events.testing import memory_events  # noqa: E402


@dataclass
class Line:
    sku: str
    count: int
    price: Decimal


def small(order_id: int, total: Decimal, due: date, note: str = "") -> None: ...
def large(order_id: UUID, sent: datetime, lines: list[Line]) -> None: ...


SMALL: dict[str, Any] = {"order_id": 1, "total": "9.90", "due": "2026-03-01"}
LARGE: dict[str, Any] = {
    "order_id": "8d4ad1b8-1f0c-4f6e-9d0e-6a4b1f1f0c11",
    "sent": "2026-03-01T12:00:00Z",
    "lines": [{"sku": f"sku-{n}", "count": n, "price": f"{n}.90"} for n in range(20)],
}
TYPED_SMALL: dict[str, Any] = {"order_id": 1, "total": Decimal("9.90"), "due": date(2026, 3, 1)}
TYPED_LARGE: dict[str, Any] = {
    "order_id": UUID("8d4ad1b8-1f0c-4f6e-9d0e-6a4b1f1f0c11"),
    "sent": datetime(2026, 3, 1, 12, tzinfo=UTC),
    "lines": [Line(f"sku-{n}", n, Decimal(f"{n}.90")) for n in range(20)],
}


#: An event and a payload.
Turn = tuple[Event[...], dict[str, Any]]


class Confirming(Backend):
    """Confirms what is published."""

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        return [None] * len(messages)


def declared(contract: Callable[..., Any], *, validate: bool) -> Event[...]:
    """Declare an event with a handler that has the same hints."""
    found = event(f"bench.{contract.__name__}.{validate}", validate=validate)(contract)
    found.handler(name=f"bench.{contract.__name__}_{validate}", validate=validate)(contract)
    return found


def publishing(one: Event[...], payload: dict[str, Any], events: int) -> float:
    """Return the microseconds of CPU time per event."""
    with divert(Confirming()):
        began = time.process_time()
        for _ in range(events):
            one.publish(**payload)
        return (time.process_time() - began) / events * 1e6


def handling(one: Event[...], payload: dict[str, Any], events: int) -> float:
    """Return the microseconds of CPU time per event."""
    with memory_events() as broker:
        for _ in range(events):
            one.using(mode="immediate").publish(**payload)
        began = time.process_time()
        handled = broker.run(limit=events + 1)
        took = time.process_time() - began
        if handled != events or broker.archived:
            raise SystemExit(f"{handled} of {events} events handled, {broker.archived} archived")
    return took / events * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--events", type=int, default=2_000, help="events per turn")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    given = parser.parse_args()
    rows: list[tuple[str, Callable[..., float], Turn, Turn]] = []
    for what, contract, plain, typed in (
        ("4 values", small, SMALL, TYPED_SMALL),
        ("20 dataclasses", large, LARGE, TYPED_LARGE),
    ):
        off, on = (declared(contract, validate=validate) for validate in (False, True))
        # Without VALIDATE, a publisher passes what JSON has; dataclasses need it.
        rows.append((f"publish, {what}", publishing, (off, plain), (on, typed)))
        rows.append((f"handle, {what}", handling, (off, plain), (on, plain)))
    print("| | without | with | ratio (median, min, max) |\n| --- | --- | --- | --- |")
    for what, measure, without, validated in rows:
        pairs = [
            (measure(*without, given.events), measure(*validated, given.events))
            for _ in range(given.rounds + 1)
        ][1:]  # the first round warms up
        ratios = [two / one for one, two in pairs]
        first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"| {what} | {first:.0f} µs | {second:.0f} µs | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}, {max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
