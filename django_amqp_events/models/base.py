"""Column types and base classes of the models."""

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


#: Characters of the texts that lists, filters and indexes use.
LENGTH: Final = 255


class Moment(_DateTimeField):
    """A datetime with a time zone, even if ``USE_TZ`` is off."""

    def from_db_value(self, value: datetime | None, *_: object) -> datetime | None:
        if value is not None and is_naive(value):
            # Without USE_TZ, Django writes times in the default time zone.
            return make_aware(value, get_default_timezone()).astimezone(UTC)
        return value

    def deconstruct(self) -> Any:
        # The column is the same, so migrations do not refer to this class.
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs


class AppendOnlyRows(models.QuerySet[M]):
    """Rows that are added and never changed; ``events_prune`` deletes them with their event."""

    def update(self, **kwargs: Any) -> NoReturn:
        raise AppendOnlyError.of(self.model.__name__)


class AppendOnly(models.Model):
    """A row that is added and never changed; only its event deletes it.

    docs/audit.md shows how to enforce this in the database.
    """

    objects = AppendOnlyRows.as_manager()

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        if not self._state.adding:
            raise AppendOnlyError.of(type(self).__name__)
        # An existing row is an IntegrityError.
        super().save(*args, **{**kwargs, "force_insert": True})

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AppendOnlyError.of(type(self).__name__)
