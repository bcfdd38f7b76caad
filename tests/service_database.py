"""Databases of services that run in processes of their own, as tests look at them."""

from __future__ import annotations

import shutil
import sqlite3
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

    def rows(self, table: str, columns: str = "*", where: str = "1 = 1") -> list[tuple[Any, ...]]:
        """Return rows of one of the package's tables."""
        statement = f"SELECT {columns} FROM django_amqp_events_{table} WHERE {where}"  # noqa: S608
        return self.query(statement)

    @property
    def effects(self) -> list[str]:
        """Return the events that handlers with `once` have written down, as often as they are."""
        return [event_id for (event_id,) in self.query("SELECT event FROM effects")]


def hex_id(value: object) -> str:
    """Return a UUID as SQLite and MariaDB have it."""
    return str(value).replace("-", "")
