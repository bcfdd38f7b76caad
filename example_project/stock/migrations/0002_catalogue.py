"""Fill the shelves."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from example_project.catalogue import CATALOGUE


def fill(apps: Any, _schema_editor: Any) -> None:
    product = apps.get_model("stock", "Product")
    product.objects.bulk_create(
        product(sku=item.sku, name=item.name, available=5_000) for item in CATALOGUE
    )


class Migration(migrations.Migration):
    dependencies = [("stock", "0001_initial")]
    operations = [migrations.RunPython(fill, migrations.RunPython.noop, elidable=True)]
