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
from django_amqp_events.catalogue.entries import Argument, Catalogue, Consumer, Entry
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
        catalogue = entries.build(conf.get_settings(), registry.get_registry())
        if options["check"]:
            return self._check(options["check"], catalogue)
        return self.finish(0, entries.document(catalogue), lambda: self._show(catalogue))

    # -- the comparison

    def _check(self, path: Path, catalogue: Catalogue) -> int:
        try:
            saved = json.loads(path.read_bytes())
            changes = compatibility.compare(saved, entries.document(catalogue))
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

    def _show(self, catalogue: Catalogue) -> None:
        self.stdout.write(
            self.style.MIGRATE_HEADING(catalogue.prefix + catalogue.service)
            + f": {counted(len(catalogue.entries), 'event')}, "
            f"{counted(len(catalogue.consumers), 'handler')}, exchange {catalogue.exchange}"
        )
        for entry in catalogue.entries:
            self.stdout.write("")
            for line in _entry_lines(entry, self.style.MIGRATE_LABEL):
                self.stdout.write(line)
        for consumer in catalogue.consumers:
            self.stdout.write("")
            for line in _handler_lines(consumer, self.style.MIGRATE_LABEL):
                self.stdout.write(line)


def _entry_lines(entry: Entry, style: Any) -> Iterator[str]:
    kind = "pattern" if entry.is_pattern else f"event, published by {entry.publisher}"
    yield f"{style(entry.name)}  {kind}"
    if entry.contract:
        yield from _indented(entry.contract.docstring)
        yield f"  contract  {entry.contract.function}"
        yield from _argument_lines(entry.contract.arguments)
    elif not entry.is_pattern:
        yield "  no contract"
    if entry.format != "celery" and not entry.is_pattern:
        yield f"  format    {entry.format}"
    yield from _option_lines(entry.options_line)
    names = ", ".join(consumer.handler.name for consumer in entry.consumers)
    yield f"  handlers  {names or 'none in this service'}"


def _handler_lines(consumer: Consumer, style: Any) -> Iterator[str]:
    handler = consumer.handler
    yield f"{style(handler.name)}  handler"
    yield from _indented(consumer.interface.docstring)
    yield f"  function  {consumer.interface.function}"
    yield from _argument_lines(consumer.interface.arguments)
    yield f"  queue     {handler.queue}"
    yield f"  events    {', '.join(handler.bindings)}"
    yield from _option_lines(consumer.options_line)
    yield f"  retries   {describe_schedule(handler.policy)}"


def _argument_lines(arguments: tuple[Argument, ...]) -> Iterator[str]:
    names = max((len(argument.name) for argument in arguments), default=0)
    types = max((len(argument.type) for argument in arguments), default=0)
    for argument in arguments:
        default = f"= {argument.default}" if argument.default else ""
        yield f"    {argument.name:<{names}}  {argument.type:<{types}}  {default}".rstrip()


def _option_lines(options: str) -> Iterator[str]:
    if options:
        yield f"  options   {options}"


def _indented(text: str) -> Iterator[str]:
    return (f"  {line}".rstrip() for line in text.splitlines())
