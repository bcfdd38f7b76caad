"""Python processes that are forked from one that has imported everything.

:class:`Popen` and :func:`run` are those of :mod:`subprocess`. A command that is not ``python -m``
or ``python -c`` starts as ever.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Final

from .waiting import Stopwatch

#: Names the socket of :mod:`tests.fork_server`, for all test processes of a run.
SOCKET: Final = "AMQP_EVENTS_FORK_SERVER"
#: In the environment of a process that has to import everything itself, in its own order.
REAL_START: Final = "AMQP_EVENTS_REAL_START"
_STDLIB: Final = signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


def start_server(directory: Path) -> subprocess.Popen[bytes]:
    """Start the server of this run; it ends when its standard input is closed."""
    path = directory / "fork"
    program = Path(__file__).with_name("fork_server.py")
    # The package that the tests import, which need not be an installed one.
    spec = find_spec("django_amqp_events")
    assert spec is not None
    assert spec.origin is not None
    environ = {name: v for name, v in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    server = subprocess.Popen(
        [sys.executable, "-P", program, path],
        env={**environ, "PYTHONPATH": str(Path(spec.origin).parent.parent)},
        stdin=subprocess.PIPE,
    )
    os.environ[SOCKET] = str(path)
    return server


def _connect() -> socket.socket:
    caller = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + 60
    while True:
        try:
            caller.connect(os.environ[SOCKET])
        except (FileNotFoundError, ConnectionRefusedError):  # it still imports
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return caller


class Popen(subprocess.Popen[Any]):
    """A process of :mod:`tests.fork_server`, which is its parent."""

    _caller: socket.socket | None = None

    def _execute_child(self, *args: Any) -> None:
        given = _STDLIB.bind(self, *args).arguments
        command = [os.fspath(word) for word in given["args"]]
        environ = dict(os.environ if given["env"] is None else given["env"])
        program = command[0] == sys.executable and command[1] in ("-m", "-c")
        # `make faults` and other tools outside of pytest have no fork server.
        if not program or REAL_START in environ or SOCKET not in os.environ:
            super()._execute_child(*args)  # type: ignore[misc]
            return
        request = {
            "command": command,
            "cwd": os.fspath(given["cwd"] or Path.cwd()),
            "env": environ,
            "session": given["start_new_session"],
        }
        pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        try:
            self._caller = _connect()
            line = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self._caller, [line], files)
            self._caller.sendall(line[sent:])
            self.pid = int(self._answer())
            self._child_created = True
        finally:
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]

    def _answer(self) -> bytes:
        """Return the next line; what follows stays with the kernel, where `select` sees it."""
        assert self._caller is not None
        answer = b""
        while not answer.endswith(b"\n"):
            received = self._caller.recv(1)
            assert received, "the fork server has ended"
            answer += received
        return answer

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._caller is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc, no-any-return]
        if sys.is_finalizing():  # nothing can be imported any more
            return None
        # As in subprocess: while another thread waits, nothing is known yet.
        if not self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            return None
        try:
            return self._collect(0)
        finally:
            self._waitpid_lock.release()  # type: ignore[attr-defined]

    def _wait(self, timeout: float | None) -> int | None:
        if self._caller is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            ended = self._collect(timeout)
        if ended is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _collect(self, timeout: float | None) -> int | None:
        """Wait for the end; return the exit code, or None if the process still runs."""
        assert self._caller is not None
        watch = Stopwatch()
        while self.returncode is None:
            left = None if timeout is None else max(timeout - watch.seconds, 0)
            if select.select([self._caller], [], [], left)[0]:
                self.returncode = os.waitstatus_to_exitcode(int(self._answer()))
                self._caller.close()
            elif timeout is not None and watch.seconds >= timeout:
                return None
        return self.returncode


def run(
    command: Sequence[str | Path],
    *,
    input: str | None = None,  # noqa: A002 - subprocess has it
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command as :func:`subprocess.run` does."""
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.send_signal(signal.SIGKILL)
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
