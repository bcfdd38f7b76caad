"""Handlers for a broker with a short consumer timeout; see test_consumer_timeout.py."""

from __future__ import annotations

from typing import Any

from django_amqp_events import handler

from .steps import perform


@handler("timeouts.slow", bind=True)
def slow(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@handler("timeouts.other", bind=True)
def other(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@handler("timeouts.third", bind=True)
def third(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@handler("timeouts.brisk", bind=True, rate_limit="2/s")
def brisk(self: Any, plan: list[str]) -> str:
    return perform(self, plan)
