"""Celery worker processes, and the commands that ``events_worker`` runs beside one."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
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

#: Delays before a child that ended is restarted; reset once it has run longer than the last.
BACKOFF: Final = Backoff(1.0, 60.0)
#: Seconds between checks of the children.
LOOK: Final = 0.5
#: Seconds after SIGTERM until a child is killed.
GRACE: Final = 15.0
#: Celery's default of ``broker_connection_max_retries``.
DEFAULT_CONNECTION_RETRIES: Final = 100
#: Switch off broadcasts that events do not use; N workers would exchange N² messages.
QUIET: Final = ("--without-gossip", "--without-mingle", "--without-heartbeat")


def prepare(app: Celery) -> None:
    """Set the Celery options that events need, for a worker in this process.

    Raises:
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    build_connection(app)
    # Otherwise a consumer timeout ends the worker (celery#6760).
    app.conf.broker_channel_error_retry = True
    # Otherwise a handler keeps running beside the redelivery of its event.
    app.conf.worker_cancel_long_running_tasks_on_connection_loss = True
    # Otherwise the worker ends after RabbitMQ was unreachable for about 50 minutes.
    if app.conf.broker_connection_max_retries == DEFAULT_CONNECTION_RETRIES:
        app.conf.broker_connection_max_retries = math.inf


def run_worker(app: Celery, arguments: Sequence[str]) -> int:
    """Run a Celery worker with the arguments of ``celery worker``; return its exit code.

    ``app.worker_main()`` does the same but returns nothing, so a supervisor could not distinguish
    a failed worker from a stopped one.
    """
    app_option = celery_command.params[0]
    default, app_option.default = app_option.default, app
    try:
        code = celery_command.main(args=["worker", *arguments], standalone_mode=False)
    except click.ClickException as exc:
        raise CommandError(f"celery worker: {exc.format_message()}") from exc
    finally:
        app_option.default = default
    # A worker step of the project may call sys.exit() with a text.
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
    """Management commands in child processes, restarted by a thread when they end.

    Each gets this process's id (``--parent``) and ends with it, even if it is killed. Each has its
    own process group, so Ctrl-C at a terminal reaches only the worker, which then stops them.
    """

    def __init__(self, *commands: Sequence[str]) -> None:
        self._children = [_Child(command[0], self._line(command)) for command in commands]
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the children and the thread that restarts them."""
        for child in self._children:
            self._run(child)
        self._thread = threading.Thread(
            target=self._watch, name="amqp-events-children", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the children; RabbitMQ redelivers what they have not settled."""
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
                logger.warning("killing process %d, which did not stop in %g s", process.pid, GRACE)
                process.kill()
                process.wait()

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK):
            for child in self._children:
                try:
                    self._look(child)
                except OSError:
                    logger.exception("%s could not be started", child.name)

    def _look(self, child: _Child) -> None:
        now = time.monotonic()
        if child.process is not None and (code := child.process.poll()) is not None:
            if now - child.started > BACKOFF.last:
                child.failures = 0
            wait = BACKOFF.delay(child.failures)
            child.failures += 1
            child.due, child.process = now + wait, None
            logger.error(
                "%s ended with %s; restarting it in %g s",
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
                f"{name} cannot run beside the worker, because the settings are not in a module "
                f"(settings.configure()); give --no-{name.removeprefix('events_')} and run it "
                f"separately"
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
    """Return the import path for a child process.

    Celery puts the working directory first. Unless the program lies there, it moves to the end:
    a project's ``celery.py`` would be imported instead of Celery.
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
