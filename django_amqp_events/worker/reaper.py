"""The reaper: run each event in the graveyard alone, and archive it if it is poison.

An event is in the graveyard because its deliveries ended without a settlement: it killed its
worker, or was prefetched by a worker that another event killed. A Celery worker with one process
and a prefetch count of one runs it. An event that kills the process twice is archived. If it kills
the reaper itself, RabbitMQ moves it to the queue ``dead``, from which it is archived undecoded; if
that fails too, to the abyss.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Final

from amqp.exceptions import NotFound

from ..broker.dead_letters import before_death
from ..broker.queue_depth import queue_depth
from ..broker.topology import Names
from ..conf import Settings
from ..declare.registry import Registry
from ..exceptions import Malformed
from ..message import headers
from ..message.types import Failure, Received, handling
from .bootstep import EventStep
from .celery_internals import state
from .dispatch import Delivery
from .prefetch import HOLDING
from .settlement import Settler
from .verdict import REQUEUE, Verdict

logger = logging.getLogger(__name__)

#: Number of processes that an event may kill when run alone.
MAX_DEATHS: Final = 2
#: Seconds from its delivery in which an event that killed its process is run again at once. With
#: its time limit, that is less than RabbitMQ's consumer timeout.
AGAIN_SECONDS: Final = 60.0
#: Seconds between two checks whether ``dead`` is empty.
CHECK_INTERVAL: Final = 0.2
#: Seconds to wait for its first message, since RabbitMQ reports a busy quorum queue as empty.
FIRST_TIMEOUT: Final = 1.0
#: Seconds to wait for each further message.
NEXT_TIMEOUT: Final = 10.0
#: Seconds without a message after which a reaper with ``--until-empty`` ends.
IDLE_SECONDS: Final = 30.0
#: Seconds between reports of the number of isolated events.
REPORT_SECONDS: Final = 10.0

#: The event is run again, and stays unacknowledged.
AGAIN: Final = Verdict(kind="requeue", detail="it runs alone once more")


class Isolation(Settler):
    """Settles events that run alone, so that an event is known to have killed its process."""

    #: Time limit in seconds of a handler without one.
    time_limit: float
    #: Runs the event of a delivery once more.
    again: Callable[[Delivery], object]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._deaths: Counter[tuple[str, ...]] = Counter()
        #: Events settled, and those of them that were archived as poison.
        self.isolated = self.poison = 0

    def settle(self, delivery: Delivery, verdict: Verdict) -> bool:
        if verdict is AGAIN:
            delivery.wait_again()
            self.call_soon(self.again, delivery)
            return False
        if verdict.kind != "requeue":
            self.isolated += 1
            self.poison += verdict.reason == "poison"
            if delivery.event is not None and delivery.handler:
                self._deaths.pop(self._key(delivery), None)
        return super().settle(delivery, verdict)

    def unanswered(self, delivery: Delivery, exc: BaseException) -> Verdict:
        key = self._key(delivery)
        self._deaths[key] += 1
        if self._deaths[key] < MAX_DEATHS:
            logger.warning(
                "%s killed its process; it runs alone once more",
                delivery.title,
                extra=delivery.log_fields,
            )
            # Another reaper does not know of this death.
            return AGAIN if monotonic() < delivery.since + AGAIN_SECONDS else REQUEUE
        return _poison(f"run alone, it ended its process {self._deaths.pop(key)} times", exc)

    def _key(self, delivery: Delivery) -> tuple[str, ...]:
        event, handler = delivery.known
        return handling(self.settings.service, handler.name, event, event.replay_id)

    def timed_out(self, delivery: Delivery, exc: BaseException) -> Verdict | None:
        _, handler = delivery.known
        if self.app.tasks[handler.name].time_limit != self.time_limit:
            return None
        return _poison(f"run alone, it had not ended after {self.time_limit:g} seconds", exc)


def _poison(detail: str, exc: BaseException | None = None) -> Verdict:
    failure = (
        Failure(exception=type(exc).__qualname__, message=str(exc), representation=repr(exc))
        if exc
        else None
    )
    return Verdict(kind="archive", reason="poison", detail=detail, failure=failure)


class ReaperStep(EventStep):
    """Consumes the graveyard and, before it, ``dead``; one message at a time."""

    label = "AMQP events reaper"
    settler_class = Isolation
    alone = True
    settler: Isolation

    #: Time limit in seconds of a handler without one, below RabbitMQ's consumer timeout;
    #: ``None`` for five sixths of it.
    time_limit: float | None = None
    #: Whether the worker ends when no message has arrived for :data:`IDLE_SECONDS` seconds.
    until_empty = False
    #: When the last message arrived, and what was reported last (both monotonic).
    _arrived = 0.0
    _reported = (0.0, 0, 0)
    #: Messages of ``dead`` that are not archived yet, and until when they are waited for
    #: (monotonic), since another reaper may have received some.
    _left = 0
    _next_deadline = 0.0
    _first_deadline = 0.0

    @classmethod
    def known(cls, settings: Settings, registry: Registry) -> set[str]:
        names = Names.of(settings)
        return {names.graveyard, names.dead}

    @staticmethod
    def home(names: Names) -> str:
        return names.graveyard  # a retry runs alone as well

    @property
    def prefetch_count(self) -> int:
        return 1

    def _prepare(self, c: Any) -> None:
        super()._prepare(c)
        limit = self.time_limit or HOLDING * self.settings.consumer_timeout
        self.settler.time_limit = limit
        self.settler.again = partial(self._guarded, super()._dispatch)
        for name in self.registry.handlers:
            task = c.app.tasks[name]
            if task.time_limit is None and c.app.conf.task_time_limit is None:
                # A run that exceeds the consumer timeout would block the other events until then,
                # each time.
                task.time_limit = limit

    def _opened(self) -> None:
        super()._opened()
        self._arrived = monotonic()
        self._reported = (self._arrived, self.settler.isolated, self.settler.poison)
        self._watch(self._connection)

    def _watch(self, connection: Any) -> None:
        """Report the number of isolated events; end the worker when there is nothing to do."""
        if self._stale(connection):
            return
        now = monotonic()
        since, isolated, poison = self._reported
        if now >= since + REPORT_SECONDS:
            self._reported = (now, self.settler.isolated, self.settler.poison)
            if done := self.settler.isolated - isolated:
                logger.info(
                    "%d events isolated in %.0f s (%.1f per second), %d of them poison",
                    done,
                    now - since,
                    done / (now - since),
                    self.settler.poison - poison,
                )
        working = state.reserved_requests or self.settler.working
        if self.until_empty and not working and now > self._arrived + IDLE_SECONDS:
            logger.info("no isolated event has arrived for %g s; this reaper ends", IDLE_SECONDS)
            state.should_stop = 0
            return
        self.c.timer.call_after(1.0, self._watch, (connection,))

    def _next(self, connection: Any) -> None:
        """Empty ``dead`` before the graveyard is consumed.

        A message in ``dead`` has killed reapers. If it does so again, each other message that the
        reaper has received counts one delivery more.
        """
        if self._stale(connection) or not self._pending:
            return
        head = self._pending[0]
        if head == self.names.dead:
            self._left = self._ready(connection, head)
            self._wait_for_dead()
        elif head == self.names.graveyard and monotonic() < (
            self._next_deadline if self._left > 0 else self._first_deadline
        ):
            self.c.timer.call_after(CHECK_INTERVAL, self._turn, (connection,))
            return
        super()._next(connection)

    def _wait_for_dead(self) -> None:
        self._next_deadline = monotonic() + NEXT_TIMEOUT
        self._first_deadline = monotonic() + FIRST_TIMEOUT

    def _ready(self, connection: Any, queue: str) -> int:
        if self._probe is None or self._probe.connection is None:
            self._probe = connection.channel()
        try:
            return queue_depth(self._probe, queue).ready
        except NotFound:
            return 0

    def _dispatch(self, delivery: Delivery) -> None:
        self._arrived = monotonic()
        received = delivery.received
        if received.queue == self.names.dead:
            self._left = max(1, self._left)
            self._forward(delivery)
            return
        delivery.received = self._original(received)
        super()._dispatch(delivery)

    def _forward(self, delivery: Delivery) -> None:
        """Archive a message that killed the reaper, without decoding its body."""
        self._wait_for_dead()
        delivery.received = self._original(delivery.received)
        try:
            self.dispatcher.identify(delivery)
        except Malformed as exc:
            logger.warning(
                "a message in %r has invalid headers: %s",
                self.names.dead,
                exc,
                extra=delivery.log_fields,
            )
        self.settler.settle(
            delivery,
            _poison("each worker that received it, and the reaper, ended without settling it"),
        )
        self._left -= 1

    def _original(self, received: Received) -> Received:
        """Return a message as it was in its handler's queue, by RabbitMQ's record of its death."""
        received = before_death(received, received.deaths, self.names, self.registry)
        if received.exchange == self.names.return_:
            # A retry that returned to the graveyard; one of our headers names its handler.
            name = received.headers.get(headers.EVENT_HANDLER)
            handler = self.registry.handlers.get(name) if isinstance(name, str) else None
            if handler is not None:
                return replace(received, queue=handler.queue)
        return received
