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
from contextlib import nullcontext
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from django import dispatch

from .databases import user_code
from .logs import get_logger

logger = get_logger(__name__)


class Signal(dispatch.Signal):
    """A signal about what has happened: no receiver can undo it, so no error of one is raised."""

    #: How many receivers use no database: those of the metrics.
    quiet = 0

    def send_robust(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        """Call the receivers; log their errors."""
        if not self.has_listeners(sender):
            return []
        try:
            with user_code() if len(self.receivers) > self.quiet else nullcontext():
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
        for _receiver, response in responses:
            # It is meant for the handler that publishes, and comes only once.
            if isinstance(response, SoftTimeLimitExceeded):
                raise response
        return responses


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
