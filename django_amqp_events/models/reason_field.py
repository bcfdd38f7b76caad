"""The column of a reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from django.db import models

from ..reasons import Reason

if TYPE_CHECKING:
    _TextField = models.TextField[Reason | str | None, Reason | None]
else:
    _TextField = models.TextField


class ReasonField(_TextField):
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
