"""Let PostgreSQL compress large texts and bodies with lz4, which takes a fraction of pglz's time.

Rows that exist stay as they are. A server before 14, or built without lz4, keeps pglz.
"""

from typing import Any

from django.db import migrations

LARGE = {
    "ArchivedEvent": ("body",),
    "ArchivedFailure": ("document",),
    "OutboxEvent": ("envelope", "body"),
}
HAS_LZ4 = (
    "SELECT 1 FROM pg_settings WHERE name = 'default_toast_compression' AND 'lz4' = ANY(enumvals)"
)


def _set(apps: Any, schema_editor: Any, model_name: str, method: str) -> None:
    connection = schema_editor.connection
    if connection.vendor != "postgresql":
        return
    with connection.cursor() as cursor:
        cursor.execute(HAS_LZ4)
        if cursor.fetchone() is None:
            return
    meta = apps.get_model("django_amqp_events", model_name)._meta  # noqa: SLF001 - public
    quote = schema_editor.quote_name
    for name in LARGE[model_name]:
        column = quote(meta.get_field(name).column)
        schema_editor.execute(
            f"ALTER TABLE {quote(meta.db_table)} ALTER COLUMN {column} SET COMPRESSION {method}"
        )


def _operation(model_name: str) -> migrations.RunPython:
    """Return an operation on one model's table, where a router lets the model be migrated."""

    def lz4(apps: Any, schema_editor: Any) -> None:
        _set(apps, schema_editor, model_name, "lz4")

    def default(apps: Any, schema_editor: Any) -> None:
        _set(apps, schema_editor, model_name, "default")

    return migrations.RunPython(lz4, default, hints={"model_name": model_name.lower()})


class Migration(migrations.Migration):
    # So that each table is locked for a moment, and not all of them at once.
    atomic = False

    dependencies = [
        ("django_amqp_events", "0003_mysql_collation"),
    ]

    operations = [_operation(model_name) for model_name in LARGE]
