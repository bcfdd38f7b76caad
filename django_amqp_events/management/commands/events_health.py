"""Examine the processes of this service in this container, for liveness and readiness probes.

--live fails if a loop of a process hangs: restart it then.
While RabbitMQ or a database is unreachable it succeeds. --ready fails also if a
worker does not consume, or a service is paused. Neither connects to anything.

exit codes:
  0  all processes are alive (--live) or ready (--ready)
  1  one is not, or there is none
  2  unknown: wrong settings

examples:
  manage.py events_health --live
  manage.py events_health --ready --part worker --part relay
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django_amqp_events import conf
from django_amqp_events.management.base import ReportCommand
from django_amqp_events.monitor import health


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        mode = parser.add_mutually_exclusive_group(required=True)
        mode.add_argument(
            "--live", action="store_true", help="Fail if a process hangs and must be restarted."
        )
        mode.add_argument("--ready", action="store_true", help="Fail if a process is not ready.")
        parser.add_argument(
            "--part",
            action="append",
            default=[],
            choices=("worker", "reaper", *health.COMPANION, "companion"),
            help="Require this part, and examine only such parts; repeatable. companion: "
            f"{', '.join(health.COMPANION)} (default: whatever runs).",
        )
        super().add_arguments(parser)

    def run(self, options: dict[str, Any]) -> int:
        parts = [
            part
            for choice in options["part"]
            for part in (health.COMPANION if choice == "companion" else (choice,))
        ]
        examined = health.examine(conf.get_settings(), ready=options["ready"], parts=parts)
        good = "ready" if options["ready"] else "alive"

        def show() -> None:
            for state in examined:
                process = f" (process {state.process})" if state.process else ""
                # Neither, if no process runs.
                subject = f"{state.part or 'a process'}{process}: " if state.part or process else ""
                text = f"{subject}{state.problem or good}"
                if state.problem or self.verbosity:
                    self.stdout.write(text, self.style_of("error" if state.problem else "ok"))

        code = 1 if any(state.problem for state in examined) else 0
        return self.finish(code, {"processes": [asdict(state) for state in examined]}, show)
