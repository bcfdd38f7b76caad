"""Create the multi-column statistics that PostgreSQL needs for the filters of the archive."""

from itertools import combinations
from typing import Any

from django.db import migrations

#: Pairs of what the archive's list filters by.
STATISTICS = {
    f"amqp_events_{one}_{other}": (one, other)
    for one, other in combinations(("handler", "name", "exception", "reason"), 2)
}


def create(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor != "postgresql":
        return
    model = apps.get_model("django_amqp_events", "ArchivedEvent")
    table = schema_editor.quote_name(model._meta.db_table)  # noqa: SLF001 - Django's public _meta
    # It takes columns for independent otherwise, so that of filters which exclude each other it
    # reads the list's order to the end of the table, as if the first page were soon found. ANALYZE,
    # which autovacuum runs by and by, fills them. A statistic of all four would be too coarse.
    for name, columns in STATISTICS.items():
        schema_editor.execute(
            f"CREATE STATISTICS IF NOT EXISTS {name} (mcv) ON {', '.join(columns)} FROM {table}"
        )


def drop(apps: Any, schema_editor: Any) -> None:  # noqa: ARG001
    if schema_editor.connection.vendor == "postgresql":
        for name in STATISTICS:
            schema_editor.execute(f"DROP STATISTICS IF EXISTS {name}")


class Migration(migrations.Migration):
    dependencies = [
        ("django_amqp_events", "0001_initial"),
    ]

    operations = [
        # With the model's name: a router that sends it elsewhere has its say.
        migrations.RunPython(create, drop, hints={"model_name": "archivedevent"}),
    ]
