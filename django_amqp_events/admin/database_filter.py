"""The outbox of more than one database, and the filter that selects one of them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db import DEFAULT_DB_ALIAS, connections, models, router
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from .. import databases
from .filters import settings_and_registry
from .lists import AlwaysChosenFilter


def aliases(model: type[models.Model]) -> list[str]:
    """Return the databases that have the model's table, first that of the settings."""
    configured = settings_and_registry()
    first = configured[0].database if configured is not None else DEFAULT_DB_ALIAS
    usable = (
        first in connections
        and databases.exists(first)
        and router.allow_migrate_model(first, model)
    )
    allowed = databases.written(model, *([first] if usable else []))
    allowed = allowed or [router.db_for_write(model)]
    return [allowed[0], *(a for a in allowed[1:] if databases.may_have_table(a, model))]


def chosen(request: HttpRequest, model: type[models.Model]) -> str:
    """Return the database that a list shows."""
    possible = aliases(model)
    requested = request.GET.get(DatabaseFilter.parameter_name)
    return requested if requested in possible else possible[0]


class DatabaseFilter(AlwaysChosenFilter):
    """Offered if several databases have the table; the list reads the selected one."""

    title = _("database")
    parameter_name = "database"

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, str]]:
        self.chosen = model_admin.get_queryset(request).db
        possible = aliases(model_admin.model)
        return [(alias, alias) for alias in possible] if len(possible) > 1 else []

    def queryset(
        self, request: HttpRequest, queryset: models.QuerySet[Any]
    ) -> models.QuerySet[Any]:
        requested = self.value()
        return queryset if requested in (None, queryset.db) else queryset.none()
