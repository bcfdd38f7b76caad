"""Print the events that this service knows as JSON: contracts, publishers and handlers.

It knows the events that it declares and those that its handlers subscribe to.

--check FILE compares with a document printed before, and prints the changes; a
change that may break consumers is incompatible.

exit codes:
  0  printed (--check: all changes are compatible, or there are none)
  1  --check: at least one change is incompatible
  2  wrong arguments or settings; --check: FILE cannot be read or compared

examples:
  manage.py events_catalogue > catalogue.json
  manage.py events_catalogue --check catalogue.json     in CI
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django_amqp_events import conf
from django_amqp_events.catalogue import compatibility, entries
from django_amqp_events.declare import registry
from django_amqp_events.management.base import ReportCommand


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--check",
            metavar="FILE",
            type=Path,
            help="Compare with this document; see the exit codes.",
        )
        super().add_arguments(parser)

    def run(self, options: dict[str, Any]) -> int:
        catalogue = entries.document(conf.get_settings(), registry.get_registry())
        if options["check"]:
            return self._check(options["check"], catalogue)
        self.stdout.write(json.dumps(catalogue, indent=2))
        return 0

    def _check(self, path: Path, catalogue: dict[str, Any]) -> int:
        try:
            saved = json.loads(path.read_bytes())
            changes = compatibility.compare(saved, catalogue)
        except OSError as exc:
            raise self.wrong(f"{path} cannot be read: {exc.strerror or exc}") from exc
        except (RecursionError, ValueError) as exc:
            remedy = "Write it again with `manage.py events_catalogue`"
            raise self.wrong(f"{path} cannot be compared: {exc}. {remedy}") from exc
        broken = not all(change.compatible for change in changes)

        def show() -> None:
            for change in changes:
                if change.compatible:
                    self.stdout.write(f"compatible: {change}", self.style.SUCCESS)
                else:
                    self.stdout.write(f"incompatible: {change}", self.style.ERROR)
            if not changes:
                self.tell("no changes")

        document = {
            "result": "incompatible" if broken else "compatible",
            "changes": list(map(asdict, changes)),
        }
        return self.finish(1 if broken else 0, document, show)
