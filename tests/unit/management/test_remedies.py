"""What texts of the package tell a user to run is what the commands accept."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import django_amqp_events
from django_amqp_events.archive import tables
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.models import ArchivedEvent, FailureGroup
from tests.commands import run_command

from ..admin import admin_world as world

PACKAGE = Path(str(django_amqp_events.__file__)).parent
#: Not beside the package, which the suite has installed.
ROOT = Path(__file__).resolve().parents[3]
UUID = "33df9592-1df2-8152-ba39-9d7b4b06ea36"
#: Options of which a text speaks, without the others that they need.
MENTIONED = {"events_replay --background", "events_replay --group", "events_replay --group ID"}


def in_code() -> list[str]:
    """Return the commands with arguments that texts, templates and runbooks have in backquotes."""
    found = []
    runbooks = ROOT / "docs" / "runbooks.md"
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.html"), runbooks]:
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        found += re.findall(r"`(?:manage\.py )?(events_[a-z]+ [^`]+)`", text)
    return sorted(set(found) - MENTIONED)


def in_docs() -> list[str]:
    """Return the commands of the console blocks."""
    found = []
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
            found += re.findall(r"^\$ manage\.py (events_[^\n>|#]+)", block, re.MULTILINE)
    return sorted(set(found))


@pytest.mark.parametrize("line", [*in_code(), *in_docs()])
def test_a_command_takes_the_arguments_that_texts_give_it(
    settings: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AMQP_EVENTS = world.EVENTS
    line = re.sub(r"%\(pk\)s|%\(group\)s|\{str\(batch\.pk\)\[:8\]\}|\bID\b", UUID, line)
    line = re.sub(r"%\(\w+\)s|\{\w+\}", "billing", line)
    name, *arguments = shlex.split(line)
    command = import_module(f"django_amqp_events.management.commands.{name}").Command()
    options = vars(command.create_parser("manage.py", name).parse_args(arguments))
    if name == "events_replay":
        # It refuses options without those that they need.
        monkeypatch.setattr("django_amqp_events.archive.search_values.check_paths", list)
        monkeypatch.setattr("django_amqp_events.management.arguments.check_handlers", list)
        command._filters(options)


@pytest.mark.django_db
def test_the_page_about_a_renamed_service(settings: Any) -> None:
    """Its groups are those of the new name, with their notes."""
    settings.AMQP_EVENTS = {**world.EVENTS, "SERVICE": "old"}
    world.make(service="old")
    failure_groups.rebuild()
    FailureGroup.objects.update(note="wait for the release")
    page = (ROOT / "docs" / "outbox.md").read_text(encoding="utf-8")
    [row] = re.findall(r"^\| the archive, open \| (.*) \|$", page, re.MULTILINE)
    settings.AMQP_EVENTS = {**world.EVENTS, "SERVICE": "new"}
    assert run_command("events_groups")[1] == "no group has open events\n"
    code, command = re.findall(r"`([^`]*ArchivedEvent[^`]*|manage\.py events_[^`]*)`", row)
    exec(  # noqa: S102
        code.replace("OLD", "old").replace("NEW", "new"), {"ArchivedEvent": ArchivedEvent}
    )
    assert run_command(*command.split()[1:])[0] == 0
    assert "1 open  send_invoice" in run_command("events_groups")[1]
    event = tables.rows().select_related("group").get()
    assert event.group is not None
    assert (event.group.service, event.group.note) == ("new", "wait for the release")
