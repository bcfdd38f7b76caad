"""Print the events that this service knows: contracts, publishers, handlers and retries.

It knows the events that it declares and those that its handlers subscribe to.

--check FILE compares with a document that --format json has printed before, and
names what may break the consumers of the events.

exit codes:
  0  printed (--check: all changes are compatible, or there are none)
  1  --check: at least one change is incompatible
  2  wrong arguments or settings; --check: FILE cannot be read or compared

examples:
  manage.py events_catalogue --format json > catalogue.json
  manage.py events_catalogue --check catalogue.json     in CI
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from django_amqp_events import conf
from django_amqp_events.catalogue import compatibility, entries
from django_amqp_events.declare import registry
from django_amqp_events.management.base import ReportCommand
from django_amqp_events.management.commands.events_declare import describe_schedule
from django_amqp_events.message.text import counted

#: Added to the error about a file that cannot be compared.
REMEDY: Final = "Write it again with `manage.py events_catalogue --format json`"


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
        return self.finish(0, catalogue, lambda: self._show(catalogue))

    # -- the comparison

    def _check(self, path: Path, catalogue: dict[str, Any]) -> int:
        try:
            saved = json.loads(path.read_bytes())
            changes = compatibility.compare(saved, catalogue)
        except OSError as exc:
            raise self.wrong(f"{path} cannot be read: {exc.strerror or exc}") from exc
        except (RecursionError, ValueError) as exc:  # IncomparableError too
            raise self.wrong(f"{path} cannot be compared: {exc}. {REMEDY}") from exc
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

    # -- the catalogue

    def _show(self, catalogue: dict[str, Any]) -> None:
        events, handlers = catalogue["events"], catalogue["handlers"]
        self.stdout.write(
            self.style.MIGRATE_HEADING(catalogue["prefix"] + catalogue["service"])
            + f": {counted(len(events), 'event')}, {counted(len(handlers), 'handler')}, "
            f"exchange {catalogue['exchange']}"
        )
        policies = {name: each.policy for name, each in registry.get_registry().handlers.items()}
        for event in events:
            self.stdout.write(f"\n{self.style.MIGRATE_LABEL(event['name'])}  {_kind(event)}")
            for line in _event_lines(event):
                self.stdout.write(f"  {line}".rstrip())
        for handler in handlers:
            self.stdout.write(f"\n{self.style.MIGRATE_LABEL(handler['name'])}  handler")
            for line in _handler_lines(handler):
                self.stdout.write(f"  {line}".rstrip())
            schedule = describe_schedule(policies[handler["name"]])
            self.stdout.write(f"  retries   {schedule}")


def _kind(event: dict[str, Any]) -> str:
    return f"event, published by {event['publisher']}" if event["publisher"] else "pattern"


def _event_lines(event: dict[str, Any]) -> Iterator[str]:
    if contract := event["contract"]:
        yield from contract["docstring"].splitlines()
        yield f"contract  {contract['function']}"
        yield from _argument_lines(contract["arguments"])
    elif event["publisher"]:
        yield "no contract"
    if event["format"] != "celery" and event["publisher"]:
        yield f"format    {event['format']}"
    yield from _option_lines(event["options"])
    yield f"handlers  {', '.join(event['handlers']) or 'none in this service'}"


def _handler_lines(handler: dict[str, Any]) -> Iterator[str]:
    yield from handler["docstring"].splitlines()
    yield f"function  {handler['function']}"
    yield from _argument_lines(handler["arguments"])
    yield f"queue     {handler['queue']}"
    yield f"events    {', '.join(handler['patterns'])}"
    yield from _option_lines(handler["options"])


def _argument_lines(arguments: list[dict[str, Any]]) -> Iterator[str]:
    names = max((len(argument["name"]) for argument in arguments), default=0)
    types = max((len(argument["type"]) for argument in arguments), default=0)
    for argument in arguments:
        default = f"= {argument['default']}" if argument["default"] else ""
        yield f"  {argument['name']:<{names}}  {argument['type']:<{types}}  {default}"


def _option_lines(options: dict[str, Any]) -> Iterator[str]:
    """Write options on one line: ``bind, time_limit=30, search=["order_id"]``."""
    texts = [
        name
        if value is True
        else f"{name}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in options.items()
    ]
    if texts:
        yield f"options   {', '.join(texts)}"
