"""The values by which archived events are found, read from their payloads and stored.

An event's declaration names their paths with ``SEARCH``. Values that the redaction hook changes or
removes are not stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final
from uuid import UUID

from django.db.models import Prefetch

from ..conf import get_settings
from ..declare.registry import get_registry
from ..exceptions import ConfigurationError
from ..models import LENGTH, ArchivedEvent, Revision, SearchValue, clean
from ..options import suggestion
from ..reasons import Reason
from . import redaction, tables

VALUES_PER_PATH: Final = 100

#: A path and a value; and those of an event, by its id.
Pair = tuple[str, str]
Value = tuple[UUID, str, str]


def paths_of(name: str) -> tuple[str, ...]:
    """Return the paths that are searched in an event, by its name."""
    event = get_registry().events.get(name)
    return event.search if event is not None else ()


def declared_paths() -> list[str]:
    """Return the paths of all events of this service, in the order of their declaration."""
    events = get_registry().events.values()
    return list(dict.fromkeys(path for event in events for path in event.search))


def check_paths(searched: Iterable[str]) -> None:
    """Raise ConfigurationError for a path that no event declares."""
    known = declared_paths()
    for path in searched:
        if path not in known:
            raise ConfigurationError(
                f"no event has {path!r} in its SEARCH{suggestion(path, known)}"
            )


def as_text(value: object) -> str:
    """Return a value as it is stored and compared; ``""`` for what is not a value.

    Texts of more than 255 characters are cut, so those that begin alike are one value.
    """
    if value is None or isinstance(value, Mapping):
        return ""
    text = json.dumps(value) if isinstance(value, (bool, int, float)) else str(value)
    return clean(text.strip(), LENGTH)


def in_payload(name: str, payload: Mapping[str, Any]) -> list[Pair]:
    """Return the values of an event's payload that may be stored."""
    values = pairs(paths_of(name), payload)
    if not values:
        return values
    shown = redaction.redact(name, payload)
    if shown is payload:
        return values
    if isinstance(shown, Reason):
        return []
    visible = set(pairs(paths_of(name), shown))
    return [pair for pair in values if pair in visible]


def in_event(event: ArchivedEvent, revisions: Iterable[Revision] = ()) -> list[Value]:
    """Return the values of an event and of its edited payloads.

    A body above ``MAX_BODY`` is not decoded, as in a worker.
    """
    if not paths_of(event.name):
        return []
    own = event.payload if event.body_size <= get_settings().max_body else None
    payloads = (own or {}, *(revision.payload for revision in revisions))
    values = (pair for payload in payloads for pair in in_payload(event.name, payload))
    return [(event.pk, *pair) for pair in dict.fromkeys(values)]


def store(values: Iterable[Value], *, using: str) -> None:
    """Insert values; those that exist stay."""
    SearchValue.objects.using(using).bulk_create(
        (SearchValue(event_id=pk, path=path, value=value) for pk, path, value in values),
        ignore_conflicts=True,
    )


def pairs(wanted: Iterable[str], payload: Mapping[str, Any]) -> list[Pair]:
    """Return the values of a payload at some paths."""
    return [
        (path, value)
        for path in wanted
        for value in islice(dict.fromkeys(_values(payload, path.split("."))), VALUES_PER_PATH)
    ]


def _values(value: Any, keys: Sequence[str]) -> Iterator[str]:
    """Yield the values below some keys; a list stands for each of its elements."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _values(item, keys)
    elif keys:
        if isinstance(value, Mapping) and keys[0] in value:
            yield from _values(value[keys[0]], keys[1:])
    elif text := as_text(value):
        yield text


# -- repairing ----------------------------------------------------------------------------


@tables.retry_on_conflict
def correct(ids: list[UUID]) -> int:
    """Store the search values of events of this service again; return how many events changed.

    For :func:`.tables.repair`, after ``SEARCH`` or ``REDACT`` changed. A process with the same
    settings has stored the values of the events that it adds.
    """
    using = tables.database()
    # Neither pruned nor edited meanwhile.
    with tables.locking(ids) as locked:
        rows = SearchValue.objects.using(using).filter(event_id__in=locked)
        stored = {
            tuple(value): pk for pk, *value in rows.values_list("pk", "event_id", "path", "value")
        }
        searched = [pk for pk, event in locked.items() if paths_of(event.name)]
        events = tables.rows().filter(pk__in=searched).defer("detail")
        # Without a database, a router might choose a replica.
        revisions = Revision.objects.using(using)
        current = {
            value
            for event in events.prefetch_related(Prefetch("revision_set", revisions))
            for value in in_event(event, event.revision_set.all())
        }
        store(current - stored.keys(), using=using)
        if outdated := [pk for value, pk in stored.items() if value not in current]:
            rows.filter(pk__in=outdated).delete()
        return len({event_id for event_id, *_ in current ^ stored.keys()})
