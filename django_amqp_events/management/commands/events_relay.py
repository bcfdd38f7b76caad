"""``manage.py events_relay``: publish what is left in the outbox."""

from __future__ import annotations

import os
import signal
import threading
import time
from argparse import ArgumentParser
from dataclasses import replace
from types import FrameType
from typing import Any

from django.core.management.base import CommandError
from django.db import connections

from django_amqp_events import conf
from django_amqp_events.broker import connection
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.base import BrokerCommand
from django_amqp_events.publish import outbox, relay
from django_amqp_events.publish.relay import Relay, RelayCounts

#: Seconds between lines of progress, at most one.
PROGRESS = 10.0

_EPILOG = """
exit codes:
  0  stopped (SIGTERM, SIGINT), or with --until-empty nothing is due
  1  AMQP_EVENTS is wrong, --database names no database, or --service is no
     name of a service

A broker or a database that is away is waited for, and said so.
"""


class Command(BrokerCommand):
    """A shell on :class:`django_amqp_events.publish.relay.Relay`, one for each database."""

    help = (
        "Publish the events of this service that are left in the outbox, because their process "
        "ended or the broker was away. Any number may run at once. Run by events_worker; a "
        "service that only publishes runs it by itself."
    )
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--until-empty", action="store_true", help="End when nothing is due.")
        parser.add_argument(
            "--database",
            action="append",
            metavar="ALIAS",
            help="Only the outbox in this database (repeatable); all that have one by default.",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=relay.BATCH,
            metavar="N",
            help=f"Events taken at a time at most (default: {relay.BATCH}).",
        )
        parser.add_argument(
            "--service",
            metavar="NAME",
            help="Publish what a service of another name has left: this one, before it was "
            "renamed. Its events go to this one's broker, as that service's.",
        )
        parser.add_argument("--parent", type=int, help="End when this process is gone.")

    def handle(self, *args: Any, **options: Any) -> None:
        if not 1 <= options["batch_size"] <= relay.BATCH:
            raise CommandError(f"--batch-size is a number from 1 to {relay.BATCH}")
        self._ended = False
        self._parent: int | None = options["parent"]
        self._quiet = options["verbosity"] < 1
        self._since = RelayCounts()
        self._told = time.monotonic()
        self._lock = threading.Lock()
        try:
            settings = conf.get_settings()
            app = connection.celery_app(settings)
            if options["service"] is not None:
                if not conf.SERVICE.fullmatch(options["service"]):
                    raise CommandError(
                        f"--service is {options['service']!r:.80}; a service's name is letters, "
                        f"digits, - and _"
                    )
                # What a relay takes and tells of is that service's; all else stays this one's.
                settings = replace(settings, service=options["service"])
        except AmqpEventsError as exc:
            raise CommandError(str(exc)) from exc
        chosen: list[str] | None = options["database"]
        unknown = [alias for alias in chosen or () if alias not in connections]
        if unknown:
            raise CommandError(f"DATABASES has no {unknown[0]!r}")
        relays = [
            Relay(
                app=app,
                settings=settings,
                alias=alias,
                size=options["batch_size"],
                # The others may, where something is published with using(using=…).
                needed=chosen is not None
                or (alias == settings.database and settings.publish == "outbox"),
                tell=self._tell,
                relayed=self._relayed,
                stop=self._stop,
            )
            for alias in chosen or outbox.aliases(settings)
        ]
        before = {
            number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)
        }
        self._tell(f"relaying the outbox of {settings.service}")
        try:
            self._run(relays, until_empty=options["until_empty"])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        total = RelayCounts()
        for each in relays:
            total.add(each.total)
        self._tell(f"stopped; {describe(total)} in all")

    def _run(self, relays: list[Relay], *, until_empty: bool) -> None:
        """Run the first here and the others in threads: none waits for another's database."""
        raised: list[BaseException] = []

        def work(each: Relay) -> None:
            try:
                each.run(until_empty=until_empty)
            except BaseException as exc:  # noqa: BLE001 - it is raised below
                raised.append(exc)
                self._ended = True
            finally:
                connections.close_all()

        threads = [threading.Thread(target=work, args=(each,)) for each in relays[1:]]
        for thread in threads:
            thread.start()
        try:
            relays[0].run(until_empty=until_empty)
        except BaseException:
            self._ended = True
            raise
        finally:
            for thread in threads:
                thread.join()
        if raised:
            raise raised[0]

    def _stop(self) -> bool:
        if self._parent is not None and os.getppid() != self._parent:
            self._ended = True
        if self._since.rows and time.monotonic() > self._told + PROGRESS:
            self._progress()
        return self._ended

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._ended = True

    def _relayed(self, counts: RelayCounts) -> None:
        with self._lock:
            first = not self._since.rows and time.monotonic() > self._told + PROGRESS
            self._since.add(counts)
        if first:
            self._progress()

    def _progress(self) -> None:
        with self._lock:
            since, self._since, self._told = self._since, RelayCounts(), time.monotonic()
        self._tell(describe(since))

    def _tell(self, text: str) -> None:
        if not self._quiet:
            self.stdout.write(f"events_relay: {text}")
            self.stdout.flush()


def describe(counts: RelayCounts) -> str:
    """Write counts for a console: ``3 events published, 1 failed``."""
    found = [
        (counts.published, "events published"),
        (counts.unrouted, "of them unrouted"),
        (counts.failed, "failed"),
    ]
    shown = [f"{number} {words}" for number, words in found if number]
    return ", ".join(shown) or "nothing"
