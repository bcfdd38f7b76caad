"""Alerts: conditions, recipients, repetition and end."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import django
import pytest
from django.core import mail
from django.core.mail.backends.locmem import EmailBackend
from django.db import connections
from django.test import override_settings

from django_amqp_events import conf, signals
from django_amqp_events.broker import topology
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.models import (
    Alert,
    ArchivedEvent,
    ArchivedFailure,
    FailureGroup,
    State,
)
from django_amqp_events.monitor import alerts, statistics
from django_amqp_events.monitor.snapshots import SnapshotLoop
from django_amqp_events.reasons import Reason
from tests.archive_rows import make_group, make_outbox
from tests.celery_app import app as celery_app
from tests.conftest import ONE, ArchiveRouter, Database, routed_by
from tests.doubles.receivers import connected

from ..admin.admin_world import make

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
#: As Django wants them: pairs until 5.2, addresses from 6.0 on.
ADMINS = ["ada@example.com"] if django.VERSION >= (6, 0) else [("Ada", "ada@example.com")]
#: What tells once is a constraint, and a conditional UPDATE.
DATABASES = pytest.mark.usefixtures("archive_database")


def read(**limits: Any) -> conf.Settings:
    settings, problems = conf.parse({"SERVICE": "billing", "ALERTS": limits})
    assert problems == ()
    return settings


def document(**more: Any) -> dict[str, Any]:
    return {
        "broker": {"error": "", "away": 0.0, "alarms": []},
        "queues": {"billing:abyss": {"role": "abyss", "severity": "ok", "ready": 0}},
        "archive": {"new_hour": 0},
        "outbox": [{"database": "default", "meaning": "nothing waits", "lag": 0.0}],
        "mirror": {"lag": 0.0},
        **more,
    }


@pytest.fixture
def heard() -> Any:
    found: list[dict[str, Any]] = []

    def hear(signal: Any, **said: Any) -> None:
        name = "raised" if signal is signals.alert_raised else "ended"
        found.append({"name": name, **said})

    with connected(hear, signals.alert_raised, signals.alert_ended):
        yield found


def names(heard: Any) -> list[tuple[str, str, str]]:
    return [(each["name"], each["kind"], each["key"]) for each in heard]


def failed(at: datetime, state: State = State.ARCHIVED, **fields: Any) -> ArchivedEvent:
    """Return an event that failed and was mirrored then."""
    times = dict.fromkeys(("first_failed_at", "last_failed_at", "mirrored_at", "state_since"), at)
    return make(state, **{**times, **fields})


def look_at_groups(heard: Any, now: datetime = NOW, **limits: Any) -> list[tuple[str, str, str]]:
    """Judge the groups; return what is told of them."""
    heard.clear()
    settings = read(**limits)
    alerts.update_alerts(alerts.evaluate_groups(settings, now), now=now, settings=settings)
    return sorted(names(heard))


# -- judging


def test_healthy_system_has_no_alerts() -> None:
    assert alerts.evaluate(document(), read()) == {
        ("broker_away", ""): None,
        ("broker_alarm", ""): None,
        ("growth", ""): None,
        ("mirror_lag", ""): None,
        ("outbox_lag", "default"): None,
        ("abyss", "billing:abyss"): None,
    }


@pytest.mark.parametrize(
    ("more", "which", "text"),
    [
        ({"archive": {"new_hour": 101}}, ("growth", ""), "More than 100 events"),
        ({"mirror": {"lag": 301.0}}, ("mirror_lag", ""), "5 min old"),
        (
            {"outbox": [{"database": "orders", "meaning": "no relay", "lag": 7300.0}]},
            ("outbox_lag", "orders"),
            "2 h old: no relay",
        ),
        (
            {"broker": {"error": "no connection", "away": 61.0}},
            ("broker_away", ""),
            "no connection",
        ),
        (
            {"broker": {"error": "", "alarms": ["memory alarm on rabbit@one"]}},
            ("broker_alarm", ""),
            "memory alarm on rabbit@one: RabbitMQ accepts no events",
        ),
        (
            {
                "queues": {
                    "q": {"role": "abyss", "severity": "error", "ready": 1, "meaning": "poison"}
                }
            },
            ("abyss", "q"),
            "poison",
        ),
    ],
)
def test_alert_conditions(more: Any, which: Any, text: str) -> None:
    judged = alerts.evaluate(document(**more), read())
    assert text in str(judged[which] or "")
    assert [key for key, found in judged.items() if found] == [which]
    # None as its limit disables an alert.
    disabled = read(GROWTH=None, MIRROR_LAG=None, OUTBOX_LAG=None, AWAY=None)
    assert bool(alerts.evaluate(document(**more), disabled)[which]) is (
        which[0] in ("broker_alarm", "abyss")
    )


def test_unreachable_broker_raises_no_queue_alerts() -> None:
    away = document(broker={"error": "away", "away": 5.0}, queues={}, mirror={})
    judged = alerts.evaluate(away, read())
    # A restart is no trouble yet, and nothing that lasted is over.
    assert set(judged) == {("growth", ""), ("outbox_lag", "default")}


def test_alarms_that_are_not_read_any_more_are_over() -> None:
    unread = document(broker={"error": "", "away": 0.0})
    assert alerts.evaluate(unread, read())["broker_alarm", ""] is None
    watched, _ = conf.parse({"SERVICE": "billing", "MANAGEMENT_URL": "http://ada:x@rabbit:15672"})
    assert ("broker_alarm", "") not in alerts.evaluate(unread, watched)


@ONE
def test_another_outbox_that_is_empty_is_no_longer_behind(archive_database: Database) -> None:
    settings = read()
    taker = SnapshotLoop(celery_app, settings, topology.build(settings, get_registry()))
    with routed_by():
        judged = alerts.evaluate(document(outbox=taker._outbox()), settings)
    assert judged["outbox_lag", archive_database.alias] is None


# -- telling


@DATABASES
def test_alert_is_sent_once_and_resolved_once(heard: Any) -> None:
    settings = read()
    poison = {("abyss", "q"): "poison"}
    for minute in range(3):
        at = NOW + timedelta(minutes=minute)
        alerts.update_alerts(poison, now=at, settings=settings)
    alerts.update_alerts({}, now=NOW, settings=settings)
    assert names(heard) == [("raised", "abyss", "q")], "not known is not over"
    [row] = Alert.objects.all()
    assert (row.since, row.last, row.ended) == (NOW, NOW + timedelta(minutes=2), None)
    for _ in range(2):
        alerts.update_alerts(
            {("abyss", "q"): None}, now=NOW + timedelta(hours=1), settings=settings
        )
    assert names(heard) == [("raised", "abyss", "q"), ("ended", "abyss", "q")]
    assert {each["sender"] for each in heard} == {"billing"}
    assert {(each["text"], each["since"]) for each in heard} == {("poison", NOW)}
    alerts.update_alerts(poison, now=NOW + timedelta(hours=2), settings=settings)
    assert names(heard)[2:] == [("raised", "abyss", "q")], "it is back"
    assert Alert.objects.count() == 2


@DATABASES
def test_keys_and_texts_that_no_database_takes_are_written(heard: Any) -> None:
    key = "q\0\ud800" + "x" * 300
    for _ in range(2):
        alerts.update_alerts({("abyss", key): "a\0\ud800"}, now=NOW, settings=read())
    alerts.update_alerts({("abyss", key): None}, now=NOW, settings=read())
    assert [each["name"] for each in heard] == ["raised", "ended"]


@DATABASES
def test_alerts_about_what_is_gone_end(heard: Any, settings: Any) -> None:
    """Databases and queues that the service had under an earlier configuration."""
    mine = read()
    for which in (
        ("outbox_lag", "default"),
        ("outbox_lag", "moved"),
        ("abyss", "billing:abyss"),
        ("abyss", "old:billing:abyss"),
        ("stock", "A-1"),
    ):
        alerts.update_alert(*which, "x", now=NOW, settings=mine)
    heard.clear()

    def look(**more: Any) -> list[tuple[str, str, str]]:
        heard.clear()
        about = document(**more)
        conditions = {**alerts.gone(about, mine), **alerts.evaluate(about, mine)}
        alerts.update_alerts(conditions, now=NOW, settings=mine)
        return sorted(names(heard))

    unknown = [{"database": "default", "meaning": "no answer"}]
    # While RabbitMQ or a database is unreachable, nothing is known of their alerts.
    assert look(queues={}, outbox=unknown) == [("ended", "outbox_lag", "moved")]
    assert look(outbox=[]) == [
        ("ended", "abyss", "billing:abyss"),
        ("ended", "abyss", "old:billing:abyss"),
    ]
    assert look() == [("ended", "outbox_lag", "default")]


@ONE
@DATABASES
def test_an_outbox_whose_table_is_gone_is_no_longer_behind(
    monkeypatch: Any, tmp_path: Path
) -> None:
    # Django does not close a database in memory.
    entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "orders")}
    entries = connections.configure_settings({**connections.databases, "orders": entry})
    monkeypatch.setattr(ArchiveRouter, "allow_migrate", lambda *_, **__: True)
    with monkeypatch.context() as patched:
        patched.setitem(connections.databases, "orders", entries["orders"])
        alerts.update_alert("outbox_lag", "orders", "x", now=NOW, settings=read())
        assert alerts.gone(document(), read()) == {("outbox_lag", "orders"): None}
        patched.setattr(connections["orders"], "cursor", None)  # it is unreachable
        assert alerts.gone(document(), read()) == {}
    connections["orders"].close()
    del connections["orders"]


@DATABASES
def test_a_group_is_new_when_it_is_mirrored(heard: Any) -> None:
    """After a night without a mirror, and with a worker whose clock is wrong."""
    for hours in (-2, 8, 9_000):
        seen = NOW - timedelta(hours=hours)
        failed(seen, group=make_group(first_seen=seen), mirrored_at=NOW - timedelta(minutes=1))
    told = look_at_groups(heard)
    assert [(name, kind) for name, kind, _ in told] == [("raised", "group_new")] * 3


@DATABASES
def test_groups_that_are_new_or_came_back(heard: Any) -> None:
    def group(age: float, *, state: State = State.ARCHIVED, **more: Any) -> FailureGroup:
        seen = NOW - timedelta(hours=age)
        found = make_group(**{"first_seen": seen, **more})
        failed(seen, state, group=found)
        return found

    def reopened(age: float) -> FailureGroup:
        """Settled a day ago, and failed again since."""
        found = group(50, state=State.DISCARDED)
        found.event_set.update(state_since=NOW - timedelta(days=1))
        failed(NOW - timedelta(hours=age), group=found)
        return found

    look = partial(look_at_groups, heard)
    group(5)
    group(0.1, service="shop")
    group(0.1, state=State.DISCARDED)
    new, back = group(0.1), reopened(0.1)
    reopened(2)
    raised = [("raised", "group_back", str(back.pk)), ("raised", "group_new", str(new.pk))]
    assert look() == sorted(raised)
    assert "TaxError in send_invoice" in alerts.title(Alert.objects.get(key=str(new.pk)))
    # It lasts while something is open, however old it is by then.
    assert look(NOW + timedelta(days=2)) == []
    new.event_set.update(state=State.REPLAYING)
    assert look() == []
    new.event_set.update(state=State.SUCCEEDED)
    assert look() == [("ended", "group_new", str(new.pk))]
    ArchivedEvent.objects.filter(group=back).delete()
    FailureGroup.objects.filter(pk=back.pk).delete()
    assert look() == [("ended", "group_back", str(back.pk))]
    many = {str(group(0.1).pk) for _ in range(alerts.GROUPS + 3)}
    assert len(look()) == alerts.GROUPS
    assert len(look()) == 3
    assert {key for _, key in Alert.objects.filter(ended=None).values_list("kind", "key")} == many
    assert {name for name, _, _ in look(GROUPS=False)} == {"ended"}


@ONE
@DATABASES
def test_an_alert_of_a_newer_version_is_shown(heard: Any) -> None:
    document = {"code": "alert-of-tomorrow", "most": 3}
    row = Alert(kind="of tomorrow", key="k", details=Reason.from_json(document))
    assert alerts.title(row) == "of tomorrow: k"
    assert "alert-of-tomorrow" in alerts.alert_text(row)


@ONE
@DATABASES
def test_an_alert_follows_its_group(heard: Any, caplog: Any) -> None:
    """The count is current; a condition that returned between two checks is sent again."""
    seen = NOW - timedelta(minutes=5)
    group = make_group(exception="shop.TaxError")
    failed(seen, group=group)
    failed(seen, group=group)

    def look(now: datetime) -> list[tuple[str, str]]:
        return sorted((kind, name) for name, kind, _ in look_at_groups(heard, now))

    assert look(NOW) == [("group_new", "raised")]
    [said] = caplog.messages
    assert said == (
        "alert raised: New failure: TaxError in send_invoice (2 open): "
        "shop.TaxError in an unknown function. Fix the cause, then replay the group."
    )
    failed(NOW, group=group)
    assert look(NOW) == []
    alert = Alert.objects.get()
    assert alerts.title(alert) == "New failure: TaxError in send_invoice (3 open)"
    later = NOW + timedelta(minutes=10)
    group.event_set.update(state=State.SUCCEEDED, state_since=later - timedelta(minutes=1))
    failed(later, group=group)
    assert look(later) == [("group_back", "raised"), ("group_new", "ended")]
    new = Alert.objects.get(ended=None)
    assert alerts.title(new) == "Failure reopened: TaxError in send_invoice (1 open)"
    # The same again is the same trouble, whose text is renewed.
    much_later = later + timedelta(minutes=10)
    group.event_set.update(state=State.SUCCEEDED, state_since=much_later - timedelta(minutes=1))
    failed(much_later, group=group)
    failed(much_later, group=group)
    assert look(much_later) == []
    assert "2 open" in alerts.title(Alert.objects.get(ended=None))
    group.event_set.update(state=State.DISCARDED)
    assert look(much_later) == [("group_back", "ended")]


@pytest.mark.django_db
def test_another_service_in_the_database_changes_no_alert() -> None:
    """Every figure that an alert judges is of one service."""
    settings = read(GROWTH=2, MIRROR_LAG=600, OUTBOX_LAG=600)
    taker = SnapshotLoop(celery_app, settings, topology.build(settings, get_registry()))
    late = NOW - timedelta(hours=3)

    def raised() -> set[str]:
        queues = {taker.topology.names.archive: {"ready": 5}}
        problems = alerts.evaluate(
            document(
                archive={"new_hour": taker._new_hour(NOW)},
                outbox=taker._outbox(),
                mirror=taker._mirror(queues, {"empty_at": late.isoformat()}, NOW),
            ),
            settings,
        ) | alerts.evaluate_groups(settings, NOW)
        return {kind for (kind, _key), problem in problems.items() if problem is not None}

    def fill(service: str, at: datetime) -> None:
        group = make_group(service=service, first_seen=at)
        for _ in range(3):
            make(
                service=service, group=group, first_failed_at=at, last_failed_at=at, mirrored_at=at
            )
        make_outbox(service=service, created_at=at, due_at=at)

    fill("shop", NOW - timedelta(seconds=2))
    fill("shop", late)
    assert raised() == {"mirror_lag"}
    fill("billing", late)
    assert raised() == {"mirror_lag", "outbox_lag"}
    fill("billing", NOW - timedelta(seconds=2))
    assert raised() == {"growth", "outbox_lag", "group_new"}


@pytest.mark.django_db
def test_growth_above_the_cap_is_noticed(monkeypatch: Any) -> None:
    monkeypatch.setattr(statistics, "CAP", 3)
    for _ in range(8):
        make(first_failed_at=NOW, last_failed_at=NOW)
    settings = read(GROWTH=6)
    taker = SnapshotLoop(celery_app, settings, topology.build(settings, get_registry()))
    assert taker._new_hour(NOW) == 7, "one more than what is too much"


@ONE
@DATABASES
def test_email_to_admins_where_it_is_asked_for() -> None:
    with override_settings(ADMINS=ADMINS, SERVER_EMAIL="amqp@example.com"):
        alerts.update_alert("abyss", "q", "silent", now=NOW, settings=read())
        assert mail.outbox == []
        loud = read(MAIL=True)
        alerts.update_alert("growth", "x\nBcc: eve@example.com", "many", now=NOW, settings=loud)
        alerts.update_alert("growth", "x\nBcc: eve@example.com", "many", now=NOW, settings=loud)
        later = NOW + timedelta(hours=1)
        alerts.update_alert(
            "growth", "x\nBcc: eve@example.com", now=later, troubled=False, settings=loud
        )
    first, last = mail.outbox
    assert first.subject == ("[Django] billing: Many events archived: x Bcc: eve@example.com")
    assert first.to == ["ada@example.com"]
    assert first.body.splitlines() == [
        "many", f"{alerts.RUNBOOKS}#growth", "", "Since 2026-03-01 12:00:00 UTC."
    ]  # fmt: skip
    assert "over: " in last.subject
    assert "Over since 2026-03-01 13:00:00 UTC." in last.body


@ONE
@DATABASES
def test_failing_notification_stops_nothing(monkeypatch: Any, caplog: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no mail today")

    monkeypatch.setattr(EmailBackend, "send_messages", fail)
    with connected(fail, signals.alert_raised):
        assert alerts.update_alert("abyss", "p", "x", now=NOW, settings=read())
    assert "no mail today" in caplog.text
    caplog.clear()
    with override_settings(ADMINS=ADMINS):
        assert alerts.update_alert("abyss", "q", "x", now=NOW, settings=read(MAIL=True))
    assert "no mail today" in caplog.text
    # A mail server that accepts a connection and does not answer.
    answered = threading.Event()
    sent: list[str] = []

    def send(_: object, messages: list[Any]) -> None:
        answered.wait(60)
        sent.extend(message.subject[-1] for message in messages)

    monkeypatch.setattr(EmailBackend, "send_messages", send)
    monkeypatch.setattr(alerts, "MAIL_SECONDS", 0.05)
    with override_settings(ADMINS=ADMINS):
        assert alerts.update_alert("abyss", "r", "x", now=NOW, settings=read(MAIL=True))
        assert alerts.update_alert("abyss", "s", "x", now=NOW, settings=read(MAIL=True))
        assert caplog.text.count("has not answered within 0.05 s") == 2
        answered.set()
        assert alerts._sender is not None
        alerts._sender.join(10)
    assert sent == ["r", "s"]
    assert Alert.objects.count() == 4


@ONE
@DATABASES
def test_a_replay_that_fails_in_another_way_is_a_new_failure(heard: Any) -> None:
    """The event was mirrored long ago, and moves into a group that did not exist."""
    group = make_group()
    row = make(group=group, mirrored_at=NOW - timedelta(days=2), state_since=NOW, replays=1)
    ArchivedFailure.objects.create(pk=uuid4(), event=row, failed_at=NOW, mirrored_at=NOW)
    [(name, kind, _)] = look_at_groups(heard)
    assert (name, kind) == ("raised", "group_new")


@ONE
@DATABASES
@pytest.mark.parametrize("pruned", [False, True])
def test_a_failure_that_comes_back(heard: Any, pruned: bool) -> None:
    """It is new if its events were pruned meanwhile, and not if one was restored."""
    seen = NOW - timedelta(days=60)
    group = make_group(first_seen=seen, note="known")
    row = failed(NOW, group=group, mirrored_at=NOW if pruned else seen)
    if not pruned:
        ArchivedFailure.objects.create(pk=uuid4(), event=row, failed_at=NOW, mirrored_at=NOW)
    assert look_at_groups(heard) == ([("raised", "group_new", str(group.pk))] if pruned else [])
