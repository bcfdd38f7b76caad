"""Pages over many rows: counted to a cap, distinct values without a scan."""

from __future__ import annotations

from typing import Any, Final

from django.core.paginator import Paginator
from django.db import connections
from django.db.models import QuerySet
from django.utils.functional import cached_property

#: Rows that a list counts and pages through at most.
CAP: Final = 5_000
#: Distinct values that a filter offers at most.
VALUES: Final = 100


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """A paginator that counts at most :data:`CAP` rows."""

    @cached_property
    def _found(self) -> int:
        rows: Any = self.object_list
        return count(rows, CAP)

    @property
    def capped(self) -> bool:
        """Return True if there are more rows than were counted."""
        return self._found > CAP

    @cached_property
    def count(self) -> int:
        return min(self._found, CAP)


def count(rows: QuerySet[Any], cap: int) -> int:
    """Count rows, no further than one more than *cap*."""
    return rows.order_by()[: cap + 1].count()


def distinct(rows: QuerySet[Any], column: str) -> list[str]:
    """Return the distinct values of an indexed column, the first :data:`VALUES` of them.

    One look into the index for each value ("loose index scan"), where SELECT DISTINCT would read
    every entry.
    """
    connection = connections[rows.db]
    quote = connection.ops.quote_name
    table = quote(rows.model._meta.db_table)  # noqa: SLF001 - Django's public _meta
    name = quote(rows.model._meta.get_field(column).column)  # noqa: SLF001
    sql = (
        f"WITH RECURSIVE found(value, number) AS ("  # noqa: S608 - names of our own columns
        f"SELECT MIN({name}), 1 FROM {table} UNION ALL "
        f"SELECT (SELECT MIN({name}) FROM {table} WHERE {name} > found.value), number + 1 "
        f"FROM found WHERE found.value IS NOT NULL AND number < %s"
        f") SELECT value FROM found WHERE value IS NOT NULL"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [VALUES])
        return [value for (value,) in cursor.fetchall()]
