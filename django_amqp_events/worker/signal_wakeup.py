"""Wake the event loop at a signal: an idle worker stops at once, a dead pool process is replaced.

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
from functools import cache
from typing import Any

from celery.signals import worker_ready


def connect() -> None:
    """Connect Celery's signal that this worker is ready."""
    worker_ready.connect(_install, dispatch_uid="django_amqp_events.signal_wakeup", weak=False)


def _install(sender: Any, **_: Any) -> None:
    if sender.hub is not None:
        # worker_ready is sent again after each lost connection, for which Celery resets the hub.
        sender.hub.add_reader(_signals(), _woken, sender.hub, sender.pool)


def _woken(hub: Any, pool: Any) -> None:
    if signal.SIGCHLD in _signals().recv(4096):
        # When what the process has written is read: a job that it has not acknowledged runs again.
        hub.call_soon(pool.maintain_pool)


@cache
def _signals() -> socket.socket:
    """Return a socket from which the numbers of received signals can be read."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
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
    return reader
