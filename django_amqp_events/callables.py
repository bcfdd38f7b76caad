"""Callables whose call runs nothing: of their body, as async ones and generators, or at all.

Code that ignores what an async one returns would take it for a success.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any


def nothing(*_: object) -> bool:
    """Return False: the default of a callback."""
    return False


def deferred(target: Any) -> str:
    """Return ``"async"`` or ``"a generator"`` if a call runs nothing of the body, otherwise ``""``.

    A wrapper is judged by itself, since it may run what it wraps (``async_to_sync``).
    """
    while isinstance(target, partial):
        target = target.func
    # An object is called by the method of its class.
    for function in (target, type(target).__call__ if callable(target) else None):
        if inspect.iscoroutinefunction(function):
            return "async"
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            return "a generator"
    return ""


def unrun(result: Any) -> str:
    """Return what a call has returned instead of running: an awaitable or a generator, or ``""``.

    A coroutine is closed, so that Python does not warn that it was never awaited.
    """
    if inspect.iscoroutine(result):
        result.close()
        return "a coroutine"
    if inspect.isawaitable(result):
        return "an awaitable"
    return "a generator" if inspect.isgenerator(result) or inspect.isasyncgen(result) else ""
