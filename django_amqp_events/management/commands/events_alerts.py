"""Print the open alerts of this service.

The command reads only the database. If statistics are no longer collected, it
raises the alert "stale", which the collecting process cannot do: run it from
cron or from your monitoring, on another machine.

exit codes:
  0  no open alert
  1  at least one open alert
  2  unknown: wrong settings, or the database is unreachable
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django_amqp_events import conf
from django_amqp_events.management.base import ReportCommand, columns
from django_amqp_events.monitor import alerts


class Command(ReportCommand):
    help = __doc__

    def run(self, options: dict[str, Any]) -> int:
        settings = conf.get_settings()
        alerts.check_snapshots(settings, datetime.now(UTC))
        found = list(alerts.open_alerts(settings.service))

        def show() -> None:
            for each in found:
                since = f"{each.since:%Y-%m-%d %H:%M:%S} UTC"
                self.stdout.write(f"{since}  {alerts.title(each)}", self.style.ERROR)
                self.tell(f"    {alerts.alert_text(each)}")
                if runbook := alerts.runbook(each):
                    self.tell(f"    {runbook}")
            if not found:
                self.tell("no open alerts")

        document = [
            {
                **columns(each, "kind", "key", "since", "last"),
                "text": alerts.alert_text(each),
                "runbook": alerts.runbook(each),
            }
            for each in found
        ]
        return self.finish(1 if found else 0, {"alerts": document}, show)
