"""Which archived events a newer one has superseded, so that a replay would be skipped."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from django.db import DatabaseError

from ..conf import get_settings
from ..databases import parts
from ..declare.registry import Handler
from ..exceptions import ControlFlow
from ..models import ArchivedEvent, LatestVersion
from ..worker import binding, inbox
from . import tables
from .eligibility import CHUNK


def count_superseded(handlers: Mapping[UUID, Handler]) -> int | None:
    """Return how many events their handlers would skip, ``None`` if that cannot be read.

    Args:
        handlers: the handler of each event; only those with ``newest`` are read.
    """
    newest = {pk: handler for pk, handler in handlers.items() if handler.newest}
    try:
        return sum(
            is_superseded(event, newest[event.pk])
            for part in parts(list(newest), CHUNK)
            for event in tables.rows().in_bulk(part).values()
        )
    except DatabaseError:
        return None


def is_superseded(event: ArchivedEvent, handler: Handler) -> bool:
    """Return True if the handler has handled an event that is as new as this one.

    Raises:
        DatabaseError: the handler's database is unreachable.
    """
    try:
        payload = binding.upcast(handler, event.name, (), event.payload or {})
        version = binding.version_of(handler, payload)
    except ControlFlow:  # the handler archives it
        return False
    if version is None:
        return False
    settings = get_settings()
    key = inbox.latest_key(settings.service, handler, version)
    rows = LatestVersion.objects.using(inbox.database(handler, settings))
    return rows.filter(pk=key, is_time=version.is_time, version__gte=version.number).exists()
