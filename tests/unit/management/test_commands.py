"""What all commands share, and that texts name commands and steps that exist."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import command_tables
import pytest
from django.contrib.auth.models import Permission
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand

import django_amqp_events
from django_amqp_events import conf
from django_amqp_events.archive import eligibility, tables
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.management import arguments, commands
from django_amqp_events.models import ArchivedEvent, FailureGroup
from django_amqp_events.monitor import alerts, state_texts
from django_amqp_events.reason_texts import TEXTS
from django_amqp_events.reasons import Reason
from tests.commands import run_command
from tests.roles import roles

from ..admin import admin_world as world

FOLDER = Path(str(commands.__file__)).parent
NAMES = sorted(path.stem for path in FOLDER.glob("events_*.py"))
DOCS = Path(__file__).parents[3] / "docs"


def parser_of(name: str) -> Any:
    command: BaseCommand = import_module(f"{commands.__name__}.{name}").Command()
    return command.create_parser("manage.py", name)


@pytest.mark.parametrize("name", NAMES)
def test_help_has_a_summary_and_exit_codes(name: str) -> None:
    text = parser_of(name).format_help()
    summary, _, details = text.partition("\noptions:")
    assert re.search(r"^[A-Z].*\.$", summary, re.MULTILINE)
    assert "\nexit codes:" in details


def test_the_reference_has_the_options_and_exit_codes_of_every_command() -> None:
    """If this fails, run `make tables`."""
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "commands").glob("*.md"))
    assert command_tables.written(text) == text
    index = (DOCS / "commands.md").read_text(encoding="utf-8")
    for name in NAMES:
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert section.count(f"<!-- help of {name} -->") == 1, name
        assert f"#{name})" in index, name
    for option in command_tables.COMMON:
        assert f"`{option}" in index


def test_names_and_signs_of_markdown_are_code_in_the_reference() -> None:
    assert command_tables.cell("--rate N of a|b*, <pid>@%h; MAX_RETRIES.") == (
        r"`--rate` N of a\|b\*, `<pid>@%h`; `MAX_RETRIES`"
    )


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (arguments.age, "1d12h", 129_600.0),
        (arguments.age, " 90S ", 90.0),
        (arguments.integer(1, 10), "10", 10),
        (arguments.positive, "0.5", 0.5),
        (arguments.not_negative, "0", 0.0),
        (arguments.moment, "2026-11-20T13:30+01:00", datetime(2026, 11, 20, 12, 30, tzinfo=UTC)),
        (arguments.service, "billing-2", "billing-2"),
        (arguments.whole_name, "shop.order", "shop.order"),
    ],
)
def test_types_read(kind: Callable[[str], object], text: str, value: object) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (arguments.age, ""),
        (arguments.age, "30"),
        (arguments.age, "-1d"),
        (arguments.age, "9" * 400 + "d"),
        (arguments.integer(1, 10), "11"),
        (arguments.positive, "nan"),
        (arguments.positive, "1e9"),
        (arguments.not_negative, "nan"),
        (arguments.not_negative, "-1"),
        (arguments.moment, "yesterday"),
        (arguments.moment, "9" * 30 + "d"),
        (arguments.moment, "0001-01-01T00:00+14:00"),
        (arguments.moment, "0001-01-01"),
        (arguments.moment, "9999-12-31"),
        (arguments.moment, "36500d"),
        (arguments.service, "a.b"),
        (arguments.service, ""),
        (arguments.whole_name, "shop.#"),
    ],
)
def test_types_refuse(kind: Callable[[str], object], text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        kind(text)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("events_mirror", "--batch-size", "0"),
        ("events_status", "--workers", "-1"),
        ("events_worker", "--hang-after", "nan"),
    ],
)
def test_wrong_arguments_exit_with_2(name: str, option: str, value: str) -> None:
    code, _, err = run_command(name, f"{option}={value}")
    assert (code, f"{value} is not a number" in err) == (2, True), err


# -- the roles that the documentation recommends ---------------------------------------------------


@pytest.mark.django_db
def test_each_permission_belongs_to_a_role() -> None:
    """So a new one needs a decision."""
    of = roles()
    assert list(of) == ["viewer", "operator", "manager"]
    assert all(less < more for less, more in pairwise(of.values()))
    stored = Permission.objects.filter(content_type__app_label="django_amqp_events")
    assert of["manager"] == set(stored.values_list("codename", flat=True))


# -- commands that texts name ----------------------------------------------------------------------


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


# -- next steps ------------------------------------------------------------------------------------


PAGE = Path(__file__).resolve().parents[3] / "docs" / "runbooks.md"
RUNBOOKS = dict(
    re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)


class Unknown(dict[str, Any]):
    """Parameters of any text."""

    def __missing__(self, name: str) -> str:
        return f"<{name}>"


#: A plural has no text without its count.
REASONS = {code: str(text % Unknown(count=2)) for code, text in TEXTS.items()}
COMMANDS = {name for name in get_commands() if name.startswith("events_")}


def test_commands_and_settings_that_texts_name_exist() -> None:
    steps = [*state_texts.STATES.values(), *state_texts.ROW_STATES.values()]
    said = " ".join([*REASONS.values(), *(str(text) for texts in steps for text in texts)])
    assert set(re.findall(r"\bevents_\w+", said)) <= COMMANDS
    named = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b|(?<=AMQP_EVENTS\[.)[A-Z]+", said))
    django = {"AMQP_EVENTS", "ATOMIC_REQUESTS"}
    assert named - django <= conf.KEYS.keys()
    for name, options in re.findall(r"\b(events_\w+)((?: (?:--[\w-]+))+)", said):
        parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
        assert set(options.split()) <= parser._option_string_actions.keys(), (name, options)


@pytest.mark.parametrize("mode", ["outbox", "on_commit", "immediate"])
def test_only_the_outbox_keeps_events_while_the_broker_is_away(mode: str) -> None:
    settings, problems = conf.parse({"SERVICE": "shop", "PUBLISH": mode})
    assert problems == ()
    document: dict[str, Any] = {
        "broker": {"error": "refused", "away": 1e6}, "queues": {}, "archive": {}, "outbox": [],
        "mirror": {},
    }  # fmt: skip
    found = str(alerts.evaluate(document, settings)["broker_away", ""])
    assert ("wait in the outbox" in found) == (mode == "outbox")


@pytest.mark.parametrize("editing", [False, True])
def test_an_unreadable_body_is_edited_where_that_is_allowed(
    editing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = conf.parse({"SERVICE": "billing", "EDITING": editing})
    monkeypatch.setattr(eligibility, "get_settings", lambda: settings)
    monkeypatch.setattr(eligibility, "_own_handler", lambda _: None)
    event = ArchivedEvent(service="billing", reason="malformed", body=b"\xff", body_size=1)
    found = eligibility.target(event)
    assert isinstance(found, Reason)
    assert ("edit the payload" in str(found)) == editing


def test_every_alert_has_a_runbook() -> None:
    assert RUNBOOKS.keys() == alerts.KINDS.keys()
    assert alerts.RUNBOOKS.endswith("/docs/runbooks.md")


@pytest.mark.parametrize("kind", RUNBOOKS)
def test_a_runbook_is_short_and_complete(kind: str) -> None:
    text = RUNBOOKS[kind]
    assert re.findall(r"^\*\*(\w+)", text, re.MULTILINE) == ["Meaning", "Look", "Do", "Over"]
    assert len(text.split()) <= 85  # with the four headings
