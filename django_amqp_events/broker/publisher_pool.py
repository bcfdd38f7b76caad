"""The confirm channels of this process."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Sequence

from celery import Celery

from ..conf import Settings
from ..exceptions import PublishError
from ..message.types import Message
from .confirms import GOODBYE, ConfirmChannel
from .connection import celery_app


class PublisherPool:
    """Confirm channels for all threads of a process, safe after a fork.

    There is one for each thread that publishes at the same time. As in Celery, a
    ``broker_pool_limit`` of ``None`` or 0 means a connection for every use.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self.app = app
        self.timeout = timeout
        self._keeps = bool(app.conf.broker_pool_limit)
        # Without a lock, since a signal handler may publish: a list's methods are atomic.
        self._idle: list[ConfirmChannel] = []
        # Weak: a channel may be lost by an exception in a signal handler.
        self._all: weakref.WeakSet[ConfirmChannel] = weakref.WeakSet()

    def publish(self, messages: Sequence[Message], *, mandatory: bool) -> list[PublishError | None]:
        """Publish on a channel of the pool; see :meth:`ConfirmChannel.publish`."""
        if not messages:
            return []
        channel = self._take()
        try:
            return channel.publish(messages, mandatory=mandatory)
        finally:
            if self._keeps and not channel.broken:
                self._idle.append(channel)
            else:
                channel.leave()

    def _take(self) -> ConfirmChannel:
        try:
            return self._idle.pop()
        except IndexError:
            channel = ConfirmChannel(self.app, timeout=self.timeout)
            self._all.add(channel)
            return channel

    def close(self) -> None:
        """Close all idle connections; the pool can be used again."""
        idle, self._idle = self._idle, []
        end = time.monotonic() + GOODBYE
        for channel in idle:
            # A silent broker answers none.
            if time.monotonic() < end:
                channel.leave()
            else:
                channel.close()

    def forget_after_fork(self) -> None:
        """Drop the parent's connections in a child process."""
        for channel in self._all:
            channel.forget_after_fork()
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
