"""The project's service: events, and handlers that do the work of :mod:`benchmarks.programs.work`.

Also the application of its workers, ``celery -A benchmarks.programs.service_events``.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.programs.settings")

import django
from celery import Celery

from . import work
from .celery_options import OPTIONS
from .given import GIVEN

app = Celery("bench", set_as_current=True)
app.conf.update(OPTIONS)
app.set_default()
django.setup()

from django_amqp_events import event, handler  # noqa: E402 - needs Django's settings

#: The number of events, handlers and queues.
HANDLERS: int = GIVEN.get("handlers", 1)


@event("bench.happened0")
def happened(order_id: int, total: str, note: str, sent: float = 0.0) -> None:
    """The event, if there is only one."""


def name(number: int) -> str:
    """Return the name of an event."""
    return f"bench.happened{GIVEN.get('first', 0) + number}"


def queue(number: int) -> str:
    """Return the queue of a handler."""
    return f"{GIVEN.get('service', 'bench')}.bench.handler{number}"


def made(number: int) -> None:
    """Declare a handler."""
    options: dict[str, Any] = {"name": f"bench.handler{number}", "once": GIVEN.get("once", False)}
    if work.COUNTDOWN > 512:
        # Longer than the default delays, so with its own queue.
        options |= {"retry_backoff": work.COUNTDOWN, "retry_backoff_max": work.COUNTDOWN}

    if work.WORK == "row":

        @handler(name(number), **options)
        def of_row(order_id: int, total: str, note: str, sent: float = 0.0) -> None:
            work.row(order_id, note)

    elif work.WORK == "since":

        @handler(name(number), **options)
        def of_since(order_id: int, total: str, note: str, sent: float = 0.0) -> None:
            work.since(sent)

    elif work.WORK == "lasting":

        @handler(name(number), **options)
        def of_lasting(order_id: int, total: str, note: str, sent: float = 0.0) -> None:
            work.lasting(number)

    elif work.WORK == "fail_once":

        @handler(name(number), bind=True, **options)
        def of_failing(self: Any, order_id: int, total: str, note: str, sent: float = 0.0) -> None:
            work.fail_once(self, self.event.attempt)

    else:

        @handler(name(number), **options)
        def of_nothing(order_id: int, total: str, note: str, sent: float = 0.0) -> None:
            work.nothing()


for _number in range(HANDLERS):
    made(_number)

if "shared" in GIVEN:

    @handler(GIVEN["shared"], name="bench.shared")
    def of_shared(order_id: int, total: str, note: str, sent: float = 0.0) -> None:
        """Handle the event of all services."""
        work.nothing()
