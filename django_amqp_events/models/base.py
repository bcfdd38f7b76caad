"""Column types and base classes of the models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.db import models

from ..databases import Moment as Moment  # noqa: PLC0414 - a re-export, for mypy
from ..reasons import Reason

#: Characters of the texts that lists, filters and indexes use.
LENGTH: Final = 255


if TYPE_CHECKING:
    _CharField = models.CharField[str, str]
    _TextField = models.TextField[str, str]
    _ReasonField = models.TextField[Reason | str | None, Reason | None]
else:
    _CharField = models.CharField
    _TextField = _ReasonField = models.TextField


class ChoiceField(_CharField):
    """A value of a ``TextChoices``; migrations leave the choices out."""

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        kwargs.pop("choices", None)
        return name, "django.db.models.CharField", args, kwargs


class DocumentField(_TextField):
    """A long text, such as JSON or a traceback.

    For several rows, Django passes PostgreSQL each column as an array, and psycopg escapes the
    quotes and backslashes of each element one by one, in Python. If a field has a placeholder
    of its own, Django passes all values of the INSERT one by one instead.
    """

    def get_placeholder(self, _value: object, _compiler: object, _connection: object) -> str:
        return "%s"

    def get_placeholder_sql(
        self, value: Any, compiler: Any, _connection: object
    ) -> tuple[str, Sequence[Any]]:
        # Since Django 6.1, instead of get_placeholder().
        if hasattr(value, "as_sql"):
            sql, parameters = compiler.compile(value)
            return sql, parameters
        return "%s", (value,)

    def deconstruct(self) -> Any:
        # The column is the same, so migrations do not refer to this class.
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.TextField", args, kwargs


class ReasonField(_ReasonField):
    """A :class:`~.reasons.Reason` or ``None``, as JSON in ASCII, which every database compares.

    A text that is stored stands for itself.
    """

    empty_strings_allowed = False

    def to_python(self, value: Any) -> Reason | None:
        try:
            value = json.loads(value) if isinstance(value, str) and value else value
        except (ValueError, RecursionError):
            return Reason.of(value)
        if isinstance(value, Reason):
            return value
        return Reason.from_json(value) if value else None

    def from_db_value(self, value: str, _expression: object, _connection: object) -> Reason | None:
        return self.to_python(value)

    def get_prep_value(self, value: Reason | str | None) -> str:
        return json.dumps(Reason.of(value).as_json(), sort_keys=True) if value else ""

    def deconstruct(self) -> Any:
        # The column is the same, so migrations do not refer to this class.
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.TextField", args, kwargs


def read_document(text: str) -> dict[str, Any]:
    """Decode a JSON object; ``{}`` if the text is not one."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


class PartialIndex(models.Index):
    """An index of the rows that match *where*, or of all rows on MySQL, by the columns of *where*.

    With a condition Django warns that MySQL has no partial indexes (models.W037).
    """

    def __init__(self, *expressions: Any, where: Mapping[str, Any], **options: Any) -> None:
        super().__init__(*expressions, **options)
        self.where = where

    def deconstruct(self) -> Any:
        path, expressions, options = super().deconstruct()
        return path, expressions, {**options, "where": self.where}

    def create_sql(self, model: Any, schema_editor: Any, *args: Any, **options: Any) -> Any:
        _, _, index = super().deconstruct()
        if schema_editor.connection.features.supports_partial_indexes:
            index["condition"] = models.Q(**self.where)
        else:
            compared = [lookup.partition("__")[0] for lookup in self.where]
            own = [name.removeprefix("-") for name in index["fields"]]
            index["fields"] = [name for name in compared if name not in own] + index["fields"]
        return models.Index(**index).create_sql(model, schema_editor, *args, **options)


class AuditRow(models.Model):
    """A row of the audit log: added, never changed, and deleted only by ``events_prune``.

    docs/audit.md shows how to enforce this in the database.

    Attributes:
        by: a user's name, or a command's.
    """

    at = Moment()
    by = models.CharField(max_length=LENGTH)

    class Meta:
        abstract = True
        ordering: ClassVar = ["at", "pk"]
        default_permissions = ()

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.pk} by {self.by or 'unknown'}"
