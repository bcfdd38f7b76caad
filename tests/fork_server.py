"""A process that has imported Django, Celery and the package, and forks the tests' processes.

Starting Python and importing all that takes one to two seconds of processor time, and the suite
starts many hundred processes. A fork of this one has its modules and nothing else of it: no
settings, no connections, no threads. Otherwise it is what ``python -m`` or ``python -c`` would
start: a process with its own arguments, environment, folder, files, session and exit code.

Run as a program, with the path of a Unix socket; it ends when its standard input does.
:class:`tests.forked.Popen` asks it. A request is a line of JSON with the three standard files as
file descriptors; the answers are the pid, and the wait status when the process has ended.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NoReturn

#: What processes of the suite import, beside all of the package that needs no settings.
MODULES: Final = """
asgiref.sync billiard.pool billiard.popen_fork celery.app.amqp celery.app.control
celery.app.events celery.app.log celery.app.trace celery.apps.worker celery.backends.base
celery.bin.celery celery.bin.worker celery.concurrency.asynpool celery.concurrency.prefork
celery.concurrency.solo celery.concurrency.thread celery.fixups.django celery.loaders.app
celery.worker.autoscale celery.worker.components celery.worker.consumer celery.worker.strategy
concurrent.futures.thread decimal django.contrib.admin.sites django.core.checks
django.core.handlers.wsgi django.core.mail django.core.management.commands.check
django.core.management.commands.migrate django.db.backends.sqlite3.base
django.db.migrations.autodetector django.db.migrations.executor django.forms
django.template.backends.django django.views.generic encodings.idna gunicorn.app.wsgiapp
gunicorn.workers.gthread gunicorn.workers.sync http.client kombu.asynchronous.hub kombu.pidbox
kombu.transport.pyamqp logging.config psycopg psycopg.types.json psycopg_binary pydantic pymysql
urllib.request uuid zoneinfo
"""
REQUEST_BYTES: Final = 1 << 20


@cache
def preload() -> None:
    """Import what needs neither settings nor a registry of apps."""
    for name in MODULES.split():
        with suppress(ImportError):
            importlib.import_module(name)
    (package,) = map(Path, importlib.import_module("django_amqp_events").__path__)
    for path in sorted(package.rglob("*.py")):
        # Models, and what imports them, wait for the settings of each process.
        with suppress(Exception):
            importlib.import_module(
                ".".join(path.relative_to(package.parent).with_suffix("").parts)
            )
    gc.collect()
    gc.freeze()  # the forks share these objects; collecting would copy them


def serve(path: str) -> dict[str, Any] | None:
    """Fork on request until standard input ends.

    Returns:
        in a forked process, its request; in this one, None.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    callers: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for file in (listener, woken, sys.stdin):
        selector.register(file, selectors.EVENT_READ)
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        if sys.stdin in ready:
            return None
        if woken in ready:
            woken.recv(4096)
            _tell(callers)
        if listener in ready:
            preload()
            caller, _ = listener.accept()
            if (asked := _read(caller)) is None:
                continue
            request, files = asked
            pid = os.fork()
            if not pid:
                selector.close()
                _become(request, files)
                for opened in (listener, woken, wakes, caller, *callers.values()):
                    opened.close()
                return request
            for file in files:
                os.close(file)
            callers[pid] = caller
            caller.sendall(b"%d\n" % pid)


def _read(caller: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Read a request and its files; return None if who asked has ended."""
    received, files, _, _ = socket.recv_fds(caller, REQUEST_BYTES, 3)
    while not received.endswith(b"\n"):
        more = caller.recv(REQUEST_BYTES)
        if not more:
            caller.close()
            for file in files:
                os.close(file)
            return None
        received += more
    return json.loads(received), files


def _tell(callers: dict[int, socket.socket]) -> None:
    """Collect the processes that have ended, and tell those who asked for them."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            caller = callers.pop(pid)
            with suppress(OSError):  # who asked has ended
                caller.sendall(b"%d\n" % status)
            caller.close()


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Give a forked process its own files, folder, environment and arguments."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request["session"]:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    for name, mode, number in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        assert isinstance(stream, io.TextIOWrapper)
        if mode == "w" and (number == 2 or "PYTHONUNBUFFERED" in os.environ):
            stream.reconfigure(line_buffering=True, write_through=True, errors="backslashreplace")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ


def run(option: str, program: str, arguments: list[str]) -> None:
    """Run a program as ``python -m`` or ``python -c`` does."""
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, "" if option == "-c" else os.getcwd())  # noqa: PTH109
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(program, "<string>", "exec"), vars(main))  # noqa: S102


def end(program: Callable[[], None]) -> NoReturn:
    """Run a program and end as the interpreter does, but leave all objects as they are.

    Taking down what was imported would cost more than most of the programs do.
    """
    code: object = 0
    try:
        program()
    except SystemExit as exc:
        code = exc.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001 - the interpreter would end here
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            file.flush()
    os._exit(int(str(code)) & 0xFF)


if __name__ == "__main__":
    if asked := serve(sys.argv[1]):
        sys.orig_argv = asked["command"]
        _, option, program, *arguments = asked["command"]
        end(partial(run, option, program, arguments))
