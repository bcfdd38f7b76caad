"""Signals, in the past tense: each is sent after the fact, with ``sender`` the service's name.

``event_published``
    ``event_id``, ``name``, after the confirm.
``event_unrouted``
    ``event_id``, ``name``: confirmed, but no queue was bound for it (``UNROUTED``).
``event_retried``
    ``handler``, ``event`` (:class:`~django_amqp_events.ReceivedEvent`), ``exception`` (text),
    ``due_at``; sent in the worker's main process once the broker confirmed the delayed copy.
``event_archived``
    ``handler`` (``None`` for an unreadable message), ``event`` (or ``None``), ``reason``,
    ``exception``; sent in the worker's main process once the broker confirmed the archive copy.
"""

from __future__ import annotations

from django.dispatch import Signal

event_published = Signal()
event_unrouted = Signal()
event_retried = Signal()
event_archived = Signal()
