"""Column types and base classes that the models share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from django.db import models
from django.utils.timezone import get_default_timezone, is_naive, make_aware

from ..exceptions import AppendOnlyError

if TYPE_CHECKING:
    _DateTimeField = models.DateTimeField[Any, Any]
else:
    _DateTimeField = models.DateTimeField


M = TypeVar("M", bound=models.Model)


#: Longest text of the columns that lists, filters and indexes use.
LENGTH: Final = 255


class Moment(_DateTimeField):
    """A datetime with a time zone, even if ``USE_TZ`` is off."""

    def from_db_value(self, value: datetime | None, *_: object) -> datetime | None:
        if value is not None and is_naive(value):
            # The connection's own, and so the one that the database has written it in.
            return make_aware(value, get_default_timezone()).astimezone(UTC)
        return value

    def deconstruct(self) -> Any:
        # It is the same column, and no migration need know of this class.
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs


class AppendOnlyRows(models.QuerySet[M]):
    """Rows that are added and never changed; ``events_prune`` deletes them with their event."""

    def update(self, **kwargs: Any) -> NoReturn:
        raise AppendOnlyError.of(self.model.__name__)


class AppendOnly(models.Model):
    """A row that is added and never changed or deleted by itself.

    What goes round Django is the database's business: docs/audit.md has the statements.
    """

    objects = AppendOnlyRows.as_manager()

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        if not self._state.adding:
            raise AppendOnlyError.of(type(self).__name__)
        # Of a row that is there already the database says so.
        super().save(*args, **{**kwargs, "force_insert": True})

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AppendOnlyError.of(type(self).__name__)
