"""Edited replays whose process is killed: the edited payload is published after a restart."""

from __future__ import annotations

import pytest

from tests.conftest import Database

from ..conftest import Make
from ..harness import Eyes, Service, until
from ..replaying import (
    make,
    mirror_once,
    mirrored,
    resume,
    row,
)
from .test_replay_killed import (
    BEFORE_NOTED,
    BEFORE_PUBLISH,
    QUEUE,
    archived,
)

pytestmark = pytest.mark.timeout(300)

_EDIT = """
import os, signal
from django_amqp_events.archive import replay, states
from django_amqp_events.publish import publisher
from django_amqp_events.models import ArchivedEvent

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

{before}
[event] = ArchivedEvent.objects.all()
replay.edit(event.pk, event.version, {{"number": 99}}, by="ada", reason="a wrong number")
"""


@pytest.fixture
def edited(fresh_eyes: Eyes, service: Make, archive_database: Database) -> Service:
    """A service with one archived event that may be edited."""
    environ = {"TESTPROJECT_DATABASE": archive_database.json}
    made = make(service, fresh_eyes, environ=environ, events={"EDITING": True})
    fresh_eyes.send(archived(1))
    mirror_once(made)
    return made


def edit(service: Service, before: str) -> None:
    printed = service.python(_EDIT.format(before=before), check=False)
    assert "Traceback" not in printed, printed


def test_killed_between_claim_and_publish(fresh_eyes: Eyes, edited: Service) -> None:
    edit(edited, BEFORE_PUBLISH)
    left = row(edited)
    assert (left["state"], left["replays"], fresh_eyes.ready(QUEUE)) == ("queued", 1, 0)
    assert resume(edited) == 1
    edited.worker("threads", 1)
    until(lambda: edited.runs("event-1", "end"))
    (done,) = mirrored(edited, state="succeeded")
    (only,) = done["replay_set"]
    assert only["id"] == left["replay_set"][0]["id"]
    [run] = edited.runs("event-1", "end")
    assert (run["number"], run["replay"]) == (99, only["id"])


def test_killed_between_publish_and_note(fresh_eyes: Eyes, edited: Service) -> None:
    """It runs twice under one replay id, and with one payload."""
    edit(edited, BEFORE_NOTED)
    assert (row(edited)["state"], fresh_eyes.ready(QUEUE)) == ("queued", 1)
    assert resume(edited) == 1
    edited.worker("threads", 1)
    until(lambda: len(edited.runs("event-1", "end")) == 2)
    runs = edited.runs("event-1", "end")
    assert {run["number"] for run in runs} == {99}
    assert len({run["replay"] for run in runs}) == 1
    mirrored(edited, state="succeeded")
