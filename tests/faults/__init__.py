"""The fault table: what becomes of accepted events under each fault. `make faults` writes it.

A row (:mod:`tests.faults.rows`) is a fault, on a :class:`~tests.faults.world.World` of its own:
a broker's vhost, a database, a service with one event and two handlers, and its processes. All
counts come from ledgers: append-only files that publishers and handlers write, one per process,
each line on the disk before its writer goes on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rows import Row

#: Modules that declare rows, in the order of the page.
MODULES = ("workers", "brokers", "publishers", "databases", "topologies", "clusters")


def all_rows() -> dict[str, Row]:
    """Return every row by its name, in the order of the page."""
    from .rows import ROWS

    for module in MODULES:
        import_module(f"{__name__}.{module}")
    # Whichever was imported first.
    return dict(sorted(ROWS.items(), key=lambda item: MODULES.index(item[1].module)))


def rows_of(module: str, *groups: str) -> list[str]:
    """Return the names of the rows that a module declares, all or those of some groups."""
    return [
        name
        for name, row in all_rows().items()
        if row.module == module and (not groups or row.group in groups)
    ]
