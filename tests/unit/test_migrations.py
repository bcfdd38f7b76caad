"""Our migrations in projects that change what Django makes of fields."""

from __future__ import annotations

from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader

from django_amqp_events.models.base import PartialIndex


def test_migrations_have_ordinary_parts_only() -> None:
    """Other tools (linters, backends, patches of Django) know these."""
    loader = MigrationLoader(None)
    ours = [key for key in loader.graph.nodes if key[0] == "django_amqp_events"]
    kinds = {type(operation) for key in ours for operation in loader.get_migration(*key).operations}
    assert kinds == {migrations.CreateModel, migrations.RunPython}
    state = loader.project_state(ours)
    for model in (each for key, each in state.models.items() if key[0] == "django_amqp_events"):
        for name, field in model.fields.items():
            plain = field.deconstruct()[1].startswith("django.db.models.")
            assert plain, (model.name, name)
            assert not isinstance(field, models.GeneratedField), (model.name, name)
            assert field.db_default is models.NOT_PROVIDED, (model.name, name)
        for constraint in model.options["constraints"]:
            assert type(constraint) is models.UniqueConstraint
            assert constraint.condition is None
            assert not constraint.expressions
        for index in model.options["indexes"]:
            # MySQL has no conditions, of which Django warns.
            assert type(index) in (models.Index, PartialIndex)
            assert (index.condition, index.expressions, index.include) == (None, (), ())
