"""Deleting queues, and declaring them again, without losing an event.

RabbitMQ answers 540 to ``if_empty`` and ``if_unused`` deletes of quorum queues, and a dead letter
that is stuck is neither ready nor unacked: only the management API's *total* shows it. So a queue
is first unbound, then watched until figures **from after that** say that nothing is in it.

How old figures are: a quorum queue reports on a tick (5 s by default), with the number of its
process's reductions, which each tick raises; management collects on an interval of its own. When
the reductions of one queue have changed twice since it was unbound, the second change is a tick
from after it. That needs no guess about intervals.

A handler's queue is replaced behind a *shadow*, a queue without limits and with the same bindings,
so that no event finds the service absent::

    shadow declared and bound → queue unbound, watched, deleted, declared, bound
                              → shadow unbound, emptied into the queue, deleted

Each step may be the last before a crash: what is left is found by its name, and the next
``events_declare`` goes on from there. An event published in the instant in which both are bound
is in both: at least once, never lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import amqp
from amqp import exceptions as amqp_errors
from celery import Celery

from ...conf import Settings
from ...exceptions import BrokerUnavailableError, TopologyError
from ...message.headers import is_broker_header
from ...message.types import Message
from .. import confirms, connection
from ..topology import (
    NO_LIMIT,
    Binding,
    Queue,
    Topology,
)
from .amqp_api import Amqp
from .drift import shadow
from .management_api import ManagementApi

#: Seconds between two looks at a queue that is watched.
POLL: Final = 0.5
#: Messages of a shadow that are moved at a time.
BATCH: Final = 100
#: Properties of a moved message. RabbitMQ would refuse a ``user_id`` of another user, and an
#: ``expiration`` would end an event that has waited long enough.
_PROPERTIES: Final = (
    "content_type",
    "content_encoding",
    "correlation_id",
    "message_id",
    "priority",
    "timestamp",
    "type",
    "app_id",
)


@dataclass(slots=True)
class _Watched:
    """A queue that was unbound, and what its figures have said since."""

    name: str
    bindings: list[dict[str, Any]] = field(default_factory=list)
    reductions: Any = None
    changes: int = -1

    def look(self, figures: Mapping[str, Any]) -> None:
        if "messages" in figures and figures.get("reductions") != self.reductions:
            self.reductions = figures.get("reductions")
            self.changes += 1

    def fresh(self, figures: Mapping[str, Any]) -> bool:
        # Classic queues do not tick when idle; they check emptiness themselves when deleted.
        return "messages" in figures and (self.changes >= 2 or figures.get("type") == "classic")


class Replacement:
    """Deletes and recreates queues of one topology.

    Args:
        patience: seconds to wait for fresh figures.
        wait: seconds to wait, once its bindings lead to the shadow, for a queue to be emptied by
            the workers that still consume it, and for these to be stopped.
        notice: told in a sentence what is waited for.
    """

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        topology: Topology,
        session: Amqp,
        api: ManagementApi,
        *,
        patience: float = 60.0,
        wait: float = 0.0,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self.app = app
        self.settings = settings
        self.topology = topology
        self.session = session
        self.api = api
        self.patience = patience
        self.wait = wait
        self._notice = notice

    def delete(self, names: Iterable[str]) -> dict[str, str]:
        """Delete queues that turn out empty and unused.

        Returns:
            why not, by name of each queue that was left, bound as before.
        """
        watched, refused = self._candidates(names)
        for queue in watched:
            self._unbind(queue)
        for queue, occupied in self._vacated(watched):
            reason = occupied or self._drop(queue.name)
            if reason:
                refused[queue.name] = reason
                self._bind_again(queue)
        return refused

    def recreate(self, queues: Iterable[Queue]) -> dict[str, str]:
        """Delete queues that turn out empty and unused, and declare them as they should be.

        Returns:
            why not, by name of each queue that was left, bound as before.
        """
        declared = {queue.name: queue for queue in queues}
        watched, refused = self._candidates(declared)
        for queue in watched:
            if declared[queue.name].role == "handler":
                self._raise_shadow(declared[queue.name])
            self._unbind(queue)
        for queue, occupied in self._vacated(watched):
            entity = declared[queue.name]
            reason = occupied or self._drop(queue.name)
            if reason:
                refused[queue.name] = reason
                self._bind_again(queue)
            else:
                self.session.declare_queue(entity)
            for binding in self._bindings(entity.name):
                self.session.bind(binding)
            if entity.role == "handler":
                self.drain(entity)
        return refused

    def drain(self, queue: Queue) -> int:
        """Move what a shadow holds into its queue, and delete the shadow.

        First deliveries pass through a fanout exchange named like the shadow, so that their
        routing key stays the event's name; returned and replayed ones through the exchange that
        they came from.

        Returns:
            the number of messages that were moved.

        Raises:
            TopologyError: RabbitMQ did not confirm a message; it stays in the shadow.
        """
        name = shadow(self.topology.names, queue.name)
        for found in self.api.bindings_of(name):
            self._each(found, self.session.unbind)
        moved = 0
        if self.session.depth(name) is not None:
            self.session.call(
                lambda channel: channel.exchange_declare(
                    name, "fanout", durable=True, auto_delete=False
                )
            )
            self.session.bind(Binding(exchange=name, queue=queue.name))
            self._say(f"moving what {name} holds to {queue.name}")
            moved = self._move(name)
        # Nothing dead-letters out of a shadow, so what is ready and what was acked is all.
        self.session.call(lambda channel: channel.queue_delete(name))
        self.session.call(lambda channel: channel.exchange_delete(name))
        return moved

    def _say(self, text: str) -> None:
        if self._notice is not None:
            self._notice(text)

    # -- vacating

    def _candidates(self, names: Iterable[str]) -> tuple[list[_Watched], dict[str, str]]:
        """Sort out queues that are in use at first sight, before anything is touched."""
        watched, refused = [], {}
        for name in names:
            reason = self._occupied(name, {})
            if reason and not self.wait:
                refused[name] = reason
            else:
                watched.append(_Watched(name, self.api.bindings_of(name)))
        return watched, refused

    def _vacated(self, watched: Sequence[_Watched]) -> list[tuple[_Watched, str]]:
        """Wait until figures from after unbinding say what is in each queue."""
        done: list[tuple[_Watched, str]] = []
        waiting = list(watched)
        started = time.monotonic()
        if waiting:
            names = ", ".join(queue.name for queue in waiting[:3])
            more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
            self._say(f"waiting for fresh figures of {names}{more}")
        while waiting:
            elapsed = time.monotonic() - started
            for queue in list(waiting):
                figures = self.api.queue(queue.name)
                if figures is None:
                    reason: str | None = ""
                else:
                    queue.look(figures)
                    occupied = self._occupied(queue.name, figures)
                    reason = None
                    if occupied and (queue.fresh(figures) or self._live(queue.name)):
                        reason = occupied if elapsed >= self.wait else None
                    elif queue.fresh(figures):
                        reason = ""
                    if reason is None and elapsed > self.wait + self.patience:
                        reason = occupied or "the management API shows no fresh figures of it"
                if reason is not None:
                    waiting.remove(queue)
                    done.append((queue, reason))
            if waiting:
                time.sleep(POLL)
        return done

    def _occupied(self, name: str, figures: Mapping[str, Any]) -> str:
        """Return what is in a queue, ``""`` if it is empty."""
        depth = self.session.depth(name)
        if depth is not None and depth.consumers:
            return f"{_count(depth.consumers, 'consumer')}: stop its workers first"
        messages = max(depth.ready if depth else 0, figures.get("messages") or 0)
        if messages:
            return (
                f"it holds {_count(messages, 'message')}; let them be handled first (--wait gives "
                f"time for that), or run `manage.py events_recover {name}`"
            )
        return ""

    def _live(self, name: str) -> bool:
        depth = self.session.depth(name)
        return depth is not None and bool(depth.ready or depth.consumers)

    def _drop(self, name: str) -> str:
        """Delete an empty queue; return why not."""
        depth = self.session.depth(name)
        if depth is None:
            return ""
        figures = self.api.queue(name) or {}
        if depth.ready or depth.consumers:
            return self._occupied(name, figures)
        # if_unused and if_empty are 540 on quorum queues, and close the connection.
        careful = figures.get("type") == "classic"
        try:
            self.session.call(
                lambda channel: channel.queue_delete(name, if_unused=careful, if_empty=careful)
            )
        except amqp_errors.PreconditionFailed as exc:
            return f"RabbitMQ refused: {exc.reply_text}"
        return ""

    def _unbind(self, queue: _Watched) -> None:
        for found in queue.bindings:
            self._each(found, self.session.unbind)

    def _bind_again(self, queue: _Watched) -> None:
        for found in queue.bindings:
            self._each(found, self.session.bind)

    @staticmethod
    def _each(found: Mapping[str, Any], act: Callable[..., None]) -> None:
        binding = Binding(
            exchange=found["source"],
            queue=found["destination"],
            routing_key=found["routing_key"],
        )
        act(binding, found.get("arguments") or {})

    # -- the shadow

    def _bindings(self, queue: str) -> list[Binding]:
        return [binding for binding in self.topology.bindings if binding.queue == queue]

    def _raise_shadow(self, queue: Queue) -> None:
        name = shadow(self.topology.names, queue.name)
        kind = queue.arguments.get("x-queue-type", "quorum")
        arguments = {"x-queue-type": kind}
        if kind == "quorum":
            arguments["x-delivery-limit"] = NO_LIMIT
        self.session.declare_queue(Queue(name=name, arguments=arguments))
        for binding in self._bindings(queue.name):
            self.session.bind(
                Binding(exchange=binding.exchange, queue=name, routing_key=binding.routing_key)
            )

    def _move(self, name: str) -> int:
        moved = 0
        with connection.connection(self.app, timeout=self.settings.confirm_timeout) as conn:
            channel = conn.connection.channel()
            channel.auto_decode = False
            publisher = confirms.ConfirmChannel(self.app, timeout=self.settings.confirm_timeout)
            try:
                while batch := _take(channel, name):
                    self._pass_on(publisher, name, batch)
                    for message in batch:
                        channel.basic_ack(message.delivery_tag)
                    moved += len(batch)
            except (OSError, amqp_errors.ConnectionError) as exc:
                raise BrokerUnavailableError(
                    f"the connection broke while {name} was emptied: {type(exc).__name__}: {exc}; "
                    f"what it holds stays there, run manage.py events_declare again"
                ) from exc
            except (ValueError, OverflowError, RecursionError, amqp_errors.FrameSyntaxError) as exc:
                # py-amqp decodes headers while it reads; UnicodeDecodeError is a ValueError.
                raise TopologyError(
                    f"{name} holds a message whose headers cannot be read ({type(exc).__name__}: "
                    f"{exc}); take it out by RabbitMQ's management page, then run "
                    f"manage.py events_declare again: the others are safe there"
                ) from exc
            finally:
                publisher.close()
                # What was taken and not acked goes back into the shadow.
                with suppress(Exception):
                    channel.close()
        return moved

    def _pass_on(
        self, publisher: confirms.ConfirmChannel, name: str, batch: Sequence[amqp.Message]
    ) -> None:
        results = publisher.publish(
            [self._copy(message, name) for message in batch],
            mandatory=True,
            timeout=self.settings.confirm_timeout,
        )
        failed = next((result for result in results if result is not None), None)
        if failed is not None:
            raise TopologyError(
                f"a message of {name} could not be moved back: {failed}; it stays there (others "
                f"of its batch may double), run manage.py events_declare again"
            ) from failed

    def _copy(self, message: amqp.Message, fanout: str) -> Message:
        names = self.topology.names
        origin = message.delivery_info["exchange"]
        properties = {
            key: message.properties[key] for key in _PROPERTIES if key in message.properties
        }
        headers = message.properties.get("application_headers") or {}
        body = message.body
        return Message(
            exchange=origin if origin in (names.return_, names.replay) else fanout,
            routing_key=message.delivery_info["routing_key"],
            body=body.encode() if isinstance(body, str) else bytes(body),
            headers={key: value for key, value in headers.items() if not is_broker_header(key)},
            properties={**properties, "delivery_mode": 2},
            event_id=str(headers.get("event-id") or headers.get("id") or ""),
            name=message.delivery_info["routing_key"],
        )


def _take(channel: amqp.Channel, queue: str) -> list[amqp.Message]:
    batch: list[amqp.Message] = []
    while len(batch) < BATCH:
        message = channel.basic_get(queue)
        if message is None:
            break
        batch.append(message)
    return batch


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
