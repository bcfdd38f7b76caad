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

from typing import Any

from django_amqp_events import conf
from django_amqp_events.management.base import ReportCommand, columns
from django_amqp_events.monitor import alerts, snapshots


class Command(ReportCommand):
    help = __doc__

    def run(self, options: dict[str, Any]) -> int:
        settings = conf.get_settings()
        alerts.check_snapshots(settings, snapshots.clock())
        opened = list(alerts.open_alerts(settings.service))

        def show() -> None:
            for alert in opened:
                since = f"{alert.since:%Y-%m-%d %H:%M:%S} UTC"
                self.stdout.write(f"{since}  {alerts.title(alert)}", self.style.ERROR)
                self.tell(f"    {alerts.alert_text(alert)}")
                if runbook := alerts.runbook(alert):
                    self.tell(f"    {runbook}")
            if not opened:
                self.tell("no open alerts")

        document = [
            {
                **columns(alert, "kind", "key", "since", "last"),
                "text": alerts.alert_text(alert),
                "runbook": alerts.runbook(alert),
            }
            for alert in opened
        ]
        return self.finish(1 if opened else 0, {"alerts": document}, show)
