"""AMQP_EVENTS: every key, what is wrong with it, and the environment."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pytest_django import Settings as DjangoSettings

from django_amqp_events import conf, options
from django_amqp_events.broker import topology
from django_amqp_events.conf import (
    AlertSettings,
    ArchiveSettings,
    HistorySettings,
    RetentionSettings,
    Settings,
    parse,
)
from django_amqp_events.declare.registry import Registry
from django_amqp_events.exceptions import ConfigurationError


def codes(raw: object) -> list[str]:
    return [problem.code for problem in parse(raw)[1]]


def read(**keys: Any) -> Settings:
    """Parse settings that must have no problem."""
    settings, problems = parse({"SERVICE": "billing", **keys})
    assert problems == ()
    return settings


def problem(**keys: Any) -> options.Problem:
    """Parse settings that must have one problem."""
    _, problems = parse({"SERVICE": "billing", **keys})
    assert len(problems) == 1, problems
    assert problems[0].hint
    return problems[0]


def test_defaults() -> None:
    assert read() == Settings(service="billing")
    assert read().publish == "outbox"
    assert read().retention == RetentionSettings(succeeded=30 * 86400, discarded=90 * 86400)


#: A value of each key, and what is read of it.
READ: dict[str, tuple[Any, Any]] = {
    "SERVICE": ("billing", "billing"),
    "EVENTS": ({"shop.paid": {"CONTRACT": "shop.paid"}}, {"shop.paid": {"contract": "shop.paid"}}),
    "HANDLERS": (
        {"billing.invoice": {"EVENTS": ["shop.#"], "MAX_RETRIES": 3}},
        {"billing.invoice": {"events": ["shop.#"], "max_retries": 3}},
    ),
    "DEFAULTS": ({"MAX_RETRIES": 4, "QUEUE": "all"}, {"max_retries": 4, "queue": "all"}),
    "AUTODISCOVER": (["signals"], ("signals",)),
    "PUBLISH": ("immediate", "immediate"),
    "FORMAT": ("cloudevents", "cloudevents"),
    "UNROUTED": ("raise", "raise"),
    "BACKEND": ("memory", "memory"),
    "CONFIRM_TIMEOUT": (timedelta(seconds=2.5), 2.5),
    "CONSUMER_TIMEOUT": (timedelta(hours=1), 3600.0),
    "MAX_BODY": (4096, 4096),
    "PREFIX": ("test-", "test-"),
    "EXCHANGE": ("facts", "facts"),
    "QUEUE_TYPE": ("classic", "classic"),
    "TOPOLOGY": ("external", "external"),
    "ARCHIVE": (
        {"TTL": timedelta(days=1), "MAX_LENGTH": 7},
        ArchiveSettings(ttl=86400, max_length=7),
    ),
    "MANAGEMENT_URL": ("https://me:secret@rabbit:15671", "https://me:secret@rabbit:15671"),
    "CELERY_APP": ("project.celery.app", "project.celery.app"),
    "DATABASE": ("orders", "orders"),
    "RETENTION": (
        {"SUCCEEDED": timedelta(days=7), "DISCARDED": None},
        RetentionSettings(succeeded=7 * 86400, discarded=None),
    ),
    "RENAMED_HANDLERS": ({"billing.old": "billing.invoice"}, {"billing.old": "billing.invoice"}),
    "HISTORY": (
        {"MAX_AGE": "1d12h", "MAX_BYTES": "20 GB"},
        HistorySettings(max_age=36 * 3600, max_bytes=20 * 10**9),
    ),
    "ALERTS": (
        {"MAIL": True, "GROWTH": 7, "MIRROR_LAG": timedelta(minutes=1)},
        AlertSettings(mail=True, growth=7, mirror_lag=60),
    ),
    "EDITING": (True, True),
    "REDACT": ("project.privacy.redact", "project.privacy.redact"),
    "METRICS": (True, True),
    "VALIDATE": (True, True),
}


def test_every_key_is_read() -> None:
    assert set(READ) == set(conf.KEYS)
    settings, problems = parse({key: given for key, (given, _) in READ.items()})
    assert problems == ()
    assert settings == Settings(**{key.lower(): read for key, (_, read) in READ.items()})


@pytest.mark.parametrize(
    "history",
    [
        {}, {"MAX_AGE": None}, {"MAX_AGE": "soon"}, {"MAX_AGE": 0}, {"MAX_AGE": "14"},
        {"MAX_AGE": 0.2},
        {"MAX_BYTES": "1KB"}, {"MAX_BYTES": True}, {"MAX_BYTES": "20 stone"}, {"MAX_BYTES": 1.5},
        "14d",
    ],
)  # fmt: skip
def test_a_history_without_a_valid_limit_is_an_error(history: object) -> None:
    """It would fill the disk of the broker."""
    assert "E003" in codes({"SERVICE": "billing", "HISTORY": history})


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("EDITING", "yes", "True or False"),
        ("EDITING", 1, "True or False"),
        ("REDACT", ["a.b"], "the dotted path of a function"),
        ("REDACT", None, "the dotted path of a function"),
    ],
)
def test_editing_and_redaction_are_safe_where_they_are_wrong(
    key: str, value: object, what: str
) -> None:
    """Editing stays off, and payloads stay hidden, since the hook cannot be imported."""
    settings, problems = parse({"SERVICE": "a", key: value})
    assert [(problem.code, problem.hint) for problem in problems] == [("E003", f"Use {what}.")]
    assert not settings.editing
    assert bool(settings.redact) == (key == "REDACT")


def test_confirm_timeout_is_half_a_lease_at_most() -> None:
    assert parse({"SERVICE": "a", "CONFIRM_TIMEOUT": 30})[0].confirm_timeout == 30
    settings, problems = parse({"SERVICE": "a", "CONFIRM_TIMEOUT": timedelta(minutes=1)})
    assert settings.confirm_timeout == 10
    assert [problem.code for problem in problems] == ["E003"]
    assert "30 seconds at most" in problems[0].hint


SERVICES = ("a", "shop", "shop-2", "Shop_EU", "9")
NO_SERVICES = ("", "a.b", "a:b", "a b", "ä", "-a", "a\n", "amq.", "*", "a/b")
#: "eu." and "eu:": eu.billing.… would be a handler's queue of a service named eu.
PREFIXES = ("amq.", "eu.", "eu:")
EXCHANGES = ("amq.topic", "billing:archive", "facts\x07", "facts\ud800")


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({"EXCHANGE": "facts"}, "E001"),
        *(({"SERVICE": name}, "E003 E004") for name in (5, None)),
        *(({"SERVICE": name}, "") for name in SERVICES),
        *(({"SERVICE": name}, "E004") for name in NO_SERVICES),
        *(({"SERVICE": "billing", "PREFIX": name}, "E004") for name in PREFIXES),
        *(({"SERVICE": "billing", "EXCHANGE": name}, "E004") for name in EXCHANGES),
        *(({"SERVICE": "a", "EXCHANGE": name}, "E005") for name in ("x" * 256, "ä" * 128)),
        ({"SERVICE": "b", "PREFIX": "x" * 250, "EXCHANGE": "events"}, "E005"),
    ],
)
def test_codes(raw: object, found: str) -> None:
    assert set(codes(raw)) == set(found.split())


def test_topology_is_automatic_in_debug_only() -> None:
    assert parse({"SERVICE": "a"}, debug=True)[0].topology == "auto"
    assert parse({"SERVICE": "a"}, debug=False)[0].topology == "verify"
    assert parse({"SERVICE": "a", "TOPOLOGY": "verify"}, debug=True)[0].topology == "verify"


@pytest.mark.parametrize(
    ("keys", "near"),
    [
        ({"HANDLER": {}}, "'HANDLERS'"),
        ({"service": "x"}, "'SERVICE'"),
        ({"CONFIRM_TIME_OUT": 5}, "'CONFIRM_TIMEOUT'"),
        ({"ARCHIVE": {"TLL": 5}}, "'TTL'"),
        ({"DEFAULTS": {"MAX_RETRY": 5}}, "'MAX_RETRIES'"),
        ({"DEFAULTS": {"max_retries": 5}}, "'MAX_RETRIES'"),
        ({"HANDLERS": {"a.b": {"AUTORETRY": ()}}}, "'AUTORETRY_FOR'"),
        ({"EVENTS": {"a.b": {"CONTRACTS": "x"}}}, "'CONTRACT'"),
    ],
)
def test_an_unknown_key_names_the_nearest(keys: dict[str, Any], near: str) -> None:
    found = problem(**keys)
    assert found.code == "E002"
    assert near in found.hint


def test_an_unknown_key_like_none_names_them_all() -> None:
    found = problem(ZZZZ=1)
    assert found.code == "E002"
    assert all(key in found.hint for key in conf.KEYS)


@pytest.mark.parametrize(
    "keys",
    [
        {"EVENTS": []},
        {"EVENTS": {"a.b": None}},
        {"HANDLERS": "x"},
        {"DEFAULTS": 5},
        {"AUTODISCOVER": "events"},
        {"AUTODISCOVER": [5]},
        {"PUBLISH": "later"},
        {"UNROUTED": "keep"},
        {"BACKEND": "redis"},
        {"CONFIRM_TIMEOUT": 0},
        {"CONFIRM_TIMEOUT": -1},
        {"CONFIRM_TIMEOUT": float("nan")},
        {"CONFIRM_TIMEOUT": 10**400},
        {"CONSUMER_TIMEOUT": 0},
        {"CONSUMER_TIMEOUT": 300_000},
        {"MAX_BODY": 0},
        {"MAX_BODY": 2**63},
        {"EXCHANGE": ""},
        {"QUEUE_TYPE": "stream"},
        {"TOPOLOGY": "never"},
        {"ARCHIVE": 5},
        {"ARCHIVE": {"TTL": timedelta(days=-1)}},
        {"ARCHIVE": {"TTL": timedelta(days=3651)}},
        {"ARCHIVE": {"TTL": 0.0004}},
        {"ARCHIVE": {"MAX_LENGTH": 2**63}},
        {"RETENTION": None},
        {"RETENTION": {"SUCCEEDED": 0}},
        {"ALERTS": 5},
        {"ALERTS": {"MAIL": "yes"}},
        {"ALERTS": {"GROWTH": 0}},
        {"ALERTS": {"AWAY": -1}},
        {"RETENTION": {"DISCARDED": "30d"}},
        {"RETENTION": {"DISCARDED": timedelta.max}},
        {"RENAMED_HANDLERS": ["billing.old", "billing.new"]},
        {"RENAMED_HANDLERS": {"billing.old": ""}},
        {"RENAMED_HANDLERS": {"": "billing.new"}},
        {"RENAMED_HANDLERS": {"a": "a"}},
        {"RENAMED_HANDLERS": {"a": "b", "b": "c"}},
        {"MANAGEMENT_URL": "rabbit:15672"},
        {"CELERY_APP": 5},
    ],
)
def test_wrong_values(keys: dict[str, Any]) -> None:
    found = problem(**keys)
    assert found.code == "E003"
    assert next(iter(keys)) in found.message


def test_ages_of_retention() -> None:
    assert problem(RETENTION=5).code == "E003"
    _, problems = parse({"SERVICE": "a", "RETENTION": {"INBOX": timedelta(days=29)}})
    assert [(p.code, p.hint) for p in problems] == [
        ("E003", "Use at least 30 days, in which an event may be delivered again, or None.")
    ]
    for value, seconds in ((None, None), (timedelta(days=30), 2_592_000.0), (4e6, 4e6)):
        kept, problems = parse({"SERVICE": "a", "RETENTION": {"INBOX": value}})
        assert (kept.retention.inbox, problems) == (seconds, ())
    assert parse({"SERVICE": "a", "RETENTION": {"BATCHES": None}})[0].retention.batches is None
    assert problem(RETENTION={"BATCHES": "old"}).code == "E003"
    assert problem(RETENTION={"ARCHIVED": 5}).code == "E002"


def test_each_name_on_the_broker_fits() -> None:
    """A check finds what `events_declare`, or the start of a worker, would find."""
    settings = parse({"SERVICE": "b" * 207, "EXCHANGE": "e"})[0]
    declared = topology.build(settings, Registry(events={}, handlers={}))
    queue = f"{settings.service}.{'q' * 47}"
    names = {declared.names.window(queue)}
    names |= {queue.name for queue in declared.queues}
    assert max(map(len, names)) == conf.MAX_NAME
    assert codes({"SERVICE": settings.service}) == []
    assert codes({"SERVICE": f"{settings.service}b"}) == ["E005"]


# -- the process's settings ---------------------------------------------------------------


def test_settings_are_reloaded_on_change(settings: DjangoSettings) -> None:
    settings.AMQP_EVENTS = {"SERVICE": "one"}
    first = conf.get_settings()
    assert first.service == "one"
    assert conf.get_settings() is first
    settings.AMQP_EVENTS = {"SERVICE": "two"}
    assert conf.get_settings().service == "two"
    settings.DEBUG = True
    assert conf.get_settings().topology == "auto"


def test_get_settings_names_every_error(settings: DjangoSettings) -> None:
    settings.AMQP_EVENTS = {"PUBLISH": "later", "HANDLER": {}}
    with pytest.raises(ConfigurationError) as info:
        conf.get_settings()
    text = str(info.value)
    assert "SERVICE" in text
    assert "'later'" in text
    assert "'HANDLERS'" in text


@pytest.mark.parametrize(("value", "what"), [(None, "not set"), ({}, "empty")])
def test_get_settings_while_dormant(value: Any, what: str, settings: DjangoSettings) -> None:
    settings.AMQP_EVENTS = value
    with pytest.raises(ConfigurationError, match=f"AMQP_EVENTS is {what}"):
        conf.get_settings()
