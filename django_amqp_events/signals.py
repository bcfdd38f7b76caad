"""Signals in the past tense, sent after the fact with the service's name as ``sender``.

An error of a receiver is logged, not raised; a database error in an open transaction undoes what
the receivers of that signal have written there, and nothing else. SystemExit is raised in the main
thread only. Celery's SoftTimeLimitExceeded is raised when all receivers have run. Async receivers
do not run where the sending thread has an event loop, as in ``publish()`` without ``await``.

``event_published``
    ``event_id``, ``name``: RabbitMQ has confirmed the event. With the outbox it is sent in the
    process that received the confirm: the publisher, possibly in another thread, or a relay.
``event_postponed``
    ``event_id``, ``name``, ``error`` (text): committed to the outbox, but not published yet. A
    relay tries again; ``event_published`` follows in the relay's process.
``event_unrouted``
    ``event_id``, ``name``: confirmed, but no queue was bound for it (``UNROUTED``).
``event_retried``
    ``handler``, ``event`` (:class:`~django_amqp_events.ReceivedEvent`), ``exception`` (text),
    ``due_at``; sent in the pool process after the broker confirmed the delayed copy.
``event_archived``
    ``handler`` (``None`` for an unreadable message), ``event`` (or ``None``), ``reason``,
    ``exception``; sent in the pool process after the broker confirmed the archive copy.
``event_replayed``
    ``handler``, ``event``: RabbitMQ has confirmed the replay of an archived event; sent in the
    process that replays.
``event_skipped``
    ``handler``, ``event``, ``superseded``: a handler with ``once`` has already handled it or, if
    ``superseded`` is true, a newer event (``newest``); sent where handlers run.
``event_hanging``
    ``handler``, ``event``, ``seconds`` that the handler has been running, ``pid`` of the process.
    If several events share a job, the first. Sent by a thread of the worker's main process, again
    each time the seconds have doubled.
``alert_raised``, ``alert_ended``
    ``kind``, ``key``, ``title``, ``text``, ``since``, ``runbook`` (a URL); sent once when an alert
    begins and once when it ends, by the ``events_mirror`` that notices it first.
    docs/alerts.md lists the kinds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from django import dispatch
from django.db import Error, connections, transaction

from .databases import in_transaction

from .logs import get_logger

logger = get_logger(__name__)


class Signal(dispatch.Signal):
    """A signal about what has happened: no receiver can undo it, so no error of one is raised."""

    def send_robust(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        """Call the receivers; log their errors."""
        if not self.has_listeners(sender):
            return []
        try:
            with savepoints():
                responses = super().send_robust(sender, **named)
        except RuntimeError:
            # Django runs async receivers through async_to_sync.
            logger.exception(
                "async receivers of a signal did not run, since this thread has an event loop; "
                "publish with apublish()"
            )
            return []
        except SystemExit:
            if threading.current_thread() is threading.main_thread():
                raise  # also of a signal handler
            # It would end no more than this thread, such as that of the relay, and silently.
            logger.exception("a receiver of a signal raised SystemExit")
            return []
        _close_broken()
        for _receiver, response in responses:
            # It is meant for the handler that publishes, and comes only once.
            if isinstance(response, SoftTimeLimitExceeded):
                raise response
        return responses


@contextmanager
def savepoints() -> Iterator[None]:
    """Give user code a savepoint in each open transaction, which its errors would break."""
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block:
                savepoint: Any = transaction.atomic(using=connection.alias)
                # To user code, a test's transaction is none, as to Django's durable=True.
                savepoint._from_testcase = not in_transaction(connection)  # noqa: SLF001
                stack.enter_context(suppress(Error))
                with suppress(Error):  # the transaction is broken already
                    stack.enter_context(savepoint)
        yield


def _close_broken() -> None:
    """Close this thread's connections that receivers have lost, on all databases.

    The thread may be one of ours, in which no request ends: each later query would fail too.
    """
    for connection in connections.all(initialized_only=True):
        # One in a transaction belongs to the caller.
        held = connection.in_atomic_block or not connection.autocommit
        if held or connection.connection is None or not connection.errors_occurred:
            continue
        # As Django does at the end of a request.
        if connection.is_usable():
            connection.errors_occurred = False
        else:
            connection.close()


event_published = Signal()
event_postponed = Signal()
event_unrouted = Signal()
event_retried = Signal()
event_archived = Signal()
event_replayed = Signal()
event_skipped = Signal()
event_hanging = Signal()
alert_raised = Signal()
alert_ended = Signal()
