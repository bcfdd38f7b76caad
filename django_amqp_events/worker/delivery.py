"""A delivery in the worker's main process, which does not decode it."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from time import time
from types import SimpleNamespace
from typing import Any, NamedTuple

from celery.platforms import signals as signal_names

from ..broker.delivery_reader import decode
from ..declare.registry import Handler
from ..message.types import Delivered
from .acks import Acks
from .celery_internals import TERM_SIGNAME
from .reading import Dispatcher, Reading, celery_headers
from .verdict import Verdict

_numbers = count(1)

#: The task of a delivery whose route does not tell its handler.
NO_TASK = SimpleNamespace(
    name="", acks_late=True, time_limit=None, soft_time_limit=None, rate_limit=None,
    send_events=False,
)  # fmt: skip


class Item(NamedTuple):
    """What a job is to do with a delivery.

    Attributes:
        verdict: carry it out; ``None`` to run the handler.
        exceeded: do not run the handler, which has exceeded this hard time limit (seconds).
        unconfirmed: the message of this verdict was written before, and not confirmed.
    """

    delivered: Delivered
    verdict: Verdict | None = None
    exceeded: float | None = None
    unconfirmed: bool = False

    @property
    def runs(self) -> bool:
        return self.verdict is None and self.exceeded is None


class Delivery:
    """A delivery that a worker has received, until it is acked or requeued.

    It has what Celery's worker reads and sets of a request: for ``inspect active`` and
    ``reserved``, autoscaling, a soft shutdown, and the end of runs whose connection is lost.

    Attributes:
        tag: delivery tag on the channel of *acks*.
        handler: by exchange and routing key; ``None`` if these do not tell.
        task: Celery's task of that handler, or :data:`NO_TASK`.
        since: monotonic time of receipt; RabbitMQ's consumer timeout runs from there.
        job: the one that has it now.
        failures: how often its message could not be published.
        acknowledged: whether it is settled.
    """

    def __init__(
        self,
        item: Item,
        tag: int,
        acks: Acks,
        dispatcher: Dispatcher,
        handler: Handler | None,
        task: Any,
        since: float,
    ) -> None:
        self.item, self.tag, self.acks, self.dispatcher = item, tag, acks, dispatcher
        self.handler, self.task, self.since = handler, task or NO_TASK, since
        # Celery's task id would have to be decoded; info() has it.
        self.id = f"amqp-events-{next(_numbers)}"
        self.job: Job | None = None
        self.failures = 0
        self.acknowledged = False
        self.time_start: float | None = None

    @property
    def name(self) -> str:
        return self.handler.name if self.handler is not None else self.item.delivered.queue

    @property
    def worker_pid(self) -> int | None:
        return self.job.pid if self.job is not None else None

    def accepted(self) -> None:
        self.time_start = time()

    def headers(self) -> dict[str, Any]:
        """Return the fields of its task's request, ``{}`` if it cannot be handled.

        For people: the main process decodes nothing that it decides on.
        """
        reading = self.dispatcher.open(decode(self.item.delivered))
        try:
            payload = self.dispatcher.read(reading)
            if isinstance(payload, Verdict):
                return {}
            return celery_headers(self.dispatcher.settings.service, reading, payload)
        except Exception:  # noqa: BLE001 - a publisher decides what a message contains
            return {}

    @property
    def reading(self) -> Reading:
        """What is read of it for people."""
        reading = self.dispatcher.open(decode(self.item.delivered))
        with suppress(Exception):  # a publisher decides what a message contains
            self.dispatcher.identify(reading)
        reading.handler = reading.handler or self.handler
        return reading

    @property
    def title(self) -> str:
        """The event and its handler, for logs."""
        return self.reading.title

    @property
    def log_fields(self) -> dict[str, Any]:
        """The fields of its log records."""
        return self.reading.log_fields

    def info(self, safe: bool = False) -> dict[str, Any]:
        """Return what ``inspect active`` and ``reserved`` show."""
        headers = self.headers()
        delivered = self.item.delivered
        return {
            **{key: headers.get(key) for key in ("id", "args", "kwargs")},
            "name": self.name,
            "type": self.name,
            "time_start": self.time_start,
            "acknowledged": self.acknowledged,
            "worker_pid": self.worker_pid,
            "delivery_info": {
                "exchange": delivered.exchange,
                "routing_key": delivered.routing_key,
                "redelivered": delivered.redelivered,
            },
        }

    def cancel(self, pool: Any, signal: Any = None, **_: Any) -> None:
        """End its run, whose connection is lost or which a cold shutdown ends, if the pool can."""
        if self.job is not None and self.job.pid is not None and self.job.in_process:
            pool.terminate_job(self.job.pid, signal_names.signum(signal or TERM_SIGNAME))

    def __repr__(self) -> str:
        return f"<{self.name}: delivery {self.tag} from {self.item.delivered.queue}>"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Job:
    """Deliveries that the pool has.

    Attributes:
        pid, began: process and monotonic time of its begin, ``None`` before.
        in_process: whether a process of its own runs it.
        result: what the pool returned for it.
        expected: seconds that it is expected to take.
        exceeded: the hard time limit that has ended it.
        withdrawn: it must not begin, as its deliveries are given back or lost.
        ended: the pool has reported its end.
    """

    deliveries: list[Delivery]
    in_process: bool
    pid: int | None = None
    began: float | None = None
    result: Any = None
    expected: float = 0.0
    exceeded: float | None = None
    withdrawn: bool = False
    ended: bool = False
    lock: Any = field(default_factory=threading.Lock)
