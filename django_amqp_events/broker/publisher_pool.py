"""The confirm channels of this process."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence

from celery import Celery

from ..conf import Settings
from ..exceptions import PublishError
from ..message.types import Message
from ..reasons import Reason
from .confirms import ConfirmChannel
from .connection import celery_app
from .publish_errors import unavailable_errors


class PublisherPool:
    """Confirm channels for all threads of a process, safe after a fork.

    Celery's ``broker_pool_limit`` limits the open connections. As in Celery, ``None`` and 0 mean
    no limit and a connection for every use.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self.app = app
        self.timeout = timeout
        self.limit: int = app.conf.broker_pool_limit or 0
        # Reentrant, since a signal handler may publish while its thread holds it.
        self._changed = threading.Condition()
        self._idle: list[ConfirmChannel] = []
        # Weak: a channel that is lost by an exception in a signal handler does not count.
        self._all: weakref.WeakSet[ConfirmChannel] = weakref.WeakSet()

    def publish(self, messages: Sequence[Message], *, mandatory: bool) -> list[PublishError | None]:
        """Publish on a channel of the pool; see :meth:`ConfirmChannel.publish`.

        ``timeout`` seconds are for a free connection, connecting and the first confirm together;
        half of them for the first, since what is written without time for its confirm is repeated.
        """
        if not messages:
            return []
        deadline = time.monotonic() + self.timeout
        channel = self._acquire(deadline - self.timeout / 2)
        if channel is None:
            return unavailable_errors(messages, self._busy)
        try:
            return channel.publish(messages, mandatory=mandatory, deadline=deadline)
        finally:
            self._release(channel)

    @property
    def _busy(self) -> Reason:
        return Reason("connections-busy", limit=self.limit, seconds=f"{self.timeout / 2:g}")

    def _acquire(self, deadline: float) -> ConfirmChannel | None:
        while True:
            with self._changed:
                while not self._idle and self.limit and len(self._all) >= self.limit:
                    if not self._changed.wait(deadline - time.monotonic()):
                        return None
                if not self._idle:
                    channel = ConfirmChannel(self.app, timeout=self.timeout)
                    self._all.add(channel)
                    return channel
                channel = self._idle.pop()
            if channel.healthy():
                return channel
            self._release(channel)

    def _release(self, channel: ConfirmChannel) -> None:
        keep = self.limit and not channel.broken
        if not keep:
            channel.leave()
        with self._changed:
            if keep:
                self._idle.append(channel)
            else:
                self._all.discard(channel)
            self._changed.notify()

    def close(self) -> None:
        """Close all idle connections; the pool can be used again."""
        with self._changed:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.leave()
        with self._changed:
            self._all.difference_update(idle)
            self._changed.notify_all()

    def forget_after_fork(self) -> None:
        """Drop the parent's connections in a child process."""
        for channel in self._all:
            channel.forget_after_fork()
        self._changed = threading.Condition()
        self._idle, self._all = [], weakref.WeakSet()


_pools: dict[tuple[Celery, float], PublisherPool] = {}


def publisher_pool(settings: Settings) -> PublisherPool:
    """Return this process's pool for the project's Celery app."""
    app, timeout = key = celery_app(settings), settings.confirm_timeout
    # setdefault() is atomic, and a pool that loses a race has no connection yet.
    return _pools.get(key) or _pools.setdefault(key, PublisherPool(app, timeout=timeout))


def close_pools() -> None:
    """Close the idle publishing connections of this process."""
    for pool in list(_pools.values()):
        pool.close()


def _after_fork_in_child() -> None:
    for pool in _pools.values():
        pool.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(close_pools)
