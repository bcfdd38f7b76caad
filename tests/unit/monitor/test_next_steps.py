"""Each alert, state and runbook names a next step that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, get_commands, load_command_class

from django_amqp_events import conf
from django_amqp_events.archive import eligibility
from django_amqp_events.models import ArchivedEvent, Replay, ReplayBatch, State
from django_amqp_events.monitor import alerts, state_texts
from django_amqp_events.reasons import TEXTS, Reason

PAGE = Path(__file__).resolve().parents[3] / "docs" / "runbooks.md"
RUNBOOKS = dict(
    re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
STEP = re.compile(
    r"\b(Cancel|Check|Fix|Free|Replay|Restore|Resume|Run|Start|Wait)\b|Nothing is left to do"
)
COMMANDS = {name for name in get_commands() if name.startswith("events_")}
STATES = {
    **{f"state {state}": step for state, (_, step) in state_texts.STATES.items()},
    **{f"row {state}": step for state, (_, _, step) in state_texts.ROW_STATES.items()},
    **{f"replay {state}": step for state, step in state_texts.REPLAYS.items()},
    **{f"batch {state}": step for state, step in state_texts.BATCHES.items()},
    **{code: text for code, text in TEXTS.items() if code.startswith("alert-")},
}


@pytest.mark.parametrize("which", STATES)
def test_names_a_next_step(which: str) -> None:
    assert STEP.search(str(STATES[which]))


def test_no_state_is_left_out() -> None:
    done = {Replay.State.PENDING, Replay.State.SUCCEEDED, Replay.State.FAILED}
    assert state_texts.STATES.keys() == set(State)
    assert state_texts.REPLAYS.keys() < set(Replay.State)
    assert not state_texts.REPLAYS.keys() & done
    assert state_texts.BATCHES.keys() == set(ReplayBatch.State) - {ReplayBatch.State.DONE}


def test_commands_that_texts_name_exist() -> None:
    said = " ".join(map(str, [*TEXTS.values(), *STATES.values()]))
    assert set(re.findall(r"\bevents_\w+", said)) <= COMMANDS


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


def test_commands_of_runbooks_can_be_parsed() -> None:
    commands = re.findall(r"`manage\.py (events_\w+)([^`]*)`", PAGE.read_text())
    assert len(commands) > 10
    for name, arguments in commands:
        words = arguments.replace("ID", "0b7a7a1e-0000-8000-8000-000000000000").split()
        parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
        try:
            parser.parse_args(words)
        except (CommandError, SystemExit) as exc:
            pytest.fail(f"{name} {arguments}: {exc!r}")
