"""A function that settings make a handler of, under one name and later another."""

from __future__ import annotations

from .steps import perform


def plain(plan: list[str]) -> str:
    return perform(None, plan, handler="plain")
