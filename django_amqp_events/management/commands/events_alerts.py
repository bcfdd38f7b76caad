"""``manage.py events_alerts``: list the open alerts."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import no_translations

from django_amqp_events import conf
from django_amqp_events.management.archive import FORMAT, ArchiveCommand
from django_amqp_events.monitor import alerts

_EPILOG = """
It looks at the database alone. Where events_mirror takes no figures any more it
raises the alert "stale", which nobody else can: run it from cron or from your
monitoring, on another machine.

exit codes:
  0  no alert lasts
  1  one does, or more
  2  it cannot be seen: wrong settings, the database is away
"""


class Command(ArchiveCommand):
    """A shell on :mod:`django_amqp_events.monitor.alerts`."""

    help = "Show the alerts of this service that last, and raise one where nobody takes figures."
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Default: text."
        )

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        self.prepare(options)
        with self.interruptible():
            settings = conf.get_settings()
            alerts.check_snapshots(settings, datetime.now(UTC))
            found = list(alerts.open_alerts(settings.service))
        code = 1 if found else 0
        if self.json:
            told = [
                {
                    "kind": each.kind,
                    "key": each.key,
                    "since": each.since.isoformat(),
                    "last": each.last.isoformat(),
                    "text": each.text,
                }
                for each in found
            ]
            document = {"version": FORMAT, "exit_code": code, "alerts": told}
            self.stdout.write(json.dumps(document, indent=2))
        else:
            for each in found:
                since = f"{each.since:%Y-%m-%d %H:%M:%S}"
                self.stdout.write(self.style.ERROR(f"{since}  {alerts.title(each)}"))
                self.tell(f"    {alerts.alert_text(each)}")
            if not found:
                self.tell("no alert lasts")
        if code:
            sys.exit(code)
