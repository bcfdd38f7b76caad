"""What is served if something is missing; the acceptance suite has the metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError

from django_amqp_events.monitor import metrics, snapshots


def test_without_a_database_the_counters_remain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def down(_: str) -> None:
        raise OperationalError("the database is down")

    monkeypatch.setattr(metrics, "close_old_connections", bool)
    monkeypatch.setattr(snapshots, "rows", down)
    assert list(metrics.SnapshotCollector("billing").collect()) == []
    assert "the database is down" in caplog.text


def test_a_missing_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path / "missing"))
    with pytest.raises(CommandError, match=r"missing', which is not a directory"):
        call_command("events_metrics", "9540")
