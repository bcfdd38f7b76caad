"""What the tables need on each kind of database, for the first migration."""

from itertools import combinations
from typing import Any, Final

from django.db import router

#: utf8mb4_bin pads with blanks: "a" equals "a ", and "a\n" sorts before "a", so that a search for
#: values that begin with "a" misses it.
MARIADB, MYSQL = "utf8mb4_nopad_bin", "utf8mb4_0900_bin"
#: What the archive's list filters by.
FILTERS: Final = ("handler", "name", "exception", "reason")


def collate(_apps: Any, schema_editor: Any) -> None:
    """Let MySQL and MariaDB store all of Unicode in the next tables, and compare byte by byte.

    Event ids, queues and handlers are then equal where RabbitMQ and the other databases say so.
    """
    connection = schema_editor.connection
    if connection.vendor == "mysql":
        collation = MARIADB if connection.mysql_is_mariadb else MYSQL
        schema_editor.sql_create_table += f" CHARACTER SET utf8mb4 COLLATE {collation}"


def correlate(apps: Any, schema_editor: Any) -> None:
    """Let PostgreSQL see which values of the archive's filters occur together.

    It takes columns for independent otherwise, so that of filters which exclude each other it reads
    the list's order to the end of the table, as if the first page were soon found. ANALYZE, which
    autovacuum runs by and by, fills the statistics. One of all four would be too coarse.
    """
    table = _table(apps, schema_editor, "ArchivedEvent")
    if table and schema_editor.connection.vendor == "postgresql":
        for one, other in combinations(FILTERS, 2):
            name = f"amqp_events_{one}_{other}"
            schema_editor.execute(f"CREATE STATISTICS {name} (mcv) ON {one}, {other} FROM {table}")


def _table(apps: Any, schema_editor: Any, model_name: str) -> str:
    """Return the quoted table of a model, ``""`` if a router keeps it out of this database."""
    model = apps.get_model("django_amqp_events", model_name)
    if not router.allow_migrate_model(schema_editor.connection.alias, model):
        return ""
    table: str = schema_editor.quote_name(model._meta.db_table)  # noqa: SLF001 - public
    return table
