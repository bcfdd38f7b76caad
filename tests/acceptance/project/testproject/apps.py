from __future__ import annotations

import json
import os
from functools import partial
from importlib import import_module
from typing import Any

from django.apps import AppConfig


class TestProject(AppConfig):
    name = "testproject"

    def ready(self) -> None:
        from . import crash_point, points

        for name, value in json.loads(os.environ.get("TESTPROJECT_CONSTANTS", "{}")).items():
            module, _, constant = name.rpartition(".")
            owner = import_module(f"django_amqp_events.{module}")
            assert hasattr(owner, constant), name
            setattr(owner, constant, value)
        if seconds := os.environ.get("TESTPROJECT_SNAPSHOTS"):
            mirror: Any = import_module("django_amqp_events.management.commands.events_mirror")
            mirror.SnapshotLoop = partial(mirror.SnapshotLoop, every=float(seconds))
        points.arm()
        crash_point.arm()
