"""Handlers for the rows of test_core.py's table."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from django_amqp_events import current_event, handler

from . import ledger
from .steps import perform


@handler("core.act", bind=True, max_retries=2)
def act(self: Any, plan: list[str], case: str = "") -> str:
    return perform(self, plan, case=case)


@handler("core.act.once", bind=True, max_retries=0, dont_autoretry_for=["testproject.steps.Never"])
def once(self: Any, plan: list[str], case: str = "") -> str:
    return perform(self, plan, case=case)


@handler("core.act.picky", bind=True, max_retries=5,
         dont_autoretry_for=["testproject.steps.Never"])  # fmt: skip
def picky(self: Any, plan: list[str], case: str = "") -> str:
    return perform(self, plan, case=case)


@handler("core.act.limited", bind=True, max_retries=1, soft_time_limit=2, time_limit=3)
def limited(self: Any, plan: list[str], case: str = "") -> str:
    return perform(self, plan, case=case)


@handler("core.act.slow", bind=True, max_retries=1)
def slow(self: Any, plan: list[str], case: str = "") -> str:
    return perform(self, plan, case=case)


@handler("core.strict", strict=True)
def strict(plan: list[str]) -> None:
    ledger.write("start", handler="testproject.strict")


@handler("core.async", max_retries=1)
async def coroutine(plan: list[str], case: str = "") -> None:
    event = current_event()
    assert event is not None
    ledger.write("start", handler="testproject.coroutine", case=case)
    if plan[min(event.attempt, len(plan)) - 1] == "fail":
        raise ValueError("no")
    ledger.write("end", handler="testproject.coroutine", case=case)


@handler("core.async.limited", max_retries=1, soft_time_limit=1, time_limit=4)
async def limited_coroutine(plan: list[str], case: str = "") -> None:
    ledger.write("start", handler="testproject.limited_coroutine", case=case)
    await asyncio.sleep(2)
    ledger.write("end", handler="testproject.limited_coroutine", case=case)


@handler("core.async.deaf", max_retries=0, soft_time_limit=1, time_limit=3)
async def deaf_coroutine(plan: list[str], case: str = "") -> None:
    ledger.write("start", handler="testproject.deaf_coroutine", case=case)
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
