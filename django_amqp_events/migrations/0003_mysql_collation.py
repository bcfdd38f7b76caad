"""Let MySQL and MariaDB store all of Unicode, and compare texts byte by byte.

Event ids, queues and handlers are then equal where RabbitMQ and the other databases say so.
"""

from copy import copy
from typing import Any

from django.db import OperationalError, migrations, models, router

# utf8mb4_bin pads with blanks: "a" equals "a ", and "a\n" sorts before "a", so that a search for
# values that begin with "a" misses it.
MARIADB, MYSQL = "utf8mb4_nopad_bin", "utf8mb4_0900_bin"

# MariaDB changes a table under a lock of the tables that refer to it, and does not notice when the
# transaction that holds one waits for the changed table: a mirror, for example, that has waited for
# the tables. The one of the two whose time-out is shorter gives up. Seconds, and attempts:
LOCK_WAIT, ATTEMPTS = 1, 60
# ER_LOCK_WAIT_TIMEOUT, ER_LOCK_DEADLOCK
LOCKED = (1205, 1213)


def collate(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    if connection.vendor != "mysql":
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@SESSION.innodb_lock_wait_timeout")
        (before,) = cursor.fetchone()
        cursor.execute("SET SESSION innodb_lock_wait_timeout = %s", [LOCK_WAIT])
        try:
            _collate(apps, schema_editor)
        finally:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = %s", [before])


def _collate(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    for model in apps.get_app_config("django_amqp_events").get_models():
        meta = model._meta  # noqa: SLF001 - Django's public _meta
        if meta.proxy or not router.allow_migrate_model(connection.alias, model):
            continue
        columns, values = [], []
        for field in meta.local_concrete_fields:
            if isinstance(field, (models.CharField, models.TextField)):
                changed = copy(field)
                changed.db_collation = MARIADB if connection.mysql_is_mariadb else MYSQL
                definition, params = schema_editor.column_sql(model, changed)
                columns.append(f"MODIFY {schema_editor.quote_name(field.column)} {definition}")
                values += params
        if columns:
            table = schema_editor.quote_name(meta.db_table)
            _execute(schema_editor, f"ALTER TABLE {table} {', '.join(columns)}", values)


def _execute(schema_editor: Any, statement: str, values: list[Any]) -> None:
    """Repeat a statement that gives way to other transactions."""
    for _ in range(ATTEMPTS - 1):
        try:
            schema_editor.execute(statement, values)
        except OperationalError as exc:
            if exc.args[0] not in LOCKED:
                raise
        else:
            return
    schema_editor.execute(statement, values)


class Migration(migrations.Migration):
    dependencies = [
        ("django_amqp_events", "0002_postgresql_statistics"),
    ]

    operations = [
        # MySQL has no DDL in transactions.
        migrations.RunPython(collate, migrations.RunPython.noop, atomic=False),
    ]
