#!/usr/bin/env python3
"""Run a command with a private PostgreSQL: its own port and data, gone when the command ends.

    python3 scripts/postgresql.py make test

The command gets the database's entry for DATABASES, as JSON, in AMQP_EVENTS_TEST_DATABASE. apt
installs PostgreSQL if it is missing, without leaving its service behind.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from database_server import DatabaseServer, filled, main
from machine import exit_with


class Postgres(DatabaseServer):
    """A PostgreSQL server."""

    kind = "postgresql"
    title = "PostgreSQL"
    packages = ("postgresql",)
    units = ("postgresql.service",)
    end_signal = signal.SIGQUIT

    def settings(self, name: str = "") -> dict[str, Any]:
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": name or "postgres",
            "HOST": self.HOST,
            "PORT": str(self.port),
            "USER": self.USER,
        }

    def connect(self, database: str = "", *, autocommit: bool = True) -> Any:
        import psycopg

        return psycopg.connect(
            host=self.HOST, port=self.port, user=self.USER, dbname=database or "postgres",
            autocommit=autocommit,
        )  # fmt: skip

    def create(self, name: str, template: str = "") -> None:
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template or 'template1'}")

    def drop(self, name: str) -> None:
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _restore(self, name: str, template: str, tables: Sequence[str]) -> None:
        self.execute(_end_connections(name))
        with self.connect(name) as connection, connection.cursor() as cursor:
            # The only one that has rows in a template.
            if found := [each for each in filled(cursor, tables) if each != "django_migrations"]:
                cursor.execute(f"TRUNCATE {', '.join(found)} RESTART IDENTITY CASCADE")

    @contextlib.contextmanager
    def refusing(self, name: str) -> Iterator[None]:
        self.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false", _end_connections(name))
        try:
            yield
        finally:
            self.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")

    @contextlib.contextmanager
    def read_only(self, name: str) -> Iterator[None]:
        # A connection that is made meanwhile stays read-only, like one to a replica.
        option = "default_transaction_read_only"
        self.execute(f"ALTER DATABASE {name} SET {option} = on", _end_connections(name))
        try:
            yield
        finally:
            self.execute(f"ALTER DATABASE {name} RESET {option}")

    @classmethod
    def _programs(cls) -> Path | None:
        if on_path := shutil.which("initdb"):
            return Path(on_path).resolve().parent
        found = Path("/usr/lib/postgresql").glob("*/bin/initdb")
        newest = max(found, key=lambda path: int(path.parts[-3]), default=None)
        return newest.parent if newest else None

    def _initialisation(self, programs: Path) -> list[str | Path]:
        return [
            programs / "initdb", "--pgdata", self.directory / "data", "--username", self.USER,
            "--auth", "trust", "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync",
        ]  # fmt: skip

    def _command(self, programs: Path) -> list[str | Path]:
        return [
            programs / "postgres", "-D", self.directory / "data", "-p", str(self.port),
            "-k", self.directory, "-c", f"listen_addresses={self.HOST}",
            "-c", f"fsync={'on' if self.durable else 'off'}", "-c", "max_connections=60",
        ]  # fmt: skip

    def _ready(self) -> bool:
        with contextlib.suppress(OSError):
            state = (self.directory / "data" / "postmaster.pid").read_text().split()
            return state[:1] == [str(self.pid)] and state[-1] == "ready"
        return False


def _end_connections(name: str) -> str:
    return f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"


if __name__ == "__main__":
    exit_with(lambda: main(Postgres, __doc__))
