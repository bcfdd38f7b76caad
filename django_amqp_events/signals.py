"""Signals in the past tense, sent after the fact with the service's name as ``sender``.

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
    ``due_at``; sent in the worker's main process after the broker confirmed the delayed copy.
``event_archived``
    ``handler`` (``None`` for an unreadable message), ``event`` (or ``None``), ``reason``,
    ``exception``; sent in the worker's main process after the broker confirmed the archive copy.
``event_replayed``
    ``handler``, ``event``: RabbitMQ has confirmed the replay of an archived event; sent in the
    process that replays.
``event_skipped``
    ``handler``, ``event``: a handler with ``once`` has already handled it; sent where handlers run.
``event_hanging``
    ``handler``, ``event``, ``seconds`` that the handler has been running, ``pid`` of the process;
    sent by a thread of the worker's main process, again each time the seconds have doubled.
``alert_raised``, ``alert_ended``
    ``kind``, ``key``, ``text``, ``since``; sent once when an alert begins and once when it ends, by
    the process that notices it first: ``events_mirror`` or ``events_alerts``. docs/alerts.md lists
    the kinds.
"""

from __future__ import annotations

from django.dispatch import Signal

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
