"""Store the search values of archived events again, after ``SEARCH`` or ``REDACT`` changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from django.db import transaction
from django.db.models import Prefetch, QuerySet

from ..callables import nothing
from ..databases import check_commits
from ..models import ArchivedEvent, Revision, SearchValue
from . import search_values, tables

_COLUMNS: Final = ("event_id", "path", "value")


@dataclass(slots=True, kw_only=True)
class Indexed:
    """The result of a rebuild: events examined, and those whose values were wrong."""

    events: int = 0
    changed: int = 0
    stopped: bool = False


def rebuild(
    rows: QuerySet[ArchivedEvent],
    *,
    progress: Callable[[Indexed], object] = nothing,
    stop: Callable[[], bool] = nothing,
) -> Indexed:
    """Correct the search values of events, in the order of their ids, in short transactions.

    Everything else may run meanwhile. A process with the same settings has stored the values of
    the events that it adds.

    Args:
        rows: of this service, whose declarations name the values.

    Raises:
        ConfigurationError: AMQP_EVENTS is wrong, or nothing would be committed.
    """
    check_commits(tables.database())
    result = Indexed()
    for ids in tables.in_chunks(rows):
        if stop():
            result.stopped = True
            break
        result.changed += _correct(ids)
        result.events += len(ids)
        progress(result)
    return result


@tables.retry_on_conflict
def _correct(ids: list[UUID]) -> int:
    """Update the search values of events; return how many events changed."""
    using = tables.database()
    with transaction.atomic(using=using):
        # Neither pruned nor edited meanwhile.
        locked = tables.lock(ids)
        rows = SearchValue.objects.using(using).filter(event_id__in=locked)
        stored = {tuple(value): pk for pk, *value in rows.values_list("pk", *_COLUMNS)}
        searched = [pk for pk, event in locked.items() if search_values.paths_of(event.name)]
        events = tables.rows().filter(pk__in=searched).defer("detail")
        # Without a database, a router might choose a replica.
        revisions = Revision.objects.using(using)
        current = {
            value
            for event in events.prefetch_related(Prefetch("revision_set", revisions))
            for value in search_values.in_event(event, event.revision_set.all())
        }
        search_values.store(current - stored.keys(), using=using)
        if outdated := [pk for value, pk in stored.items() if value not in current]:
            rows.filter(pk__in=outdated).delete()
        return len({event_id for event_id, *_ in current ^ stored.keys()})
