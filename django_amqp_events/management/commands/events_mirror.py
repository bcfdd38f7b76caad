"""``manage.py events_mirror``: copy the archive queue into the database, as it fills."""

from __future__ import annotations

import os
import signal
import time
from argparse import ArgumentParser
from types import FrameType
from typing import Any

from celery import Celery
from django.core.management.base import CommandError

from django_amqp_events import conf
from django_amqp_events.archive import mirror
from django_amqp_events.archive.message_store import Counts
from django_amqp_events.archive.mirror import Mirror
from django_amqp_events.broker import connection, topology
from django_amqp_events.broker.topology import Names
from django_amqp_events.conf import Settings
from django_amqp_events.declare import registry
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.base import BrokerCommand
from django_amqp_events.monitor import snapshots
from django_amqp_events.monitor.snapshots import SnapshotLoop, SnapshotTaker

#: Seconds between lines of progress, at most one.
PROGRESS = 10.0

_EPILOG = """
exit codes:
  0  stopped (SIGTERM, SIGINT), or with --until-empty the archive is empty
  1  AMQP_EVENTS is wrong

A broker or a database that is away is waited for, and said so. Without
--until-empty it also takes the figures of the dashboard every 30 s.
"""


class Command(BrokerCommand):
    """A shell on :class:`django_amqp_events.archive.mirror.Mirror`."""

    help = (
        "Copy the archived events of this service into the database, where the admin shows them, "
        "and apply the outcomes of replays. Any number may run at once."
    )
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--until-empty", action="store_true", help="End when the archive queue is empty."
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=mirror.BATCH,
            metavar="N",
            help=f"Messages in one transaction at most (default: {mirror.BATCH}).",
        )
        parser.add_argument("--parent", type=int, help="End when this process is gone.")

    def handle(self, *args: Any, **options: Any) -> None:
        if not 1 <= options["batch_size"] <= 10_000:
            raise CommandError("--batch-size is a number from 1 to 10000")
        self._ended = False
        self._parent: int | None = options["parent"]
        self._quiet = options["verbosity"] < 1
        self._since = Counts()
        self._told = time.monotonic()
        try:
            settings = conf.get_settings()
            app = connection.celery_app(settings)
        except AmqpEventsError as exc:
            raise CommandError(str(exc)) from exc
        mirroring = Mirror(
            app=app,
            settings=settings,
            size=options["batch_size"],
            tell=self._tell,
            mirrored=self._mirrored,
            stop=self._stop,
        )
        before = {
            number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)
        }
        self._tell(f"mirroring {Names.of(settings).archive}")
        watcher = None if options["until_empty"] else self._watcher(app, settings)
        if watcher is not None:
            watcher.start()
        try:
            total = mirroring.run(until_empty=options["until_empty"])
        finally:
            if watcher is not None:
                watcher.stop()
            for number, handler in before.items():
                signal.signal(number, handler)
        self._tell(f"stopped; {mirror.describe(total)} in all")

    def _watcher(self, app: Celery, settings: Settings) -> SnapshotLoop | None:
        try:
            declared = topology.build(settings, registry.get_registry())
        except AmqpEventsError as exc:
            # The archive is mirrored all the same.
            self._tell(f"the dashboard gets no figures: {exc}")
            return None
        return SnapshotLoop(
            SnapshotTaker(app, settings, declared), every=snapshots.EVERY, tell=self._tell
        )

    def _stop(self) -> bool:
        if self._parent is not None and os.getppid() != self._parent:
            self._ended = True
        if self._since.messages and time.monotonic() > self._told + PROGRESS:
            self._progress()
        return self._ended

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._ended = True

    def _mirrored(self, counts: Counts) -> None:
        first = not self._since.messages and time.monotonic() > self._told + PROGRESS
        self._since.add(counts)
        if first:
            self._progress()

    def _progress(self) -> None:
        self._tell(mirror.describe(self._since))
        self._since, self._told = Counts(), time.monotonic()

    def _tell(self, text: str) -> None:
        if not self._quiet:
            self.stdout.write(f"events_mirror: {text}")
            self.stdout.flush()
