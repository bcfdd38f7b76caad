"""Wake the event loop at a signal: an idle worker stops at once, a dead pool process is replaced.

With kombu before 5.7, wake it for another thread too. Otherwise it would see what the thread has
for it, such as the ack of a retried event, after a poll of up to a second.

Python calls the handler of a signal during a poll, and then goes on polling (PEP 475). The loop
would see a request to stop only at its next timer, without heartbeat events after ten seconds.

Celery notices the end of a pool process by a pipe, which the kernel closes before the process can
be waited for (``do_exit()``: ``exit_files()``, then ``exit_notify()``). If it looks in between,
which is frequent, it looks again only at a timer of five seconds. SIGCHLD comes afterwards.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Final

from celery.signals import worker_ready

from .celery_internals import wakes_for_threads

#: Written where a signal would be: there is no signal 0.
_NO_SIGNAL: Final = b"\0"


def connect() -> None:
    """Connect Celery's signal that this worker is ready."""
    worker_ready.connect(_install, dispatch_uid="django_amqp_events.signal_wakeup", weak=False)


def call_soon(consumer: Any) -> Callable[..., Any]:
    """Return what runs a function in a worker's event loop soon; may be called in any thread."""
    if wakes_for_threads():
        in_loop: Callable[..., Any] = consumer.call_soon
        return in_loop
    connect()

    def call_soon(function: Callable[..., Any], *args: Any) -> None:
        consumer.call_soon(function, *args)
        if threading.current_thread() is not threading.main_thread():
            with suppress(BlockingIOError):  # enough are written
                os.write(_signals()[1], _NO_SIGNAL)

    return call_soon


def _install(sender: Any, **_: Any) -> None:
    if sender.hub is not None:
        # worker_ready is sent again after each lost connection, for which Celery resets the hub.
        sender.hub.add_reader(_signals()[0], _woken, sender.hub, sender.pool)


def _woken(hub: Any, pool: Any) -> None:
    if signal.SIGCHLD in _signals()[0].recv(4096):
        # When what the process has written is read: a job that it has not acknowledged runs again.
        hub.call_soon(pool.maintain_pool)


@cache
def _signals() -> tuple[socket.socket, int]:
    """Return a socket that gets the numbers of signals, and the descriptor that writes to it."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    descriptor = writer.detach()
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    own = signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    if own:
        # Only a signal with a handler is written.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.siginterrupt(signal.SIGCHLD, False)

    def forget() -> None:
        # A pool process might close the descriptor and use its number for something else.
        signal.set_wakeup_fd(-1)
        if own:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)
    return reader, descriptor
