"""`manage.py place_orders FILE`: accept orders from JSON lines, one order each."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from itertools import islice
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import IntegrityError

from django_amqp_events import PublishError
from example_project.orders.events import order_held
from example_project.orders.intake import HELD_ABOVE, place


class Command(BaseCommand):
    help = (
        "Accept orders from a file of JSON lines. Exit codes: 0 all lines were read, some may be "
        "refused; 1 events were not confirmed, but their orders are saved."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path)
        parser.add_argument("--limit", type=int, help="read only the first N lines", metavar="N")
        parser.add_argument("--format", choices=["text", "json"], default="text")

    def handle(self, *args: Any, **options: Any) -> None:
        self.json = options["format"] == "json"
        self.verbosity = options["verbosity"]
        counts = {"published": 0, "refused": 0, "unconfirmed": 0}
        held: list[dict[str, Any]] = []
        with options["file"].open("rb") as lines:
            for number, line in enumerate(islice(lines, options["limit"]), 1):
                outcome, about, reason = self._line(line, held)
                counts[outcome] += 1
                self._say(number, outcome, about, reason)
        if held:
            # Confirmed before this returns, and much faster than one by one.
            order_held.using(mode="immediate").publish_many(held)
        if self.json:
            self.stdout.write(json.dumps({"done": True, "held": len(held), **counts}))
        else:
            self.stdout.write(
                self.style.SUCCESS(f"{counts['published']} orders published")
                + f", {counts['refused']} lines refused, {len(held)} orders held for review"
            )
        if counts["unconfirmed"]:
            raise CommandError(
                f"{counts['unconfirmed']} orders are saved, but their events were not confirmed. "
                f"Check the broker and manage.py events_declare, then publish the events named "
                f"above again with the same event ids."
            )

    def _line(self, line: bytes, held: list[dict[str, Any]]) -> tuple[str, str, str]:
        about = ""
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                return "refused", "", "the line is not a JSON object"
            about = str(entry.get("number", ""))
            order = place(entry)
        except PublishError as exc:
            return "unconfirmed", about, f"{exc} (event id {exc.event_id})"
        except IntegrityError:
            return "refused", about, f"order {about} exists already"
        except json.JSONDecodeError as exc:
            return "refused", "", f"the line is not valid JSON: {exc}"
        except ValueError as exc:
            return "refused", about, str(exc)
        if order.total > HELD_ABOVE:
            held.append({"number": order.number, "reason": f"more than {HELD_ABOVE}"})
        return "published", about, ""

    def _say(self, number: int, outcome: str, about: str, reason: str) -> None:
        if self.json:
            line = {"line": number, "outcome": outcome, "number": about, "reason": reason}
            self.stdout.write(json.dumps(line, ensure_ascii=False))
        elif outcome != "published" or self.verbosity > 1:
            style = self.style.SUCCESS if outcome == "published" else self.style.WARNING
            self.stdout.write(f"line {number}: {style(outcome)} {about} {reason}".rstrip())
