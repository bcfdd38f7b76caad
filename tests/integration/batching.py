"""``manage.py events_batches`` in processes of their own, on a test's broker and database.

Run as a program it is that ``manage.py``: BATCHES_BROKER, BATCHES_DATABASE and a point to die at
(BATCHES_DIES, such as ``before-publish@3``) come in its environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


class RunnerProcess:
    """One ``events_batches``; what it says is in :attr:`said`."""

    def __init__(self, url: str, database: str, *arguments: str, log: Path, **env: str) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.batching", "events_batches", *arguments],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "BATCHES_BROKER": url,
                    "BATCHES_DATABASE": database,
                    **env,
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def stop(self) -> int:
        self.process.terminate()
        return self.wait()

    def wait(self, seconds: float = 60) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the runner does not end:\n{self.said[-4000:]}") from None


class Runners:
    """Starts :class:`RunnerProcess`."""

    def __init__(self, url: str, database: str, where: Path) -> None:
        self.url, self.database, self.where = url, database, where
        self.started: list[RunnerProcess] = []

    def start(self, *arguments: str, **environ: str) -> RunnerProcess:
        log = self.where / f"runner-{len(self.started)}.log"
        process = RunnerProcess(self.url, self.database, *arguments, log=log, **environ)
        self.started.append(process)
        return process


@contextmanager
def runners(url: str, database: str, where: Path) -> Iterator[Runners]:
    """Start runners; all are gone at the end of the block."""
    starter = Runners(url, database, where)
    try:
        yield starter
    except BaseException:
        for each in starter.started:
            print(f"-- {each.log.name}\n{each.said[-3000:]}")
        raise
    finally:
        for each in starter.started:
            each.kill()


def main() -> None:
    import django
    from celery import Celery
    from django.conf import settings
    from django.core.management import execute_from_command_line

    settings.configure(
        SECRET_KEY="of a test",
        USE_TZ=True,
        INSTALLED_APPS=["django_amqp_events"],
        DATABASES={"default": json.loads(os.environ["BATCHES_DATABASE"])},
        AMQP_EVENTS={
            "SERVICE": "billing",
            "AUTODISCOVER": [],
            "HANDLERS": {
                "send_invoice": {
                    "EVENTS": ["shop.order.created"],
                    "HANDLER": "tests.integration.handlers.handle",
                }
            },
        },
    )
    Celery("batches", broker=os.environ["BATCHES_BROKER"]).set_default()
    django.setup()
    if where := os.environ.get("BATCHES_DIES"):
        _die(*where.split("@"))
    execute_from_command_line(sys.argv)


def _die(where: str, chunk: str) -> None:
    """SIGKILL itself at a point of the given chunk."""
    from django_amqp_events import lifecycle, publisher

    calls = 0

    def dying(real: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == int(chunk):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapped

    if where == "before-publish":
        publisher.AmqpBackend.publish = dying(publisher.AmqpBackend.publish)  # type: ignore[method-assign]
    elif where == "before-noted":
        lifecycle.published = dying(lifecycle.published)
    else:
        raise ValueError(where)


if __name__ == "__main__":
    main()
