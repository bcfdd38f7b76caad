"""The reaper: runs alone what nobody answered for, and says in the end that it is poison.

An event is in the graveyard because its deliveries ended without an answer: its worker was killed,
or only sat beside the one that was. Being there is no verdict; it means "run alone". A Celery
worker with one process and one message in hand does that, so time limits, results and signals are
those of any handler. What kills the process twice goes to the archive. What kills the reaper
itself is moved on by the broker, to the queue ``dead``, from which it is archived undecoded; and
where even that cannot be done, to the abyss.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any, Final

from amqp.exceptions import NotFound

from ..broker.topology import Names
from ..conf import Settings
from ..declare.registry import Registry
from ..exceptions import Malformed
from ..message import decoding, headers
from ..message.messages import Failure, Received
from .bootstep import EventStep
from .delivery import Delivery
from .settlement import HOLD, Settler
from .verdict import REQUEUE, Verdict

logger = logging.getLogger(__name__)

#: Times that an event may end the process that runs it alone.
DEATHS: Final = 2
#: Seconds between looks whether ``dead`` is empty; for how long the first of it is waited for,
#: whatever its length is said to be (a busy quorum queue says 0); and for how long the next.
LOOK: Final = 0.2
GRACE: Final = 1.0
PATIENCE: Final = 10.0


class Isolation(Settler):
    """Counts who ends the process; in this worker it can be nobody else's fault."""

    #: Seconds that a handler without a time limit has here.
    time_limit: float = HOLD

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._deaths: Counter[tuple[str, ...]] = Counter()

    def settle(self, delivery: Delivery, verdict: Verdict) -> None:
        if verdict.kind != "requeue" and delivery.event is not None and delivery.handler:
            self._deaths.pop(_key(delivery), None)
        super().settle(delivery, verdict)

    def unanswered(self, delivery: Delivery, exc: BaseException) -> Verdict:
        key = _key(delivery)
        self._deaths[key] += 1
        if self._deaths[key] < DEATHS:
            logger.warning("%s ended its process; it is run alone once more", delivery.title)
            return REQUEUE
        times = self._deaths.pop(key)
        return Verdict(
            kind="archive",
            reason="poison",
            detail=f"run alone, it ended its process {times} times",
            failure=Failure(exception=type(exc).__qualname__, message=str(exc)),
        )

    def timed_out(self, delivery: Delivery, exc: BaseException) -> Verdict | None:
        _, handler = delivery.known
        if self.app.tasks[handler.name].time_limit != self.time_limit:
            return None
        return Verdict(
            kind="archive",
            reason="poison",
            detail=f"run alone, it had not ended after {self.time_limit:g} seconds",
            failure=Failure(exception=type(exc).__qualname__, message=str(exc)),
        )


def _key(delivery: Delivery) -> tuple[str, ...]:
    event, handler = delivery.known
    return (event.service, event.id, handler.name, event.replay_id or "")


class ReaperStep(EventStep):
    """Consumes the graveyard and, before it, what lies behind it; one message at a time."""

    label = "AMQP events reaper"
    settler_class = Isolation
    alone = True
    settler: Isolation

    #: Seconds that a handler without a time limit has here, below the broker's consumer timeout.
    time_limit: float = HOLD
    #: Messages that were in ``dead`` and are not forwarded yet, and until when to wait for them:
    #: another reaper may have taken some. And until when to wait in any case.
    _left = 0
    _until = 0.0
    _grace = 0.0

    @classmethod
    def known(cls, settings: Settings, registry: Registry) -> set[str]:
        names = Names.of(settings)
        return {names.graveyard, names.dead}

    @staticmethod
    def home(names: Names) -> str:
        # A retry comes back to where it is alone.
        return names.graveyard

    @property
    def prefetch_count(self) -> int:
        return 1

    def _prepare(self, c: Any) -> None:
        super()._prepare(c)
        self.settler.time_limit = self.time_limit
        for name in self.registry.handlers:
            task = c.app.tasks[name]
            if task.time_limit is None and c.app.conf.task_time_limit is None:
                # One that hangs would keep the others waiting until the consumer timeout, and
                # again and again: it may be here because it outlasted that.
                task.time_limit = self.time_limit

    def _next(self, connection: Any) -> None:
        """Empty ``dead`` before the graveyard is consumed.

        What is in it has ended reapers, and must find none with another message in hand: each end
        counts for that one too.
        """
        if self._stale(connection) or not self._pending:
            return
        head = self._pending[0]
        if head == self.names.dead:
            self._left = self._ready(connection, head)
            self._until = monotonic() + PATIENCE
            self._grace = monotonic() + GRACE
        elif head == self.names.graveyard and monotonic() < (
            self._until if self._left > 0 else self._grace
        ):
            self.c.timer.call_after(LOOK, self._turn, (connection,))
            return
        super()._next(connection)

    def _ready(self, connection: Any, queue: str) -> int:
        if self._probe is None or self._probe.connection is None:
            self._probe = connection.channel()
        try:
            return int(self._probe.queue_declare(queue, passive=True).message_count)
        except NotFound:
            return 0

    def _dispatch(self, delivery: Delivery) -> None:
        received = delivery.received
        if received.queue == self.names.dead:
            self._left = max(1, self._left)
            self._forward(delivery)
            return
        delivery.received = self._original(received)
        super()._dispatch(delivery)

    def _forward(self, delivery: Delivery) -> None:
        """Archive a message that killed the reaper, without reading its body."""
        self._until, self._grace = monotonic() + PATIENCE, monotonic() + GRACE
        delivery.received = received = self._original(delivery.received)
        trusted = self.dispatcher.trusts(received)
        if not received.unreadable:
            try:
                delivery.event, delivery.progress = decoding.identify(received, trusted=trusted)
                delivery.handler = self.dispatcher.whose(
                    received, delivery.event, delivery.progress
                )
            except Malformed as exc:
                logger.warning("a message of %r cannot be read: %s", self.names.dead, exc.detail)
        self.settler.settle(
            delivery,
            Verdict(
                kind="archive",
                reason="poison",
                detail="whoever took it ended without an answer, the reaper too",
            ),
        )
        self._left -= 1

    def _original(self, received: Received) -> Received:
        """Return a message as it was in its handler's queue: the broker says where that was."""
        death = _death(received, received.routing_key)
        if death is not None:
            keys = death.get("routing-keys")
            received = replace(
                received,
                queue=received.routing_key,
                exchange=str(death.get("exchange") or ""),
                routing_key=str(keys[0]) if isinstance(keys, list) and keys
                else received.routing_key,
            )  # fmt: skip
        if received.exchange == self.names.return_:
            # A retry that came back here, or died here: its handler's name is in a header of ours.
            name = received.headers.get(headers.EVENT_HANDLER)
            handler = self.registry.handlers.get(name) if isinstance(name, str) else None
            if handler is not None:
                return replace(received, queue=handler.queue)
        return received


def _death(received: Received, queue: str) -> Mapping[str, Any] | None:
    """Return the broker's entry about a message's death in *queue*."""
    deaths = received.headers.get("x-death")
    for death in deaths if isinstance(deaths, list) else ():
        if isinstance(death, Mapping) and death.get("queue") == queue:
            return death
    return None
