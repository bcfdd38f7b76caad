"""The reaper: run each event in the graveyard alone, and archive it if it is poison.

An event is in the graveyard because its deliveries ended without a settlement: it killed its
worker, or was prefetched by a worker that another event killed. A Celery worker with one process
and a prefetch count of one runs it. An event that kills the process twice is archived. If it kills
the reaper itself, RabbitMQ moves it to the queue ``dead``, from which it is archived undecoded; if
that fails too, to the abyss.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from hashlib import sha256
from time import monotonic
from typing import Any, Final

from billiard.exceptions import TimeLimitExceeded, WorkerLostError

from ..broker.delivery_reader import decode
from ..broker.topology import Names
from ..conf import Settings
from ..declare.registry import Handler, Registry
from ..exceptions import Malformed
from ..logs import get_logger
from ..message.types import Delivered, Failure, handling
from .celery_internals import shutdown_requested, state
from .delivery import Delivery
from .prefetch import HOLDING, Window
from .reading import Reading
from .step import EventStep
from .verdict import Verdict

logger = get_logger(__name__)

#: Number of processes that an event may kill when run alone.
MAX_DEATHS: Final = 2
#: Seconds from its delivery in which an event that killed its process is run again at once. With
#: its time limit, that is less than RabbitMQ's consumer timeout.
AGAIN_SECONDS: Final = 60.0
#: Seconds without a message after which a reaper with ``--until-empty`` ends.
IDLE_SECONDS: Final = 30.0


def _poison(detail: str, exc: BaseException | None = None) -> Verdict:
    failure = (
        Failure(exception=type(exc).__qualname__, message=str(exc), representation=repr(exc))
        if exc
        else None
    )
    return Verdict(kind="archive", reason="poison", detail=detail, failure=failure)


class ReaperStep(EventStep):
    """Consumes the graveyard and ``dead``, one message of each at a time."""

    label = "AMQP events reaper"
    alone = True

    #: Time limit in seconds of a handler without one, below RabbitMQ's consumer timeout;
    #: ``None`` for five sixths of it.
    time_limit: float | None = None
    #: Whether the worker ends when no message has arrived for :data:`IDLE_SECONDS` seconds.
    until_empty = False
    #: When the last message arrived (monotonic).
    _arrived = 0.0

    @classmethod
    def known(cls, settings: Settings, registry: Registry) -> set[str]:
        names = Names.of(settings)
        return {names.graveyard, names.dead}

    def window(self, queue: str) -> Window:
        return Window(1, "default")

    def _prepare(self, c: Any) -> None:
        super()._prepare(c)
        self._deaths: Counter[tuple[str, ...]] = Counter()
        limit = self.time_limit or HOLDING * self.settings.consumer_timeout
        self._limited: set[str] = set()
        for name in self.registry.handlers:
            task = c.app.tasks[name]
            if not (task.time_limit or c.app.conf.task_time_limit):
                # A run that exceeds the consumer timeout would block the other events until then,
                # each time.
                task.time_limit = limit
                self._limited.add(name)

    def open(self) -> None:
        super().open()
        self._arrived = monotonic()
        if self.until_empty:
            self._end_when_idle(self._connection)

    def _end_when_idle(self, connection: Any) -> None:
        if self._stale(connection):
            return
        if not self.jobs.busy and monotonic() > self._arrived + IDLE_SECONDS:
            logger.info("no isolated event has arrived for %g s; this reaper ends", IDLE_SECONDS)
            state.should_stop = 0
            return
        self.c.timer.call_after(1.0, self._end_when_idle, (connection,))

    # -- deliveries -----------------------------------------------------------------------

    def received(self, delivery: Delivery) -> None:
        self._arrived = monotonic()
        if delivery.item.delivered.queue == self.names.dead:
            self._forward(delivery)
        else:
            super().received(delivery)

    def _forward(self, delivery: Delivery) -> None:
        """Archive a message that killed the reaper, without decoding its body."""
        verdict = _poison("each worker that received it, and the reaper, ended without settling it")
        self.jobs.settle(delivery, delivery.item._replace(verdict=verdict))
        self.jobs.request()

    def handler_of(self, delivered: Delivered) -> Handler | None:
        return None if delivered.queue == self.names.dead else self._read(delivered).handler

    def _read(self, delivered: Delivered) -> Reading:
        """Return a delivery with its event and handler, as far as they can be read."""
        reading = self.dispatcher.open(decode(delivered))
        with suppress(Malformed):
            self.dispatcher.identify(reading)
        return reading

    def on_lost(self, deliveries: list[Delivery], exceeded: float | None, error: str) -> None:
        """Run an event again that has ended its process, and archive it the second time."""
        for delivery in deliveries:
            if exceeded is None:
                self._died(delivery, error)
            elif delivery.name in self._limited:
                detail = f"run alone, it had not ended after {exceeded:g} seconds"
                self._archive(delivery, detail, TimeLimitExceeded(exceeded))
            else:
                super().on_lost([delivery], exceeded, error)

    def _died(self, delivery: Delivery, error: str) -> None:
        if shutdown_requested():  # a cold one kills its processes
            self.jobs.requeue([delivery])
            return
        key = self._key(delivery)
        self._deaths[key] += 1
        if self._deaths[key] >= MAX_DEATHS:
            detail = f"run alone, it ended its process {self._deaths.pop(key)} times"
            self._archive(delivery, detail, WorkerLostError(error))
            return
        text = "%s killed its process; it runs alone once more"
        logger.warning(text, delivery.title, extra=delivery.log_fields)
        if monotonic() < delivery.since + AGAIN_SECONDS:
            self.jobs.again(delivery)
        else:
            # Another reaper does not know of this death.
            self.jobs.requeue([delivery])

    def _archive(self, delivery: Delivery, detail: str, exc: BaseException) -> None:
        item = delivery.item._replace(verdict=_poison(detail, exc))
        self.jobs.settle(delivery, item)

    def _key(self, delivery: Delivery) -> tuple[str, ...]:
        """Return what identifies an event and its handler, at each delivery the same."""
        event = self._read(delivery.item.delivered).event
        if event is None:
            return (sha256(delivery.item.delivered.body).hexdigest(),)
        return handling(self.settings.service, delivery.name, event, event.replay_id)
