"""Tables that more than one database may have, and the filter that selects one of them."""

from __future__ import annotations

import time
from typing import Any, Final

from django.contrib import admin
from django.db import (
    DEFAULT_DB_ALIAS,
    DatabaseError,
    InterfaceError,
    connections,
    models,
    router,
    transaction,
)
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..publish import outbox_rows
from .filters import settings_and_registry
from .lists import AlwaysChosenFilter

#: Seconds for which it is remembered whether a database has a table, so that an unreachable
#: database does not delay each page.
REMEMBERED: Final = 60.0
_known: dict[tuple[str, str, type[models.Model]], tuple[float, bool]] = {}


def aliases(model: type[models.Model], *own: str) -> list[str]:
    """Return the databases that have the model's table: first *own*, then those of the settings."""
    found = settings_and_registry()
    first = found[0].database if found is not None else DEFAULT_DB_ALIAS
    allowed = [
        alias
        for alias in dict.fromkeys([first, *own, *connections])
        if alias in connections and router.allow_migrate_model(alias, model)
    ] or [router.db_for_write(model)]
    return [allowed[0], *(alias for alias in allowed[1:] if has_table(alias, model))]


def has_table(alias: str, model: type[models.Model]) -> bool:
    """Return True if a reachable database has the table; cached for :data:`REMEMBERED` seconds."""
    key = (alias, str(connections[alias].settings_dict["NAME"]), model)
    until, answer = _known.get(key, (0.0, False))
    if time.monotonic() >= until:
        try:
            # A savepoint: an error would end a transaction that is open.
            with transaction.atomic(using=alias):
                answer = outbox_rows.has_table(alias, model)
        except (DatabaseError, InterfaceError):
            answer = False
        _known[key] = (time.monotonic() + REMEMBERED, answer)
    return answer


def chosen(request: HttpRequest, model: type[models.Model], *own: str) -> str:
    """Return the database that a list shows."""
    found = aliases(model, *own)
    wanted = request.GET.get(DatabaseFilter.parameter_name)
    return wanted if wanted in found else found[0]


class DatabaseFilter(AlwaysChosenFilter):
    """Offered if several databases have the table; the list reads the selected one."""

    title = _("database")
    parameter_name = "database"

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, str]]:
        self._shown = model_admin.get_queryset(request).db
        found = aliases(model_admin.model, self._shown)
        return [(alias, alias) for alias in found] if len(found) > 1 else []

    @property
    def chosen(self) -> str:
        return self._shown

    def queryset(
        self, request: HttpRequest, queryset: models.QuerySet[Any]
    ) -> models.QuerySet[Any]:
        wanted = self.value()
        return queryset if wanted in (None, queryset.db) else queryset.none()
