"""Count what a user should know before a replay: poison, possible duplicates, superseded events.

A replay is superseded if ``newest`` would skip it, since a newer event was handled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final
from uuid import UUID

from django.db import Error

from ..conf import get_settings
from ..databases import parts
from ..declare.newest import Version
from ..declare.registry import Handler
from ..exceptions import ControlFlow
from ..models import LatestVersion, Replay, Revision
from ..worker import binding, inbox
from . import tables
from .eligibility import CHUNK, Examined

#: Most bytes of bodies that are decoded for one page, which takes some seconds.
BYTES: Final = 64 * 1024 * 1024


def count_risks(examined: Examined, *, forced: bool = False) -> dict[str, int | None]:
    """Count, among the events that would be replayed, those that need a warning.

    Args:
        forced: a forced replay publishes again what the one before it did, and is not skipped.

    Returns:
        ``poison``, ``unconfirmed`` (may already be published), ``succeeded`` (have a successful
        replay), ``edited`` (have a revision, which is not published) and ``superseded`` (would be
        skipped; ``None`` if that cannot be read).
    """
    events = examined.events.values()
    confirmed = [event.pk for event in events if not event.unconfirmed]
    return {
        "poison": sum(event.reason == "poison" for event in events),
        "unconfirmed": len(events) - len(confirmed),
        "succeeded": _count(Replay, examined.events, state=Replay.State.SUCCEEDED),
        # A replay that is not confirmed is published again as it was.
        "edited": 0 if forced else _count(Revision, confirmed),
        "superseded": 0 if forced else count_superseded(examined.handlers),
    }


def _count(model: type[Replay | Revision], events: Iterable[UUID], **wanted: object) -> int:
    """Count the events that have such a row."""
    rows = model._default_manager.using(tables.database()).filter(**wanted)  # noqa: SLF001 - Django's public name
    return sum(
        rows.filter(event__in=part).values("event").distinct().count()
        for part in parts(list(events), CHUNK)
    )


def count_superseded(handlers: Mapping[UUID, Handler]) -> int | None:
    """Return how many events their handlers would skip, ``None`` if that cannot be read.

    A page waits for it, so it is not read if the bodies have more than :data:`BYTES`.

    Args:
        handlers: the handler of each event; only those with ``newest`` are read.
    """
    newest = {pk: handler for pk, handler in handlers.items() if handler.newest}
    total, size = 0, 0
    for part in parts(list(newest), CHUNK):
        for ids in tables.in_chunks(tables.rows().filter(pk__in=part)):
            versions = []
            # Not a list: an event keeps its payload, which takes many times its bytes.
            for event in tables.rows().filter(pk__in=ids).iterator():
                if (size := size + event.body_size) > BYTES:
                    return None
                handler = newest[event.pk]
                versions.append((handler, _version(event.name, event.payload or {}, handler)))
            found = _count_versions(versions)
            if found is None:
                return None
            total += found
    return total


def is_superseded(name: str, payload: Mapping[str, Any], handler: Handler) -> bool | None:
    """Return True if the handler has handled an event that is as new, ``None`` if unknown.

    Args:
        name: of the event.
    """
    found = _count_versions([(handler, _version(name, payload, handler))])
    return None if found is None else found > 0


def _version(name: str, payload: Mapping[str, Any], handler: Handler) -> Version | None:
    try:
        return binding.version_of(handler, binding.upcast(handler, name, (), payload))
    except ControlFlow:  # the handler archives it
        return None


def _count_versions(versions: Iterable[tuple[Handler, Version | None]]) -> int | None:
    """Count versions that are not newer than the handled ones, with one query per database."""
    settings = get_settings()
    by_alias: dict[str, list[tuple[UUID, Version]]] = {}
    for handler, version in versions:
        if version is not None:
            key = inbox.latest_key(settings.service, handler, version)
            by_alias.setdefault(inbox.database(handler, settings), []).append((key, version))
    count = 0
    for alias, keyed in by_alias.items():
        try:
            latest = LatestVersion.objects.using(alias).in_bulk({key for key, _ in keyed})
        except Error:
            return None
        for key, version in keyed:
            row = latest.get(key)
            if row is None or row.is_time != version.is_time:
                continue
            if version.number <= row.version:
                count += 1
    return count
