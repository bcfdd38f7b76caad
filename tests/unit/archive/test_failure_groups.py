"""Groups of failures: what makes one, how many of its events are open, when it was reopened."""

from __future__ import annotations

import random
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connections
from django.test import override_settings

from django_amqp_events import conf
from django_amqp_events.archive import retention, row_writer, states, tables
from django_amqp_events.archive.groups import failure_groups, group_counts
from django_amqp_events.archive.states import UnpublishedReplay
from django_amqp_events.message.types import Failure
from django_amqp_events.models import (
    ArchivedEvent,
    FailureGroup,
    GroupAction,
    Replay,
    State,
)
from django_amqp_events.reasons import Reason
from tests.commands import run_command
from tests.conftest import ONE
from tests.integration.archiving import (
    FAILURE,
    archived,
    outcome,
    received,
    store,
    taken,
)

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def group_of(**more: str) -> FailureGroup:
    columns = {
        "service": "billing",
        "handler": "send_invoice",
        "exception": "billing.errors.TaxError",
        "reason": "exhausted",
        "location": "billing.tax:28 in rate",
        **more,
    }
    return failure_groups.group_of(ArchivedEvent(**columns))


def failure(name: str = "TaxError", function: str = "rate", line: int = 28) -> Failure:
    frame = {"file": "/srv/billing/tax.py", "line": line, "function": function}
    return replace(
        FAILURE,
        exception=f"billing.errors.{name}",
        frames=({**frame, "module": "billing.tax"}, *FAILURE.frames[1:]),
    )


def keep(*messages: Any) -> row_writer.Counts:
    return store([taken(message) for message in messages])


def seen(*rows: ArchivedEvent) -> dict[UUID, int]:
    found = ArchivedEvent.objects.filter(pk__in=[row.pk for row in rows])
    return dict(found.values_list("pk", "version"))


def replayed(row: ArchivedEvent) -> str:
    """Replay a row; returns the replay's id."""
    [claimed] = states.claim(
        seen(row), handlers={row.pk: row.handler}, by="ada", reason="", now=NOW
    )
    states.published([claimed], now=NOW)
    return str(claimed.pk)


def discard(*rows: ArchivedEvent) -> None:
    assert len(states.discard(seen(*rows), by="ada", reason="old", now=NOW)) == len(rows)


def only(**wanted: Any) -> Any:
    """The one group, as a page reads it."""
    return group_counts.with_counts(FailureGroup.objects.filter(**wanted)).get()


# -- what makes a group ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"service": "shop"},
        {"handler": "book"},
        {"exception": "billing.errors.TaxErro"},
        {"location": "billing.tax:28 in rates"},
        {"location": "billing.taxes:28 in rate"},
        {"location": ""},
        {"exception": ""},
        {"exception": "", "reason": "poison"},
    ],
)
def test_different_failures_have_different_groups(other: dict[str, str]) -> None:
    assert group_of(**other).id != group_of().id


@pytest.mark.parametrize(
    "other",
    [{"location": "billing.tax:1 in rate"}, {"location": "billing.tax:? in rate"}]
    + [{"reason": "failed"}],
)
def test_variable_details_share_a_group(other: dict[str, str]) -> None:
    assert group_of(**other) == group_of()


def test_without_an_exception_the_reason_stands_in() -> None:
    found = group_of(exception="", location="", reason="poison")
    assert (found.exception, found.frame, found.reason) == ("", "", "poison")
    unread = group_of(exception="", location="", reason="unreadable")
    assert unread.id != found.id


def test_the_fingerprint_stays_as_it_is() -> None:
    """Groups of yesterday would be orphans: a change is another VERSION."""
    assert failure_groups.VERSION == 1
    assert str(group_of().id) == "58ab8808-a7ac-8933-a832-93ef64232923"


@pytest.mark.parametrize(
    ("location", "frame"),
    [
        ("a.b:3 in c", "a.b in c"),
        ("a:b:3 in c in d:4 in e", "a:b:3 in c in d in e"),
        ("?:? in ?", "? in ?"),
        ("<stdin>:1 in <lambda>", "<stdin> in <lambda>"),
        ("no location at all", "no location at all"),
        ("", ""),
    ],
)
def test_frames_of_all_kinds(location: str, frame: str) -> None:
    assert group_of(location=location).frame == frame


# -- what the mirror makes of it --------------------------------------------------------------

database = pytest.mark.usefixtures("archive_database")


@database
def test_failures_that_are_alike_are_one_group() -> None:
    early, late = NOW - timedelta(hours=5), NOW - timedelta(hours=1)
    keep(
        archived(received("1"), failure=failure(line=28), at=late),
        archived(received("2"), failure=failure(line=99), at=early),
        archived(received("3"), failure=failure(function="book"), at=late),
    )
    # One that is mirrored late, and one that failed later.
    first, last = early - timedelta(days=1), late + timedelta(minutes=1)
    keep(archived(received("4"), failure=failure(line=1), at=first))
    keep(archived(received("5"), failure=failure(line=1), at=last))
    group = only(frame="billing.tax in rate")
    assert (group.handler, group.exception) == ("send_invoice", "billing.errors.TaxError")
    assert group.service == conf.get_settings().service
    assert (group.open, group.in_progress) == (4, 0)
    assert only(frame="billing.tax in book").open == 1
    group.refresh_from_db()
    assert (group.first_seen, group.last_seen) == (first, last)


# -- what its events tell -----------------------------------------------------------------------


@database
def test_a_settled_group_that_fails_again_is_reopened() -> None:
    before = datetime.now(UTC) - timedelta(minutes=1)
    keep(archived(received("1"), at=before), archived(received("2"), at=before))
    first, second = ArchivedEvent.objects.order_by("event_id")
    replay_id = replayed(first)
    discard(second)
    assert (only().open, only().in_progress, only().reopened_at) == (0, 1, None)
    keep(outcome(first, replay_id))
    assert (only().open, only().in_progress, only().reopened_at) == (0, 0, None)
    keep(archived(received("3"), at=datetime.now(UTC)))
    since = only().reopened_at
    assert since == ArchivedEvent.objects.get(event_id="3").mirrored_at
    keep(archived(received("4"), at=datetime.now(UTC)))
    assert (only().open, only().reopened_at) == (2, since)
    discard(*ArchivedEvent.objects.filter(state=State.ARCHIVED))
    assert only().reopened_at is None


@database
def test_a_failed_replay_or_a_restored_event_does_not_reopen_a_group() -> None:
    keep(archived(received("1"), at=NOW), archived(received("2"), at=NOW))
    first, second = ArchivedEvent.objects.order_by("event_id")
    replay_id = replayed(first)
    discard(second)
    keep(archived(received("1"), replay_id=replay_id, at=datetime.now(UTC)))
    assert (only().open, only().reopened_at) == (1, None)
    discard(first)
    states.restore(seen(second), by="ada", reason="", now=datetime.now(UTC))
    assert (only().open, only().reopened_at) == (1, None)


@database
def test_an_older_failure_does_not_reopen_a_group() -> None:
    """Mirrored late, such as after an outage of the mirror."""
    keep(archived(received("1"), at=NOW))
    at = datetime.now(UTC) - timedelta(minutes=1)
    states.discard(seen(ArchivedEvent.objects.get()), by="ada", reason="old", now=at)
    keep(archived(received("2"), at=at - timedelta(minutes=5)))
    assert (only().open, only().reopened_at) == (1, None)
    states.discard(seen(ArchivedEvent.objects.get(event_id="2")), by="ada", reason="old", now=at)
    keep(archived(received("3"), at=at + timedelta(seconds=1)))
    assert only().reopened_at is not None


@database
def test_a_group_without_events() -> None:
    keep(archived(received("1"), at=NOW))
    ArchivedEvent.objects.all().delete()
    group = only()
    assert (group.open, group.in_progress, group.reopened_at) == (0, 0, None)
    assert group.last_seen == group.first_seen == NOW


# -- at once -------------------------------------------------------------------------------------


class Chaos:
    """Operations on few events in random order, each equally often, from several threads."""

    def __init__(self, seed: int, *, prune: bool) -> None:
        self.random = random.Random(seed)
        self.prune = prune
        self.did: Counter[str] = Counter()
        #: How often each version of an event was claimed.
        self.claims: Counter[tuple[UUID, int]] = Counter()

    def run(self, rounds: int) -> None:
        operations = self.operations * rounds
        self.random.shuffle(operations)
        try:
            for operation in operations:
                operation()
        finally:
            connections[tables.database()].close()

    @property
    def operations(self) -> list[Callable[[], Any]]:
        always = [self.mirror, self.mirror, self.replay, self.again, self.succeed, self.discard]
        return [*always, self.restore] + [self.forget] * self.prune

    def failure(self) -> Failure:
        return failure(self.random.choice(["TaxError", "LateError"]))

    def some(self, state: State) -> dict[UUID, int]:
        found = list(ArchivedEvent.objects.filter(state=state).values_list("pk", "version"))
        return dict(self.random.sample(found, min(len(found), 3)))

    def mirror(self) -> None:
        """New ones, existing ones, and both in one batch."""
        numbers = [self.random.randrange(300) for _ in range(self.random.randrange(1, 5))]
        counts = keep(
            *(
                archived(received(f"order-{n}"), failure=self.failure(), at=datetime.now(UTC))
                for n in numbers
            )
        )
        self.did["stored"] += counts.events

    def replay(self) -> None:
        wanted = self.some(State.ARCHIVED)
        claimed = states.claim(
            wanted, handlers=dict.fromkeys(wanted, "book"), by="", reason="", now=datetime.now(UTC)
        )
        self.claims.update((each.event.pk, each.event.version) for each in claimed)
        gone, back = claimed[1:], claimed[:1]
        if gone:
            states.published(gone, now=datetime.now(UTC))
        unsure = self.random.random() < 0.5
        if back and self.random.random() < 0.5:
            unpublished = [
                UnpublishedReplay(replay=each, error=Reason.of("late"), unconfirmed=unsure)
                for each in back
            ]
            states.returned(unpublished, now=datetime.now(UTC))
            if unsure:
                states.published(back, now=datetime.now(UTC))

    def underway(self) -> list[Replay]:
        outcomes = (Replay.State.QUEUED, Replay.State.PUBLISHED, Replay.State.UNCONFIRMED)
        found = list(Replay.objects.filter(state__in=outcomes).select_related("event"))
        return self.random.sample(found, min(len(found), 2))

    def again(self) -> None:
        keep(
            *(
                archived(
                    received(each.event.event_id),
                    failure=self.failure(),
                    replay_id=str(each.pk),
                    at=datetime.now(UTC),
                )
                for each in self.underway()
            )
        )

    def succeed(self) -> None:
        keep(*(outcome(each.event, str(each.pk)) for each in self.underway()))

    def discard(self) -> None:
        states.discard(self.some(State.ARCHIVED), by="", reason="", now=datetime.now(UTC))

    def restore(self) -> None:
        states.restore(self.some(State.DISCARDED), by="", reason="", now=datetime.now(UTC))

    def forget(self) -> None:
        state = self.random.choice([State.SUCCEEDED, State.ARCHIVED])
        times = ArchivedEvent.objects.filter(state=state).values_list("state_since", flat=True)
        if times:
            after = self.random.choice(times) + timedelta.resolution
            pruned = retention.prune({state: 0}, service=conf.get_settings().service, now=after)
            self.did["pruned"] += pruned.counts[state]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("prune", [False, True])
def test_concurrent_changes_of_events_and_groups(archive_database: Any, prune: bool) -> None:
    """Threads; in sequence on SQLite, which has one writer."""
    number, rounds = (1, 10) if archive_database.kind == "sqlite" else (4, 7)
    seed = random.randrange(10**6)
    problems: list[str] = []

    def work(one: Chaos) -> None:
        try:
            one.run(rounds)
        except BaseException:
            problems.append(traceback.format_exc())
            raise

    with override_settings(AMQP_EVENTS={**SETTINGS, "SERVICE": "billing"}):
        everyone = [Chaos(seed + n, prune=prune) for n in range(number)]
        crowd = [threading.Thread(target=work, args=(one,)) for one in everyone]
        for each in crowd:
            each.start()
        for each in crowd:
            each.join()
    assert problems == [], seed
    claims = sum((one.claims for one in everyone), Counter[tuple[UUID, int]]())
    # The versions of an event that is mirrored again after it was pruned begin anew.
    assert prune or set(claims.values()) == {1}, seed
    did = sum((one.did for one in everyone), Counter[str]())
    assert did["stored"] > 15, seed
    assert (did["pruned"] > 0) == prune, seed
    for row in tables.rows():
        assert row.group_id == failure_groups.group_of(row).pk, seed


SETTINGS: dict[str, Any] = {"AUTODISCOVER": [], "HANDLERS": {}}


# -- repair -----------------------------------------------------------------------------------


@ONE
@database
def test_another_version_of_the_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events move, and with them what people wrote."""
    keep(*(archived(received(str(n)), failure=failure(), at=NOW) for n in range(3)))
    failure_groups.write(
        only().pk, seen=0, by="ada", now=NOW, note="ask the tax office", assignee="bob", ticket=""
    )
    old = only().pk
    monkeypatch.setattr(failure_groups, "VERSION", 2)
    monkeypatch.setattr(tables, "clock", lambda: NOW)
    rebuilt = failure_groups.rebuild()
    assert rebuilt.changed == 3
    group = group_counts.with_counts(FailureGroup.objects.exclude(pk=old)).get()
    assert (group.open, group.note) == (3, "ask the tax office")
    assert group.assignee == "bob"
    assert group.first_seen == NOW


@ONE
@database
def test_a_past_event_that_has_not_failed_has_no_group() -> None:
    keep(archived(received("past"), reason="backfill", failure=None, at=NOW))
    ArchivedEvent.objects.update(group=None)
    FailureGroup.objects.all().delete()
    assert failure_groups.rebuild().seen == 0
    assert not FailureGroup.objects.exists()


@ONE
@database
def test_groups_that_are_merged_keep_what_people_wrote() -> None:
    for name in ("first", "second"):
        keep(archived(received(name), handler=name, failure=failure(), at=NOW))
    for group in FailureGroup.objects.all():
        failure_groups.write(
            group.pk, seen=0, by="ada", now=NOW, note=group.handler, assignee="", ticket=""
        )
        if group.handler == "second":
            # Its history stays all the same.
            failure_groups.write(
                group.pk, seen=1, by="bob", now=NOW, note="", assignee="", ticket=""
            )
    ArchivedEvent.objects.update(handler="first")
    assert failure_groups.rebuild().changed == 1
    groups = group_counts.with_counts(FailureGroup.objects.all())
    assert set(groups.values_list("note", "open")) == {("first", 2), ("", 0)}
    history = failure_groups.history(groups.get(note="first"), 9)
    assert {entry.text for entry in history} == {"first", "second", ""}
    assert failure_groups.prune(service=conf.get_settings().service) == 1


# -- what people write ------------------------------------------------------------------------


@ONE
@database
def test_notes_are_kept_with_their_authors() -> None:
    keep(archived(received("1"), at=NOW))
    pk = only().pk
    given = {"note": "see\0 the wiki", "assignee": "bob", "ticket": "https://tickets/1"}
    assert failure_groups.write(pk, seen=0, by="ada", now=NOW, **given) == [
        "note",
        "assignee",
        "ticket",
    ]
    assert failure_groups.write(pk, seen=0, by="eve", now=NOW, **{**given, "note": "mine"}) is None
    assert failure_groups.write(pk, seen=1, by="eve", now=NOW, **{**given, "note": ""}) == ["note"]
    assert list(GroupAction.objects.values_list("action", "by", "text")) == [
        ("note", "ada", "see\\x00 the wiki"),
        ("assign", "ada", "bob"),
        ("ticket", "ada", "https://tickets/1"),
        ("note", "eve", ""),
    ]


# -- the command ------------------------------------------------------------------------------


@pytest.fixture
def command(settings: Any) -> Callable[..., tuple[int, str]]:
    """Run events_groups; its exit code, and its output or its error."""
    settings.AMQP_EVENTS = {**SETTINGS, "SERVICE": "billing"}

    def run(*arguments: str) -> tuple[int, str]:
        code, out, err = run_command("events_groups", *arguments)
        return code, out or err

    return run


@ONE
@database
def test_the_command_shows_groups_with_open_events(command: Any) -> None:
    assert command() == (0, "no group has open events\n")
    keep(*(archived(received(str(n)), failure=failure(), at=NOW) for n in range(3)))
    keep(archived(received("9"), failure=failure("LateError"), at=NOW - timedelta(days=1)))
    discard(ArchivedEvent.objects.get(event_id="9"))
    pk = only(exception="billing.errors.TaxError").pk
    words = "3 open  send_invoice: billing.errors.TaxError at billing.tax in rate"
    assert command()[1].split("  ", 1) == [str(pk), f"      {words}\n"]
    ArchivedEvent.objects.filter(event_id="9").update(group=None)
    code, out = command("--rebuild")
    assert (code, "4 events checked, 1 moved to another group" in out) == (0, True)
    assert "0 moved to another group" in command("--rebuild")[1]
