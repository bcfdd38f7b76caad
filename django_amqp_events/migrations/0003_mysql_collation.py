"""Let MySQL and MariaDB store all of Unicode, and compare texts byte by byte.

Event ids, queues and handlers are then equal where RabbitMQ and the other databases say so.
"""

from copy import copy
from typing import Any

from django.db import migrations, models, router

# utf8mb4_bin pads with blanks: "a" equals "a ", and "a\n" sorts before "a", so that a search for
# values that begin with "a" misses it.
MARIADB, MYSQL = "utf8mb4_nopad_bin", "utf8mb4_0900_bin"


def collate(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    if connection.vendor != "mysql":
        return
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
            schema_editor.execute(f"ALTER TABLE {table} {', '.join(columns)}", values)


class Migration(migrations.Migration):
    dependencies = [
        ("django_amqp_events", "0002_postgresql_statistics"),
    ]

    operations = [
        # MySQL has no DDL in transactions.
        migrations.RunPython(collate, migrations.RunPython.noop, atomic=False),
    ]
