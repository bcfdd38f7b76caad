"""Which archived events match: one filter for commands, batches, the admin and your own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from django.db import connections
from django.db.models import OrderBy, Q, QuerySet
from django.db.models.functions import Coalesce, Right
from django.db.models.lookups import Exact

from ..databases import parts
from ..models import LENGTH, ArchivedEvent, FailureGroup, SearchValue, State, clean
from ..options import is_path
from ..reasons import Reason
from . import tables
from .search_values import as_text, declared_paths

#: Most search values whose events are read first.
FEW_VALUES: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A filter on archived events; an empty field matches everything.

    Values of one field are alternatives; all fields have to match.

    Attributes:
        ids: of events or of rows.
        search: values of ``SEARCH``, such as ``order_id=17`` and ``customer.email=ann@*``. Only
            values of the same path are alternatives.
        events: whole names; no patterns.
        exceptions: dotted names, or their last words.
        groups: ids of failure groups.
        since, until: of the last failure; *until* is excluded.
    """

    ids: Sequence[str] = ()
    handlers: Sequence[str] = ()
    events: Sequence[str] = ()
    exceptions: Sequence[str] = ()
    reasons: Sequence[str] = ()
    groups: Sequence[UUID] = ()
    search: Sequence[str] = ()
    since: datetime | None = None
    until: datetime | None = None
    state: State | None = State.ARCHIVED
    service: str = ""

    def filters(self) -> list[Reason]:
        """Describe the filters, without search values, which not everyone may see."""
        named = FailureGroup.objects.using(tables.database()).filter(pk__in=self.groups)
        paths = [SearchTerm.parse(term).path for term in self.search]
        values: dict[str, Iterable[Any]] = {
            "handler": self.handlers,
            "event": self.events,
            "exception": self.exceptions,
            "reason": self.reasons,
            "group": [group.title for group in named] if self.groups else (),
            "value": dict.fromkeys(paths),
            "since": [f"{self.since:%Y-%m-%d %H:%M %Z}"] if self.since else (),
            "until": [f"{self.until:%Y-%m-%d %H:%M %Z}"] if self.until else (),
        }
        return [Reason(f"filter-{kind}", value=name) for kind in values for name in values[kind]]

    def title(self, *others: Reason) -> Reason:
        """Describe the matching events; *others* are further filters."""
        filters = [*self.filters(), *others]
        return Reason("batch-filtered", filters=filters) if filters else Reason("batch-open")

    def queryset(self) -> QuerySet[ArchivedEvent]:
        """Return the matching events."""
        events = tables.rows()
        exact: dict[str, Any] = {
            "handler__in": self.handlers,
            "name__in": self.events,
            "reason__in": self.reasons,
            "group__in": self.groups,
            "last_failed_at__gte": self.since,
            "last_failed_at__lt": self.until,
            "state": self.state,
            "service": self.service,
        }
        events = events.filter(**{lookup: value for lookup, value in exact.items() if value})
        if self.ids:
            pks = [pk for pk in map(parse_uuid, self.ids) if pk is not None]
            events = events.filter(Q(pk__in=pks) | Q(event_id__in=self.ids))
        if self.exceptions:
            condition = Q()
            for name in self.exceptions:
                # SQLite's LIKE ignores case.
                last = Exact(Right("exception", len(name) + 1), f".{name}")
                condition |= Q(exception=name) | Q(last)
            events = events.filter(condition)
        paths: dict[str, list[SearchTerm]] = {}
        for term in map(SearchTerm.parse, self.search):
            paths.setdefault(term.path, []).append(term)
        for terms in paths.values():
            events = events.filter(matching(terms, events.db))
        return events

    def parts(self) -> Iterator[Selection]:
        """Yield selections that together match the same events, each with a bounded query."""
        for ids in parts(self.ids) if self.ids else [()]:
            yield replace(self, ids=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTerm:
    """A search for a value, or for the start of one.

    Attributes:
        path: ``""`` for any.
        start: match the values that begin with *value*.
    """

    path: str
    value: str
    start: bool = False

    @classmethod
    def parse(cls, text: str) -> SearchTerm:
        """Read ``path=value`` or ``path=start*``.

        A value that ends in ``*`` is found by its start, ``path=value**``.

        Raises:
            ValueError: it is neither.
        """
        path, equals, value = text.strip().partition("=")
        if not equals or not is_path(path) or not value.strip():
            raise ValueError(f"{text!r:.120} is not a search such as order_id=17 or email=ann@*")
        return cls._of(path, value)

    @classmethod
    def parse_any(cls, text: str) -> SearchTerm | None:
        """Read what a person types: a declared path with its value, or a value at any path."""
        path, equals, value = text.strip().partition("=")
        if equals and value.strip() and path in declared_paths():
            return cls._of(path, value)
        return cls._of("", text) if text.strip(" *") else None

    @classmethod
    def _of(cls, path: str, value: str) -> SearchTerm:
        value = value.strip()
        if not value.endswith("*"):
            return cls(path=path, value=as_text(value))
        # A value that was cut ends otherwise.
        return cls(path=path, value=clean(value[:-1])[: LENGTH - 1], start=True)

    def lookup(self, using: str) -> Q:
        """Match rows of :class:`~django_amqp_events.models.SearchValue`."""
        condition = starts_with("value", self.value, using) if self.start else Q(value=self.value)
        return condition & Q(path=self.path) if self.path else condition


def matching(
    terms: Iterable[SearchTerm], using: str, *, too_many: Callable[[], object] | None = None
) -> Q:
    """Match the archived events that have a value of one of the terms.

    The ids of a few events are read at once: with them, every database plans the query well.

    Args:
        too_many: for a page, called if more than :data:`FEW_VALUES` match. The result is then the
            events of the first of them, so that the time for any search is bounded.
    """
    condition = Q(pk__in=())
    for term in terms:
        # Each by itself: of alternatives PostgreSQL collects all entries before it returns one.
        values = SearchValue.objects.using(using).filter(term.lookup(using)).order_by()
        few = list(values.values_list("event_id", flat=True)[: FEW_VALUES + 1])
        if len(few) <= FEW_VALUES:
            condition |= Q(pk__in=set(few))
        elif too_many is None:
            condition |= Q(pk__in=values.values("event_id"))
        else:
            too_many()
            condition |= Q(pk__in=set(few[:FEW_VALUES]))
    return condition


def sort_few(order: Iterable[Any]) -> list[Any]:
    """Return the same order for a queryset of few rows, which are to be read and then sorted.

    No index has it. In the order of an index, PostgreSQL may read the whole table to find them.

    Args:
        order: names of columns; ``-`` is descending.
    """
    columns = ((column.removeprefix("-"), column.startswith("-")) for column in order)
    return [OrderBy(Coalesce(name, name), descending=down) for name, down in columns]


def starts_with(column: str, text: str, using: str | None = None) -> Q:
    """Match the beginning of a text column in the way that this database has an index for."""
    if connections[using or tables.database()].vendor == "postgresql":
        return Q(**{f"{column}__startswith": text})
    # SQLite's LIKE ignores case, so it ignores the index too.
    return Q(**{f"{column}__gte": text, f"{column}__lt": text + "\U0010ffff"})


def parse_uuid(text: str) -> UUID | None:
    """Return the UUID, or ``None`` if *text* is not one."""
    try:
        return UUID(text)
    except ValueError:
        return None
