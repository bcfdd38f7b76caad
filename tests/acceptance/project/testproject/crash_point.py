"""The crash point of a process: its n-th effect, before or after which it kills itself.

An effect changes a database or the broker: a statement that writes (``sql``; in a transaction
nothing is changed before the commit), a commit, or a method of AMQP that publishes, settles or
declares.
TESTPROJECT_CRASH says where the process dies::

    {"log": "<path>", "at": 3, "when": "before", "kinds": ["sql", "commit", "publish"],
     "child": false}

Effects of other kinds are not counted. With ``at`` 0 they are only counted. With ``child``, those
of each process of the pool are counted instead of the main process's own. Each effect is a line of
the log before it happens; a process dies once, and a line says so before it does.

Methods of AMQP are found in the bytes that go to the socket, so no path of the package is missed.
Of a write with several methods, only what comes before the crash point is sent.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

CRASH: dict[str, Any] = json.loads(os.environ.get("TESTPROJECT_CRASH", "{}"))
#: Methods that have an effect, by class and method (AMQP 0-9-1, and RabbitMQ's nack).
METHODS: Final = {
    (40, 10): "declare",
    (40, 20): "delete",
    (50, 10): "declare",
    (50, 20): "bind",
    (50, 40): "delete",
    (50, 50): "bind",
    (60, 40): "publish",
    (60, 80): "ack",
    (60, 90): "reject",
    (60, 120): "reject",
}
#: First words of statements that change nothing that outlives their transaction.
READING: Final = {
    "SELECT", "BEGIN", "START", "SAVEPOINT", "RELEASE", "ROLLBACK", "SET", "SHOW", "PRAGMA",
    "EXPLAIN", "VALUES",
}  # fmt: skip
_HEADER: Final = struct.Struct(">BHI")
_declared: set[tuple[Any, bytes]] = set()
_count = 0
_main = os.getpid()
_lock = threading.RLock()


def arm() -> None:
    """Count the effects of this process, if TESTPROJECT_CRASH is set."""
    if not CRASH:
        return
    from amqp.transport import _AbstractTransport
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.signals import connection_created

    database: Any = BaseDatabaseWrapper
    write, commit = _AbstractTransport.write, database._commit

    def write_methods(self: Any, s: Any) -> None:
        data = bytes(s)
        for start, end, kind, detail in _methods(data):
            dies = _effect(kind, detail)
            if dies and _is_first():
                write(self, data[: start if dies == "before" else end])
                os.kill(os.getpid(), signal.SIGKILL)
        write(self, s)

    def commit_once(self: Any) -> None:
        # Without a connection there is nothing to commit.
        if self.connection is None:
            commit(self)
        else:
            _around("commit", "", lambda: commit(self))

    def execute(run: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        words = str(sql).split()
        reads = not words or words[0].upper() in READING
        if reads or context["connection"].in_atomic_block:
            return run(sql, params, many, context)
        return _around("sql", " ".join(words[:4]), lambda: run(sql, params, many, context))

    def count_statements(connection: Any, **_: Any) -> None:
        if execute not in connection.execute_wrappers:
            connection.execute_wrappers.append(execute)

    _AbstractTransport.write = write_methods
    database._commit = commit_once
    connection_created.connect(count_statements, weak=False)
    os.register_at_fork(after_in_child=_begin_child)


def _begin_child() -> None:
    global _count, _lock
    _count, _lock = 0, threading.RLock()


def _methods(data: bytes) -> Iterator[tuple[int, int, str, str]]:
    """Yield where each method with an effect begins and ends, its kind and its name."""
    at, found = 0, None
    while at + 8 <= len(data) and not data.startswith(b"AMQP", at):
        frame, _, size = _HEADER.unpack_from(data, at)
        payload, begins, at = data[at + 7 : at + 7 + size], at, at + 8 + size
        if frame == 1:
            if found:
                yield found
            method = struct.unpack_from(">HH", payload)
            kind = METHODS.get(method)
            found = (begins, at, kind, _name(payload)) if kind else None
            # Celery's own messages of workers that start and stop.
            if found and (_is_again(method, payload) or found[3] == "celeryev"):
                found = None
        elif found:
            # The header or body of what is published.
            found = (found[0], at, *found[2:])
    if found:
        yield found


def _name(payload: bytes) -> str:
    """Return the exchange, queue or tag that a method begins with."""
    if payload[:2] == b"\0\x3c" and payload[2:4] != b"\0\x28":
        return str(struct.unpack_from(">Q", payload, 4)[0])
    # A reserved short comes first.
    return payload[7 : 7 + payload[6]].decode(errors="replace")


def _is_again(method: tuple[int, ...], payload: bytes) -> bool:
    """Return True for a declaration that is passive, or not the first of its exchange or queue."""
    if method not in ((40, 10), (50, 10)):
        return False
    at = 7 + payload[6]
    if method == (40, 10):
        at += 1 + payload[at]
    declared = method, payload[7 : 7 + payload[6]]
    if payload[at] & 1 or declared in _declared:
        return True
    _declared.add(declared)
    return False


def _around(kind: str, detail: str, run: Callable[[], Any]) -> Any:
    dies = _effect(kind, detail)
    if dies and _is_first():
        if dies == "after":
            run()
        os.kill(os.getpid(), signal.SIGKILL)
    return run()


def _effect(kind: str, detail: str) -> str:
    """Count an effect; return "before" or "after" if the process dies there, else ""."""
    global _count  # noqa: PLW0603 - one count for the process
    if kind not in CRASH["kinds"] or CRASH.get("child", False) == (os.getpid() == _main):
        return ""
    with _lock:
        _count += 1
        _log(f"{_count} {kind} {detail}")
        return str(CRASH["when"]) if _count == CRASH["at"] else ""


def _log(line: str) -> None:
    with open(CRASH["log"], "a") as log:  # noqa: PTH123
        log.write(f"{line}\n")


def _is_first() -> bool:
    """Return True unless another process of the pool has died."""
    try:
        os.close(os.open(f"{CRASH['log']}.died", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
