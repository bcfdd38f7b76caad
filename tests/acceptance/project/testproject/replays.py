"""Handlers whose events are archived, then replayed after the test has fixed the cause."""

from __future__ import annotations

from typing import Any

from django_amqp_events import handler

from .steps import perform


@handler("replays.shared", bind=True, max_retries=0)
def failing(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@handler("replays.shared", bind=True, max_retries=0, ignore_result=False)
def kept(self: Any, plan: list[str]) -> str:
    """Its successes are stored too."""
    return perform(self, plan)
