"""Delete and recreate queues without losing an event.

RabbitMQ answers 540 to ``if_empty`` and ``if_unused`` deletes of quorum queues, and a dead letter
that is stuck is neither ready nor unacked: only the management API's *total* shows it. So a queue
is first unbound, then watched until statistics **from after that** show that it is empty.

The age of statistics: a quorum queue reports on a tick (5 s by default) together with its process's
number of reductions, which each tick raises; the management plugin collects on an interval of its
own. When the reductions of a queue have changed twice since it was unbound, the second change is a
tick from after it. This does not depend on the intervals.

A handler's queue is replaced behind a *shadow*, a queue without limits and with the same bindings,
so that no event is unroutable::

    shadow declared and bound → queue unbound, watched, deleted, declared, bound
                              → shadow unbound, emptied into the queue, deleted

A crash may follow any step: a shadow is found by its name, and the next ``events_declare``
continues. An event published while both are bound is in both: at least once, never lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from amqp import exceptions as amqp_errors
from celery import Celery

from ...conf import Settings
from ...exceptions import TopologyError
from ...message.headers import is_broker_header
from ...message.text import counted
from ...message.types import Message, Received
from ..batch_reader import BatchReader
from ..confirms import ConfirmChannel
from ..topology import (
    NO_LIMIT,
    Binding,
    Exchange,
    Queue,
    Topology,
)
from .amqp_api import Amqp, to_bind, to_declare, to_unbind
from .inspection import some
from .management_api import FoundBinding, ManagementApi

QUEUE_CHECK_SECONDS: Final = 0.5
STATISTICS_TIMEOUT: Final = 60.0
#: Messages of a shadow that are moved at a time.
BATCH: Final = 100
#: Properties that a moved message does not keep. RabbitMQ would refuse a ``user_id`` of another
#: user, and an ``expiration`` would end an event that has waited long enough.
_DROPPED: Final = ("user_id", "expiration", "reply_to", "cluster_id")


@dataclass(slots=True)
class _Watched:
    """A queue that was unbound, and the changes of its statistics since."""

    name: str
    bindings: list[FoundBinding]
    reductions: Any = None
    changes: int = -1

    def is_fresh(self, statistics: Mapping[str, Any]) -> bool:
        """Return True if these statistics are from after the unbinding."""
        if "messages" not in statistics:
            return False
        if statistics.get("reductions") != self.reductions:
            self.reductions = statistics.get("reductions")
            self.changes += 1
        # Idle classic queues do not tick, but RabbitMQ checks that they are empty on deletion.
        return self.changes >= 2 or statistics.get("type") == "classic"


@dataclass(slots=True, kw_only=True)
class Replacement:
    """Deletes and recreates queues of one topology.

    Args:
        notice: called with a sentence about each wait.
    """

    app: Celery
    settings: Settings
    topology: Topology
    session: Amqp
    api: ManagementApi
    notice: Callable[[str], object]

    def delete(self, queues: Mapping[str, Queue | None]) -> dict[str, str]:
        """Delete queues that are empty and unused, and declare them again.

        Args:
            queues: by name; ``None`` for one that is not declared again.

        Returns:
            the reason for each queue that was kept, by its name; its bindings are restored.
        """
        watched: list[_Watched] = []
        refused: dict[str, str] = {}
        for name in queues:
            if reason := self._occupied(name, {}):
                refused[name] = reason
            else:
                watched.append(_Watched(name, self.api.bindings_of(name)))
        for queue in watched:
            declared = queues[queue.name]
            if declared is not None and declared.role == "handler":
                self._declare_shadow(declared)
            self._unbind(queue.bindings)
        for queue, occupied in self._vacated(watched):
            declared = queues[queue.name]
            reason = occupied or self._drop(queue.name)
            if reason:
                refused[queue.name] = reason
                self._bind(queue.bindings)
            elif declared is not None:
                self.session.carry_out(to_declare(declared))
            if declared is not None:
                self.session.carry_out(*map(to_bind, self._bindings(declared.name)))
                if declared.role == "handler":
                    self.drain(declared)
        return refused

    def drain(self, queue: Queue) -> None:
        """Move a shadow's messages into its queue, and delete the shadow.

        New events pass through a fanout exchange named like the shadow, so that their routing key
        stays the event's name; returned and replayed ones through the exchange that they came from.

        Raises:
            TopologyError: RabbitMQ did not confirm a message; it stays in the shadow.
        """
        name = self.topology.names.shadow(queue.name)
        self._unbind(self.api.bindings_of(name))
        if (depth := self.session.depth(name)) is not None:
            self.session.carry_out(
                to_declare(Exchange(name=name, type="fanout")),
                to_bind(Binding(exchange=name, queue=queue.name)),
            )
            self.notice(f"moving the messages of {name} to {queue.name}")
            while depth is not None and depth.ready:
                self._move(name, depth.ready)
                depth = self.session.depth(name)
        # A shadow has no dead letters, so it is empty.
        self.session.call(lambda channel: channel.queue_delete(name))
        self.session.call(lambda channel: channel.exchange_delete(name))

    def _vacated(self, watched: Sequence[_Watched]) -> list[tuple[_Watched, str]]:
        """Wait for statistics from after unbinding; return each queue and why it is in use."""
        done: list[tuple[_Watched, str]] = []
        waiting = list(watched)
        started = time.monotonic()
        if waiting:
            names = some([queue.name for queue in waiting])
            self.notice(f"waiting for fresh statistics of {names}")
        while waiting:
            elapsed = time.monotonic() - started
            for queue in list(waiting):
                reason = self._verdict(queue, elapsed)
                if reason is not None:
                    waiting.remove(queue)
                    done.append((queue, reason))
            if waiting:
                time.sleep(QUEUE_CHECK_SECONDS)
        return done

    def _verdict(self, queue: _Watched, elapsed: float) -> str | None:
        """Return why a queue is in use, ``""`` if it is not, ``None`` if that is not known yet."""
        statistics = self.api.queue(queue.name)
        if statistics is None:
            return ""
        if queue.is_fresh(statistics):
            return self._occupied(queue.name, statistics)
        if occupied := self._occupied(queue.name, {}):
            return occupied
        if elapsed > STATISTICS_TIMEOUT:
            return "the management API shows no fresh statistics of it"
        return None

    def _occupied(self, name: str, statistics: Mapping[str, Any]) -> str:
        """Return why a queue cannot be deleted, ``""`` if it is empty and unused."""
        depth = self.session.depth(name)
        if depth is not None and depth.consumers:
            return f"{counted(depth.consumers, 'consumer')}: stop its workers first"
        messages = max(depth.ready if depth else 0, statistics.get("messages") or 0)
        if messages:
            return (
                f"it holds {counted(messages, 'message')}; wait until they are handled, or run "
                f"`manage.py events_recover {name}`"
            )
        return ""

    def _drop(self, name: str) -> str:
        """Delete an empty queue; return why it was kept, ``""`` if it was not."""
        statistics = self.api.queue(name) or {}
        if occupied := self._occupied(name, {}):
            return occupied
        # Quorum queues answer 540 to these flags, which closes the connection.
        careful = statistics.get("type") == "classic"
        try:
            self.session.call(
                lambda channel: channel.queue_delete(name, if_unused=careful, if_empty=careful)
            )
        except amqp_errors.PreconditionFailed as exc:
            return f"RabbitMQ refused: {exc.reply_text}"
        return ""

    def _unbind(self, bindings: Iterable[FoundBinding]) -> None:
        self.session.carry_out(*(to_unbind(*binding) for binding in bindings))

    def _bind(self, bindings: Iterable[FoundBinding]) -> None:
        self.session.carry_out(*(to_bind(*binding) for binding in bindings))

    def _bindings(self, queue: str) -> list[Binding]:
        return [binding for binding in self.topology.bindings if binding.queue == queue]

    def _declare_shadow(self, queue: Queue) -> None:
        name = self.topology.names.shadow(queue.name)
        kind = queue.arguments.get("x-queue-type", "quorum")
        arguments = {"x-queue-type": kind}
        if kind == "quorum":
            arguments["x-delivery-limit"] = NO_LIMIT
        self.session.carry_out(
            to_declare(Queue(name=name, arguments=arguments)),
            *(to_bind(replace(binding, queue=name)) for binding in self._bindings(queue.name)),
        )

    def _move(self, name: str, count: int) -> None:
        """Move that many messages of a shadow; only this process consumes it."""
        timeout = self.settings.confirm_timeout
        reader = BatchReader(self.app, name, self.settings, size=BATCH, most=count)
        publisher = ConfirmChannel(self.app, timeout=timeout)
        try:
            while count > 0:
                batch = reader.batch(wait=timeout)
                if batch is None:
                    raise TopologyError(
                        f"{name} does not deliver its messages; run manage.py events_declare again"
                    )
                count -= len(batch.messages)
                # Without publish_each(): this broker has accepted these messages before, and a
                # refusal ends the command.
                copies = [self._copy(message) for message in batch.messages]
                errors = publisher.publish(copies, mandatory=True)
                reader.ack(batch, [place for place, error in enumerate(errors) if error is None])
                for error in errors:
                    if error is not None:
                        raise TopologyError(
                            f"a message of {name} could not be moved back: {error}; it stays "
                            f"there (others of its batch may be moved twice), run manage.py "
                            f"events_declare again"
                        ) from error
        finally:
            publisher.close()
            reader.close()

    def _copy(self, received: Received) -> Message:
        names, shadow = self.topology.names, received.queue
        if received.unreadable:
            raise TopologyError(
                f"{shadow} holds a message of which {received.unreadable}; remove it on "
                f"RabbitMQ's management page, then run manage.py events_declare again"
            )
        returned = received.exchange in (names.return_, names.replay)
        headers = received.headers
        kept = {key: value for key, value in received.properties.items() if key not in _DROPPED}
        return Message(
            exchange=received.exchange if returned else shadow,
            routing_key=received.routing_key,
            body=received.body,
            headers={key: value for key, value in headers.items() if not is_broker_header(key)},
            properties={**kept, "delivery_mode": 2},
            event_id=str(headers.get("event-id") or headers.get("id") or ""),
            name=received.routing_key,
        )
