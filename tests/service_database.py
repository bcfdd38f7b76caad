"""Databases of services that run in processes of their own, as tests look at them."""

from __future__ import annotations

import shutil
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from database_server import DatabaseServer
from tests.conftest import sqlite_settings


@dataclass(frozen=True, slots=True)
class Database:
    """A database, on a server or in SQLite's file; *settings* is its entry of DATABASES."""

    settings: dict[str, Any]
    server: DatabaseServer | None = None

    @classmethod
    def new(cls, where: Path, server: DatabaseServer | None, template: str = "") -> Database:
        """Create one, empty or as a copy of another one, in a folder if it is a file."""
        name = f"service_{uuid4().hex}"
        if server is not None:
            server.create(name, template)
            return cls(server.settings(name), server)
        path = where / f"{name}.sqlite3"
        if template:
            shutil.copyfile(template, path)
        settings = sqlite_settings(path)
        settings["OPTIONS"]["transaction_mode"] = "IMMEDIATE"
        return cls(settings)

    @property
    def name(self) -> str:
        return str(self.settings["NAME"])

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        if self.server is not None:
            return self.server.execute(statement, database=self.name)
        with closing(sqlite3.connect(self.name, timeout=20)) as connection:
            return connection.execute(statement).fetchall()

    def group_counts(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Return each failure group, what it counts and what its events are.

        These are open, and in progress.
        """
        counted: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for group, *numbers in self.query(
            "SELECT id, open, in_progress FROM django_amqp_events_failuregroup UNION ALL "
            "SELECT group_id, open, in_progress FROM django_amqp_events_groupcountchange"
        ):
            known = counted[hex_id(group)]
            known[:] = [one + int(other) for one, other in zip(known, numbers, strict=True)]
        actual: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for group, state in self.query(
            "SELECT group_id, state FROM django_amqp_events_archivedevent "
            "WHERE group_id IS NOT NULL"
        ):
            numbers = actual[hex_id(group)]
            numbers[0] += state == "archived"
            numbers[1] += state in ("queued", "replaying")
        return [
            (group, tuple(counted[group]), tuple(actual[group])) for group in {**counted, **actual}
        ]


def hex_id(value: object) -> str:
    """Return a UUID as SQLite and MariaDB have it."""
    return str(value).replace("-", "")
