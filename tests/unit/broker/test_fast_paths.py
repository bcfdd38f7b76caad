"""One function decides for each fast path whether it is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from django.db import connection

from django_amqp_events.broker.fast_paths import NEEDS, why_unused
from django_amqp_events.broker.private_names import PrivateName
from django_amqp_events.conf import FAST_PATHS, Settings
from django_amqp_events.worker.fast.quiet_retries import QuietRetries
from django_amqp_events.worker.fast_paths import trace_info


@pytest.mark.parametrize("path", FAST_PATHS)
def test_a_fast_path_is_used_if_it_is_named_and_possible(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "vendor", "postgresql")
    assert why_unused(path, Settings()) == ""
    assert why_unused(path, replace(Settings(), fast_paths=frozenset({path}))) == ""
    others = frozenset({*FAST_PATHS} - {path})
    assert why_unused(path, replace(Settings(), fast_paths=others)) == "FAST_PATHS does not name it"
    monkeypatch.setitem(NEEDS, path, ("celery", (PrivateName(f"celery.no:{path}", ""),)))
    assert f"celery.no:{path} does not exist" in why_unused(path, Settings())


def test_only_postgresql_deletes_without_its_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "vendor", "mysql")
    assert why_unused("deletes", Settings()) == "the outbox is not in PostgreSQL"


def test_retries_are_quiet_only_as_a_fast_path() -> None:
    assert trace_info(Settings()) is QuietRetries
    slow = trace_info(replace(Settings(), fast_paths=frozenset()))
    assert not issubclass(slow, QuietRetries)
