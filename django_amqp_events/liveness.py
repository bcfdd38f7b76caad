"""Tell ``events_health`` what the parts of this process do, such as a worker or a relay.

The process listens on a Unix socket in Linux's abstract namespace, named after the service and the
identity of the process. It needs neither files nor RabbitMQ nor a database, and the kernel removes
it when the process ends.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from . import process_identity
from .conf import Settings

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT: Final = 5.0
RETRY_SECONDS: Final = 0.5


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """A part of this process that works in a loop.

    Attributes:
        name: ``worker``, ``reaper``, ``relay``, ``mirror``, ``batches`` or ``snapshots``.
        problem: returns why it is not ready, ``""`` if it is.
        turned: monotonic time at which its loop turned last; ``None`` while the loop may rest, as a
            worker's does without a connection.
    """

    name: str
    problem: Callable[[], str]
    turned: float | None = None

    def turn(self) -> None:
        self.turned = time.monotonic()


#: The parts of this process.
parts: list[Part] = []
_listening: dict[bytes, socket.socket] = {}


def listen(settings: Settings) -> None:
    """Answer ``events_health`` until this process ends, in a thread; only on Linux."""
    if not process_identity.place():
        return
    name = _prefix(settings) + process_identity.identity().encode()
    if name in _listening:
        return
    sock = _listening[name] = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(name)
        sock.listen()
    except OSError as exc:  # a security policy
        logger.warning("events_health cannot examine this process: %s", exc)
        return
    threading.Thread(target=_answer, args=(sock,), name="amqp-events-liveness", daemon=True).start()


def _prefix(settings: Settings) -> bytes:
    service = f"{settings.prefix}{settings.service}".encode()
    # 108 bytes are the limit of a name.
    short = service if len(service) <= 40 else sha256(service).hexdigest()[:40].encode()
    return b"\0amqp-events/" + short + b"/"


def _answer(sock: socket.socket) -> None:
    while True:
        try:
            connection, _ = sock.accept()
        except OSError as exc:
            if exc.errno in (errno.EINVAL, errno.EBADF):
                return  # closed
            # For the moment there is no file descriptor, for example.
            time.sleep(RETRY_SECONDS)
            continue
        with connection:
            try:
                connection.settimeout(ANSWER_TIMEOUT)
                connection.sendall(json.dumps(_state()).encode())
            except Exception as exc:  # noqa: BLE001 - the next one is answered all the same
                logger.warning("could not answer events_health: %s", exc)


def _state() -> dict[str, Any]:
    reports = []
    for part in tuple(parts):  # other threads change it
        # First, since it may turn the part.
        problem, turned = part.problem(), part.turned
        seconds = None if turned is None else time.monotonic() - turned
        reports.append({"part": part.name, "problem": problem, "seconds": seconds})
    return {"process": os.getpid(), "parts": reports}


def ask(settings: Settings) -> list[dict[str, Any]] | None:
    """Return the state of a service's processes in this container.

    Returns:
        a dict for each process: its id as ``process``, and ``parts``, ``None`` if it does not
        answer. ``None`` if this system does not show its processes.
    """
    try:
        table = Path("/proc/net/unix").read_bytes()
    except OSError:
        return None
    if not (place := process_identity.place()):
        return None
    prefix = _prefix(settings)[1:] + place.encode()
    # Any user may bind other names that begin so.
    names = re.findall(rb"@(" + re.escape(prefix) + rb"\.(\d+)\.\d+)$", table, re.MULTILINE)
    answers = [_ask(b"\0" + name, int(pid)) for name, pid in sorted(set(names))]
    return [answer for answer in answers if answer is not None]


def _ask(name: bytes, pid: int) -> dict[str, Any] | None:
    """Return what a process answers, ``None`` if it has just ended."""
    for _ in range(2):  # one that ends while it is asked refuses the second connection
        try:
            return _read(name)
        except ConnectionRefusedError:
            return None
        except TimeoutError:
            break
        except (OSError, ValueError) as exc:
            logger.debug("process %d: %r", pid, exc)
    return {"process": pid, "parts": None}


def _read(name: bytes) -> dict[str, Any]:
    answer = b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_TIMEOUT)
        sock.connect(name)
        while read := sock.recv(65536):
            answer += read
    state: dict[str, Any] = json.loads(answer)
    return state


def _close() -> None:
    for sock in _listening.values():
        # Closing alone would leave it listening while the thread waits in accept().
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    _listening.clear()


def _after_fork_in_child() -> None:
    for sock in _listening.values():
        sock.close()  # no shutdown: the parent goes on listening on it
    _listening.clear()
    parts.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_close)
