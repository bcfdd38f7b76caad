"""Signals, in the past tense: each is sent after the fact, with ``sender`` the service's name.

``event_published``
    ``event_id``, ``name``, after the confirm. With the outbox it is sent in the process that got
    the confirm: the publisher, in another thread where it took long, or a relay.
``event_postponed``
    ``event_id``, ``name``, ``error`` (text): committed to the outbox, and not published yet. A
    relay tries it again; ``event_published`` follows, in the relay's process.
``event_unrouted``
    ``event_id``, ``name``: confirmed, but no queue was bound for it (``UNROUTED``).
``event_retried``
    ``handler``, ``event`` (:class:`~django_amqp_events.ReceivedEvent`), ``exception`` (text),
    ``due_at``; sent in the worker's main process once the broker confirmed the delayed copy.
``event_archived``
    ``handler`` (``None`` for an unreadable message), ``event`` (or ``None``), ``reason``,
    ``exception``; sent in the worker's main process once the broker confirmed the archive copy.
``event_skipped``
    ``handler``, ``event``: a handler with ``once`` had handled it already; sent where handlers run.
``event_hanging``
    ``handler``, ``event``, ``seconds`` that it has been running, ``pid`` of the process; sent in
    the worker's main process, by a thread that watches; again each time the seconds have doubled.
``alert_raised``, ``alert_ended``
    ``kind``, ``key``, ``text``, ``since``; sent once where a trouble begins and once where it is
    over, by whoever saw it first: ``events_mirror``, its thread that takes the figures, or
    ``events_alerts``. docs/alerts.md lists the kinds.
"""

from __future__ import annotations

from django.dispatch import Signal

event_published = Signal()
event_postponed = Signal()
event_unrouted = Signal()
event_retried = Signal()
event_archived = Signal()
event_skipped = Signal()
event_hanging = Signal()
alert_raised = Signal()
alert_ended = Signal()
