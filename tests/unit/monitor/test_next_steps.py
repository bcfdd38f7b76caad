"""Each alert, state, reason and runbook names a next step that exists, or needs none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.core.management import get_commands, load_command_class

from django_amqp_events import conf
from django_amqp_events.archive import eligibility
from django_amqp_events.models import ArchivedEvent, State
from django_amqp_events.monitor import alerts, state_texts
from django_amqp_events.reason_texts import TEXTS
from django_amqp_events.reasons import Reason

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


def test_no_state_is_left_out() -> None:
    assert state_texts.STATES.keys() == set(State)


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
