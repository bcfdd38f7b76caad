"""``manage.py events_mirror`` in processes of their own, on a test's broker and database.

Run as a program it is that ``manage.py``: settings and a point to die at come in its environment.
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

from tests.conftest import Database, Vhost

ROOT = Path(__file__).resolve().parent.parent.parent


class MirrorProcess:
    """One ``events_mirror``; what it says is in :attr:`said`."""

    def __init__(
        self, vhost: Vhost, database: Database, *arguments: str, log: Path, **environ: str
    ) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.mirroring", "events_mirror", *arguments],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "MIRROR_BROKER": vhost.url,
                    "MIRROR_DATABASE": database.json,
                    **environ,
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

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
            raise AssertionError(f"the mirror does not end:\n{self.said[-4000:]}") from None


@contextmanager
def mirrors(vhost: Vhost, database: Database, where: Path) -> Iterator[Mirrors]:
    """Start mirrors; all are gone at the end of the block."""
    starter = Mirrors(vhost, database, where)
    try:
        yield starter
    except BaseException:
        for each in starter.started:
            print(f"-- {each.log.name}\n{each.said[-3000:]}")
        raise
    finally:
        for each in starter.started:
            each.kill()


class Mirrors:
    """Starts :class:`MirrorProcess`."""

    def __init__(self, vhost: Vhost, database: Database, where: Path) -> None:
        self.vhost, self.database, self.where = vhost, database, where
        self.started: list[MirrorProcess] = []

    def start(self, *arguments: str, **environ: str) -> MirrorProcess:
        log = self.where / f"mirror-{len(self.started)}.log"
        process = MirrorProcess(self.vhost, self.database, *arguments, log=log, **environ)
        self.started.append(process)
        return process

    def empty(self, *arguments: str) -> str:
        """Run one until the archive is empty; returns what it said."""
        process = self.start("--until-empty", *arguments)
        code = process.wait()
        assert code == 0, process.said
        return process.said


def main() -> None:
    import django
    from celery import Celery
    from django.conf import settings
    from django.core.management import execute_from_command_line

    settings.configure(
        SECRET_KEY="of a test",
        USE_TZ=True,
        INSTALLED_APPS=["django_amqp_events"],
        DATABASES={"default": json.loads(os.environ["MIRROR_DATABASE"])},
        AMQP_EVENTS={"SERVICE": "billing", "HANDLERS": {}, "AUTODISCOVER": []},
    )
    Celery("mirror", broker=os.environ["MIRROR_BROKER"]).set_default()
    django.setup()
    if where := os.environ.get("MIRROR_DIES"):
        _die(*where.split("@"))
    execute_from_command_line(sys.argv)


def _die(where: str, batch: str) -> None:
    """SIGKILL itself at a point of the given batch."""
    from django_amqp_events import mirror
    from django_amqp_events.intake import Intake

    calls = 0

    def count(real: Any, first: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            done = None if first and calls == int(batch) else real(*args, **kwargs)
            if calls == int(batch):
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return wrapped

    if where == "before-commit":
        mirror._store_events = count(mirror._store_events, first=False)
    elif where == "before-ack":
        Intake.ack = count(Intake.ack, first=True)  # type: ignore[method-assign]
    else:
        raise ValueError(where)


if __name__ == "__main__":
    main()
