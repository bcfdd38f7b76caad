"""Wait for a coroutine in a thread that an exception may interrupt.

An exception that a signal handler raises in a thread that waits in asgiref's ``async_to_sync``,
such as that of a soft time limit, ends the wait only: the coroutine continues, with its effects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

from asgiref.current_thread_executor import CurrentThreadExecutor
from asgiref.sync import AsyncToSync, async_to_sync

from .callables import unrun

T = TypeVar("T")


def has_event_loop() -> bool:
    """Return True if an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def wait_for(awaitable: Awaitable[T], within: AbstractContextManager[object] | None = None) -> T:
    """Return the result of *awaitable*, which runs in an event loop of its own.

    Functions that it calls through ``sync_to_async``, such as the ORM's, run in the calling thread.
    An exception that interrupts the calling thread cancels *awaitable*, and is raised when that has
    ended.

    Args:
        within: entered in the thread of the event loop.

    Raises:
        RuntimeError: an event loop runs in the calling thread.
    """
    if has_event_loop():
        unrun(awaitable)
        raise RuntimeError("this thread has an event loop; await the coroutine there")
    running: list[tuple[asyncio.AbstractEventLoop, Any, CurrentThreadExecutor]] = []
    ended: Future[None] = Future()

    async def run() -> T:
        loop, executor = asyncio.get_running_loop(), AsyncToSync.executors.current
        running.append((loop, asyncio.current_task(), executor))
        try:
            with within or nullcontext():
                return await awaitable
        finally:
            ended.set_result(None)

    try:
        # Otherwise asgiref may choose the loop of an earlier interruption, which is about to end.
        return async_to_sync(run, force_new_loop=True)()
    except BaseException:
        for loop, task, executor in running:
            with suppress(RuntimeError):  # the loop is closed, since the awaitable has ended
                loop.call_soon_threadsafe(task.cancel)
            executor.run_until_future(ended)
        raise
