"""Which archived events a newer one has superseded, so that a replay would be skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from django.db import Error

from ..conf import get_settings
from ..databases import parts
from ..declare.registry import Handler
from ..exceptions import ControlFlow
from ..models import LatestVersion
from ..worker import binding, inbox
from . import tables
from .eligibility import CHUNK

#: Most bytes of bodies that are decoded for one page, which takes some seconds.
BYTES: Final = 64 * 1024 * 1024


def count_superseded(handlers: Mapping[UUID, Handler]) -> int | None:
    """Return how many events their handlers would skip, ``None`` if that cannot be read.

    A page waits for it, so it is not read if the bodies have more than :data:`BYTES`.

    Args:
        handlers: the handler of each event; only those with ``newest`` are read.
    """
    newest = {pk: handler for pk, handler in handlers.items() if handler.newest}
    count, size = 0, 0
    for part in parts(list(newest), CHUNK):
        for ids in tables.in_chunks(tables.rows().filter(pk__in=part)):
            # Not a list: an event keeps its payload, which takes many times its bytes.
            for event in tables.rows().filter(pk__in=ids).iterator():
                if (size := size + event.body_size) > BYTES:
                    return None
                found = is_superseded(event.name, event.payload or {}, newest[event.pk])
                if found is None:
                    return None
                count += found
    return count


def is_superseded(name: str, payload: Mapping[str, Any], handler: Handler) -> bool | None:
    """Return True if the handler has handled an event that is as new, ``None`` if unknown.

    Args:
        name: of the event.
    """
    try:
        version = binding.version_of(handler, binding.upcast(handler, name, (), payload))
    except ControlFlow:  # the handler archives it
        return False
    if version is None:
        return False
    settings = get_settings()
    key = inbox.latest_key(settings.service, handler, version)
    rows = LatestVersion.objects.using(inbox.database(handler, settings))
    try:
        return rows.filter(pk=key, is_time=version.is_time, version__gte=version.number).exists()
    except Error:
        return None
