"""Handlers for what configuration may say about tasks."""

from __future__ import annotations

from typing import Any

from django_amqp_events import handler

from . import ledger
from .steps import perform


@handler("options.act", bind=True, max_retries=1)
def act(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@handler("options.act", bind=True, max_retries=0, ignore_result=False)
def kept(self: Any, plan: list[str]) -> str:
    """Its successes are stored too."""
    return perform(self, plan)


@handler("options.rated", bind=True, rate_limit="5/s")
def rated(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@handler("options.query", bind=True)
def query(self: Any, plan: list[str]) -> None:
    """Use the database and return the connection."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    perform(self, plan, connection=id(connection.connection))
    ledger.write("queried", connection=id(connection.connection))
