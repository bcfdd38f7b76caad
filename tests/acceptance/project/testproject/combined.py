"""The handlers of :mod:`.table`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from celery import Task
from django.db import connection

from django_amqp_events import current_event, handler

from . import ledger
from .table import ROWS, Row


class Never(LookupError):
    """In ``dont_autoretry_for`` of some handlers."""


class Refused(LookupError):
    """Retried by all handlers that do not name another exception in ``autoretry_for``."""


def perform(row: Row, number: Any, plan: list[str]) -> str:
    """Write what runs, have an effect in the database, and do this attempt's step of the plan."""
    event = current_event()
    assert event is not None
    due = event.due_at.timestamp() if event.due_at else None
    ledger.write("start", handler=row.name, due=due)
    with connection.cursor() as cursor:
        values: list[str | int] = [event.id, row.name, event.attempt]
        cursor.execute("INSERT INTO effects VALUES (%s, %s, %s)", values)
    step = plan[min(event.attempt, len(plan)) - 1]
    match step:
        case "fail":
            raise ValueError("a bug")
        case "refuse":
            raise Refused("out of stock")
        case "never":
            raise Never("for good")
    return step


def declare(row: Row) -> None:
    """Declare the handler of a row, as a service would."""

    def late(plan: list[str]) -> bool:
        event = current_event()
        return event is not None and plan[min(event.attempt, len(plan)) - 1] == "late"

    def run(number: int, plan: list[str]) -> str:
        answer = perform(row, number, plan)
        if late(plan):
            time.sleep(30)
        return answer

    async def run_async(number: int, plan: list[str]) -> str:
        answer: str = await sync_to_async(perform)(row, number, plan)
        if late(plan):
            await asyncio.sleep(30)
        return answer

    def bound(self: Any, number: int, plan: list[str]) -> str:
        assert self.event == current_event()
        return run(number, plan)

    async def bound_async(self: Any, number: int, plan: list[str]) -> str:
        assert self.event == current_event()
        return await run_async(number, plan)

    class Handler(Task):
        run = bound

    options = dict(row.options)
    kind, bind = options.pop("handler"), options["bind"]
    del options["events"]
    targets: dict[tuple[str, bool], Callable[..., Any]] = {
        ("function", False): run,
        ("function", True): bound,
        ("coroutine", False): run_async,
        ("coroutine", True): bound_async,
    }
    if kind == "class":
        del options["bind"]  # it always has the task
    if not options["queue"]:
        del options["queue"]
    target = targets.get((kind, bind), Handler)
    handler(*row.events, name=row.name, **options)(target)


for row in ROWS:
    declare(row)
