"""Wait for a coroutine in a thread that an exception may interrupt.

asgiref's ``async_to_sync`` runs the coroutine in another thread. An exception that a signal handler
raises in the waiting thread, such as that of a soft time limit, ends the wait only: the coroutine
continues, with its effects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Context, copy_context
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

from asgiref.current_thread_executor import CurrentThreadExecutor
from asgiref.sync import AsyncToSync, _restore_context

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

    An exception that interrupts the calling thread cancels *awaitable*. It is raised when the event
    loop has ended with its tasks and threads, or before that if it ends the process. If
    *awaitable* suppresses the cancellation, its own result or error counts.

    Args:
        within: entered in the thread of the event loop.

    Raises:
        RuntimeError: an event loop runs in the calling thread.
    """
    if has_event_loop():
        unrun(awaitable)
        raise RuntimeError("this thread has an event loop; await the coroutine there")
    outer = getattr(AsyncToSync.executors, "current", None)
    executor = AsyncToSync.executors.current = CurrentThreadExecutor(outer)
    run = _Run(awaitable, copy_context(), within or nullcontext())
    try:
        Thread(target=run.run, name="coroutine", daemon=True).start()
        executor.run_until_future(run.result)
    except BaseException as exc:
        if not run.cancel():
            raise
        exits = isinstance(exc, SystemExit)
        executor.run_until_future(run.ended if exits else run.result)
        if exits or isinstance(run.result.exception(), asyncio.CancelledError):
            raise
    finally:
        AsyncToSync.executors.current = outer
    return run.result.result()


class _Run(Generic[T]):
    """The run of an awaitable in another thread.

    Attributes:
        ended: has a result when the awaitable has ended.
        result: the awaitable's, when its event loop has ended.
    """

    def __init__(
        self, awaitable: Awaitable[T], context: Context, within: AbstractContextManager[object]
    ) -> None:
        self.awaitable = awaitable
        self.context = context
        self.within = within
        self.ended: Future[None] = Future()
        self.result: Future[T] = Future()
        # Held by what came first, the run or the cancellation.
        self._turn = Lock()

    def run(self) -> None:
        try:
            result = asyncio.run(self._await())
        except BaseException as exc:  # noqa: BLE001 - the waiting thread raises it
            self.result.set_exception(exc)
        else:
            self.result.set_result(result)

    async def _await(self) -> T:
        # Otherwise asgiref's Local, which names the executor of sync_to_async, is empty here.
        _restore_context(self.context)
        self._loop = asyncio.get_running_loop()
        self._task: Any = asyncio.current_task()
        if not self._turn.acquire(blocking=False):
            raise asyncio.CancelledError
        try:
            with self.within:
                return await self.awaitable
        finally:
            self.ended.set_result(None)

    def cancel(self) -> bool:
        """Cancel the awaitable, or return False if it has not begun and never will."""
        if self._turn.acquire(blocking=False):
            unrun(self.awaitable)
            return False
        with suppress(RuntimeError):  # the loop is closed, since the awaitable has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        return True
