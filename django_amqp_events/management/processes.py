"""Worker processes: what all have in common, and those that ``events_worker`` runs beside it."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from celery import Celery
from celery.bin.celery import celery as celery_command
from django.conf import settings
from django.core.management.base import CommandError

from django_amqp_events.backoff import Backoff
from django_amqp_events.broker.connection import build_connection
from django_amqp_events.exceptions import ConfigurationError

logger = logging.getLogger(__name__)

#: Seconds before a child that has ended is started again: from the first again once it has lived
#: for longer than the last.
BACKOFF: Final = Backoff(1.0, 60.0)
#: Seconds between looks.
LOOK: Final = 0.5
#: Seconds that a child has to end when it is asked to.
GRACE: Final = 15.0
#: Celery's ``broker_connection_max_retries`` where nobody has set it.
DEFAULT_CONNECTION_RETRIES: Final = 100
#: Broadcasts between workers: N workers exchange N² messages with no use for events.
QUIET: Final = ("--without-gossip", "--without-mingle", "--without-heartbeat")


def prepare(app: Celery) -> None:
    """Set what events ask of the worker that this process is about to be.

    Without the first, a consumer timeout ends the worker (celery#6760); without the second, a run
    whose connection was lost goes on beside its redelivery; with Celery's default of the third it
    ends for good when the broker is away for some 50 minutes.

    Raises:
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    build_connection(app)
    app.conf.broker_channel_error_retry = True
    app.conf.worker_cancel_long_running_tasks_on_connection_loss = True
    if app.conf.broker_connection_max_retries == DEFAULT_CONNECTION_RETRIES:
        app.conf.broker_connection_max_retries = math.inf


def run_worker(app: Celery, arguments: Sequence[str]) -> int:
    """Make this process a Celery worker; return its exit code.

    ``app.worker_main()`` is the same, and returns nothing: a supervisor that restarts what has
    failed would take a worker that gave up for one that was asked to end.

    Args:
        arguments: as behind ``celery worker``.
    """
    app_option = celery_command.params[0]
    default, app_option.default = app_option.default, app
    try:
        code = celery_command.main(args=["worker", *arguments], standalone_mode=False)
    except click.ClickException as exc:
        raise CommandError(f"celery worker: {exc.format_message()}") from exc
    finally:
        app_option.default = default
    # A step of somebody's own may end it by sys.exit() with a text.
    return code if isinstance(code, int) else int(bool(code))


@dataclass(slots=True)
class _Child:
    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    due: float = 0.0
    failures: int = 0


class Children:
    """Management commands in processes of their own, watched by a thread.

    Each is told this process's id (``--parent``) and ends when that is gone, however it went.
    They have process groups of their own: Ctrl-C at a terminal is for the worker, which ends
    them when it has stopped.
    """

    def __init__(self, *commands: Sequence[str]) -> None:
        self._children = [_Child(command[0], self._line(command)) for command in commands]
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start them all, and look after them from now on."""
        for child in self._children:
            self._run(child)
        self._thread = threading.Thread(
            target=self._watch, name="amqp-events-children", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End them all; one that does not is killed. What they had not settled is redelivered."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        running = [child.process for child in self._children if child.process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + GRACE
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("process %d did not end in %g s and is killed", process.pid, GRACE)
                process.kill()
                process.wait()

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK):
            for child in self._children:
                try:
                    self._look(child)
                except OSError:
                    logger.exception("%s cannot be started", child.name)

    def _look(self, child: _Child) -> None:
        now = time.monotonic()
        if child.process is not None and (code := child.process.poll()) is not None:
            if now - child.started > BACKOFF.last:
                child.failures = 0
            wait = BACKOFF.delay(child.failures)
            child.failures += 1
            child.due, child.process = now + wait, None
            logger.error(
                "%s ended with %s; it is started again in %g s",
                child.name,
                f"signal {-code}" if code < 0 else f"exit code {code}",
                wait,
            )
        if child.process is None and now >= child.due:
            child.due = now + BACKOFF.delay(child.failures)
            self._run(child)

    @staticmethod
    def _run(child: _Child) -> None:
        child.started = time.monotonic()
        child.process = subprocess.Popen(  # noqa: S603 - our own command line
            child.command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_path())},
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    @staticmethod
    def _line(command: Sequence[str]) -> list[str]:
        name, *options = command
        module = settings.SETTINGS_MODULE
        if not module:
            raise ConfigurationError(
                f"{name} cannot be started in a process of its own, because the settings of this "
                f"one are in no module (settings.configure()); give "
                f"--no-{name.removeprefix('events_')}, and run it yourself"
            )
        return [
            sys.executable,
            "-P",
            *(f"-W{option}" for option in sys.warnoptions),
            "-m",
            "django",
            name,
            *options,
            "--settings",
            str(module),
            "--parent",
            str(os.getpid()),
        ]


def _path() -> list[str]:
    """Return the import path of this process for a child process.

    Celery puts the working directory in front. Where that is not where this program was started
    from, a project's own ``celery.py`` in it would be taken for Celery: it comes last.
    """
    here, program = Path.cwd(), Path(sys.argv[0]).absolute().parent
    path = [entry for entry in sys.path if entry]
    if here == program:
        return path
    return sorted(path, key=lambda entry: Path(entry) == here)


def follow(parent: int | None) -> None:
    """End this process when *parent* ends."""
    if parent is None:
        return

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="amqp-events-parent", daemon=True).start()


@contextmanager
def stop_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call *stop* at SIGTERM and SIGINT; outside the main thread, which alone gets them, never."""
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if main else ()
    before = {number: signal.signal(number, lambda *_: stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
