#!/usr/bin/env python3
"""Write the options and exit codes of the commands into docs/commands/, from their own parsers.

    .venv/bin/python scripts/command_tables.py

A table stands between the comments `<!-- help of events_declare -->` and `<!-- end of help -->`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = "django_amqp_events.management.commands"
BLOCK = re.compile(r"<!-- help of (\w+) -->\n.*?<!-- end of help -->\n", re.DOTALL)
#: Written as code: options, commands, and names of settings.
CODE = re.compile(r"(?<![\w`])(--[a-z][\w-]*|events_\w+|[A-Z]+_[A-Z_]+|<[\w<>@%-]+)")
#: docs/commands.md explains these for all commands.
COMMON = {"--parent", "--format"}


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    sys.path.insert(0, str(ROOT))
    import django

    django.setup()
    for path in sorted((ROOT / "docs" / "commands").glob("*.md")):
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def written(text: str) -> str:
    """Return a page with the tables of today's parsers."""
    return BLOCK.sub(lambda found: block(found[1]), text)


def block(name: str) -> str:
    """Return the tables of a command between their comments."""
    parser = parser_of(name)
    lines = [*options(parser), *exits(parser)]
    return "\n".join([f"<!-- help of {name} -->", *lines, "<!-- end of help -->", ""])


def parser_of(name: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = (
        import_module(f"{COMMANDS}.{name}").Command().create_parser("manage.py", name)
    )
    return parser


def own_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments that Django does not add to every command."""
    from django.core.management.base import BaseCommand

    django = BaseCommand().create_parser("manage.py", "plain")._actions
    inherited = {option for action in django for option in action.option_strings}
    return [action for action in parser._actions if not inherited & {*action.option_strings}]


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    rows = [
        f"| {usage(action)} | {cell(_help(parser, action))} |"
        for action in own_actions(parser)
        if not COMMON & {*action.option_strings} or len(list(action.choices or ())) > 2
    ]
    if rows:
        yield from ["| option | |", "| --- | --- |", *rows, ""]


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action)


def usage(action: argparse.Action) -> str:
    """Return an argument as on the command line."""
    values = metavar(action)
    if not action.option_strings:
        return f"`{values}`"
    *short, last = action.option_strings
    return ", ".join(f"`{text}`" for text in [*short, f"{last} {values}".rstrip()])


def metavar(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    name: Any = action.metavar
    if isinstance(name, tuple):
        return " ".join(name)
    if name is None and action.choices is not None:
        return "\\|".join(map(str, action.choices))
    name = name or (action.dest.upper() if action.option_strings else action.dest)
    if action.option_strings:
        return f"[{name}]" if action.nargs == "?" else str(name)
    return f"{name} …" if action.nargs == "*" else str(name)


def exits(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the exit codes that a command's help ends with."""
    first, *lines = parser.format_help().partition("\nexit codes:")[2].split("\n")
    if first.strip():
        yield f"The exit codes are {cell(first.strip())}."
        return
    codes: list[list[str]] = []
    for line in lines:
        if found := re.match(r"  (\d)  (.*)", line):
            codes.append([found[1], found[2]])
        elif line.startswith("     ") and codes:
            codes[-1][1] += f" {line.strip()}"
        else:
            break
    yield from [
        "| exit | |",
        "| --- | --- |",
        *(f"| {code} | {cell(text)} |" for code, text in codes),
    ]


def cell(text: str) -> str:
    """Return plain text for a cell: without its last full stop, names as code."""
    return CODE.sub(r"`\1`", text.replace("|", "\\|")).removesuffix(".").replace("*", "\\*")


if __name__ == "__main__":
    sys.exit(main())
