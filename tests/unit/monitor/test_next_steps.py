"""Each alert, state, reason and runbook names a next step that exists, or needs none."""

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
from django_amqp_events.reason_texts import TEXTS
from django_amqp_events.reasons import Reason

PAGE = Path(__file__).resolve().parents[3] / "docs" / "runbooks.md"
RUNBOOKS = dict(
    re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
#: An imperative at the start of a clause, so that no noun counts as a step ("its replay is late").
STEP = re.compile(
    r"(?:^|[;:.?,] (?:or |and )?|\b(?:or|and|then) )"
    r"(?:add|ask|check|close|correct|create|decide|declare|decorate|deploy|discard|edit|fix|free|"
    r"give|publish|put|raise|remove|repeat|replay|restore|resume|run|set|start|try|use|wait|write)\b"
    r"|--force|nothing is left to do|needs AMQP_EVENTS\['\w+'\] to be",
    re.IGNORECASE,
)
#: Reasons without a step of their own.
NO_STEP = {
    # Labels, and parts of texts that have one.
    "action-discard", "action-edit", "action-force", "action-replay", "action-resolve",
    "action-restore", "batch-backfill", "batch-filtered", "batch-open", "batch-past",
    "batch-selected", "both", "published-since", "published-until", "filter-event",
    "filter-exception", "filter-group", "filter-handler", "filter-reason",
    "filter-since", "filter-until", "filter-value", "group", "group-unknown",
    "queue-past-due", "queue-rejected", "rows-attempts", "state-archived", "state-discarded",
    "state-queued", "state-replaying", "state-succeeded", "text", "user-unknown",
    # A part has it.
    "connection-lost", "no-connection", "nothing-published", "queue-unconsumed", "waiting-to-retry",
    # The state that it names has it; that of a batch is paused, with its buttons.
    "canary-failed", "canary-silent", "changed", "changed-by", "failures", "outcomes-missing",
    "state",
    # Nothing is left to do.
    "database-locked", "deleted", "empty", "filtered", "interrupted", "outbox-due", "outbox-failed",
    "outbox-published",
    "process-ends", "queue-active-archive", "queue-active-graveyard", "queue-active-handler",
    "queue-consumed", "queue-delayed", "queue-paused", "queue-waiting-archive",
    "queue-waiting-graveyard", "queue-waiting-handler", "rows-due", "rows-held", "rows-others",
    "waiting-for-canary", "waiting-for-mirror", "left-expired", "left-handled", "left-received",
    "left-unreadable", "queue-history",
    # Shown at the field that the user corrects.
    "contract", "contract-own", "json", "json-no-object", "json-unreadable", "not-taken",
    "payload-too-large",
}  # fmt: skip


class Unknown(dict[str, Any]):
    """Parameters of any text."""

    def __missing__(self, name: str) -> str:
        return f"<{name}>"


#: A plural has no text without its count.
REASONS = {code: str(text % Unknown(count=2)) for code, text in TEXTS.items()}
COMMANDS = {name for name in get_commands() if name.startswith("events_")}
STATES = {
    **{f"state {state}": step for state, (_, step) in state_texts.STATES.items()},
    **{f"row {state}": step for state, (_, _, step) in state_texts.ROW_STATES.items()},
    **{f"replay {state}": step for state, step in state_texts.REPLAYS.items()},
    **{f"batch {state}": step for state, step in state_texts.BATCHES.items()},
    **{code: text for code, text in REASONS.items() if code not in NO_STEP},
}


@pytest.mark.parametrize("which", STATES)
def test_names_a_next_step(which: str) -> None:
    assert STEP.search(str(STATES[which]))


@pytest.mark.parametrize("code", sorted(NO_STEP))
def test_only_what_has_no_step_is_excused(code: str) -> None:
    assert not STEP.search(REASONS[code])


def test_no_state_is_left_out() -> None:
    done = {Replay.State.PENDING, Replay.State.SUCCEEDED, Replay.State.FAILED}
    assert state_texts.STATES.keys() == set(State)
    assert state_texts.REPLAYS.keys() < set(Replay.State)
    assert not state_texts.REPLAYS.keys() & done
    assert state_texts.BATCHES.keys() == set(ReplayBatch.State) - {ReplayBatch.State.DONE}


def test_commands_and_settings_that_texts_name_exist() -> None:
    said = " ".join(map(str, [*REASONS.values(), *STATES.values()]))
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
