"""Commands of ``manage.py`` in processes of their own, on a test's broker and database.

Run as a program it is that ``manage.py``: COMMAND_BROKER, COMMAND_DATABASE and a point to die at
(COMMAND_DIES, such as ``before-noted@3``: at the third call) come in its environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.acceptance.harness import STARTED, Worker
from tests.conftest import Database, Vhost


class Process(Worker):
    """One command; what it says is in :attr:`said`."""

    @property
    def said(self) -> str:
        return self.log


class Processes:
    """Starts a command, with further arguments and variables, as often as it is asked to."""

    def __init__(self, command: str, environ: dict[str, str], where: Path) -> None:
        self.command, self.environ, self.where = command, environ, where
        self.started: list[Process] = []

    def start(self, *arguments: str, **environ: str) -> Process:
        process = Process.start(
            [sys.executable, "-m", __name__, self.command, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **self.environ, **environ},
            where=self.where,
            name=self.command,
        )
        self.started.append(process)
        return process

    def empty(self, *arguments: str) -> str:
        """Run one until the archive is empty; returns what it said."""
        process = self.start("--until-empty", *arguments)
        code = process.wait(60)
        assert code == 0, process.said
        return process.said


@contextmanager
def _processes(command: str, url: str, database: str, where: Path) -> Iterator[Processes]:
    environ = {"COMMAND_BROKER": url, "COMMAND_DATABASE": database}
    starter = Processes(command, environ, where)
    try:
        yield starter
    except BaseException:
        for each in starter.started:
            print(f"-- {each.log_path.name}\n{each.said[-3000:]}")
        raise
    finally:
        for each in starter.started:
            each.kill()
            STARTED.remove(each)


def mirrors(vhost: Vhost, database: Database, where: Path) -> AbstractContextManager[Processes]:
    """Start ``events_mirror`` processes for a block."""
    return _processes("events_mirror", vhost.url, database.json, where)


def runners(url: str, database: str, where: Path) -> AbstractContextManager[Processes]:
    """Start ``events_batches`` processes for a block."""
    return _processes("events_batches", url, database, where)


def main() -> None:
    import django
    from celery import Celery
    from django.conf import settings
    from django.core.management import execute_from_command_line

    settings.configure(
        SECRET_KEY="of a test",
        USE_TZ=True,
        INSTALLED_APPS=["django_amqp_events"],
        DATABASES={"default": json.loads(os.environ["COMMAND_DATABASE"])},
        AMQP_EVENTS={
            "SERVICE": "billing",
            "AUTODISCOVER": [],
            "HANDLERS": {
                "send_invoice": {
                    "EVENTS": ["shop.order.created"],
                    "HANDLER": "tests.integration.handlers.handle",
                }
            },
            **json.loads(os.environ.get("COMMAND_SETTINGS", "{}")),
        },
    )
    Celery("command", broker=os.environ["COMMAND_BROKER"]).set_default()
    django.setup()
    if point := os.environ.get("COMMAND_DIES"):
        _die(*point.split("@"))
    execute_from_command_line(sys.argv)


def _die(where: str, call: str) -> None:
    """SIGKILL itself before a step, at the given call."""
    from django_amqp_events.archive import states
    from django_amqp_events.publish import publisher

    calls = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == int(call):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapped

    points: dict[str, tuple[Any, str]] = {
        "before-publish": (publisher.AmqpBackend, "publish"),
        "before-noted": (states, "published"),
    }
    owner, name = points[where]
    setattr(owner, name, dying(getattr(owner, name)))


if __name__ == "__main__":
    main()
