#!/usr/bin/env python3
"""Run a command with a private MariaDB: its own port and data, gone when the command ends.

    python3 scripts/mariadb.py make test

The command gets the database's entry for DATABASES, as JSON, in AMQP_EVENTS_TEST_DATABASE. apt
installs MariaDB's programs if they are missing; they have no service.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from database_server import DatabaseServer, filled, main
from machine import exit_with


class MariaDB(DatabaseServer):
    """A MariaDB server, with Debian's default character set and collation."""

    kind = "mariadb"
    title = "MariaDB"
    # The second has a program that mariadb-install-db calls.
    packages = ("mariadb-server-core", "mariadb-client-core")
    end_signal = signal.SIGKILL

    def settings(self, name: str = "") -> dict[str, Any]:
        return {
            "ENGINE": "django.db.backends.mysql",
            "NAME": name or "events",
            "HOST": self.HOST,
            "PORT": str(self.port),
            "USER": self.USER,
            # For each connection, PyMySQL would read the certificates of this machine.
            "OPTIONS": {"ssl_disabled": True},
        }

    def connect(self, database: str = "", *, autocommit: bool = True) -> Any:
        import pymysql

        return pymysql.connect(
            host=self.HOST, port=self.port, user="admin", database=database or "events",
            charset="utf8mb4", autocommit=autocommit, ssl_disabled=True,
        )  # fmt: skip

    def create(self, name: str, template: str = "") -> None:
        self.execute(f"CREATE DATABASE {name}", f"GRANT ALL ON {name}.* TO {self.USER}")
        if not template:
            return
        tables = [table for (table,) in self.execute(f"SHOW TABLES FROM {template}")]
        made = [self.execute(f"SHOW CREATE TABLE {template}.{table}")[0][1] for table in tables]
        rows = [f"INSERT INTO {table} SELECT * FROM {template}.{table}" for table in tables]
        # The order of the tables is not that of their foreign keys.
        self.execute("SET foreign_key_checks = 0", *made, *rows, database=name)

    def drop(self, name: str) -> None:
        with self.refusing(name):
            self.execute(f"DROP DATABASE {name}")

    def _restore(self, name: str, template: str, tables: Sequence[str]) -> None:
        with self.refusing(name), self.connect(name) as connection, connection.cursor() as cursor:
            for table in filled(cursor, tables):
                cursor.execute("SET foreign_key_checks = 0")
                cursor.execute(f"DELETE FROM {table}")
                cursor.execute(f"INSERT INTO {table} SELECT * FROM {template}.{table}")

    @contextmanager
    def refusing(self, name: str) -> Iterator[None]:
        self.execute(f"REVOKE ALL ON {name}.* FROM {self.USER}")
        try:
            self._end_connections(name)
            yield
        finally:
            self.execute(f"GRANT ALL ON {name}.* TO {self.USER}")

    @contextmanager
    def read_only(self, name: str) -> Iterator[None]:
        # For all databases of the server; open transactions would delay it.
        self._end_connections(name)
        self.execute("SET GLOBAL read_only = 1")
        try:
            self._end_connections(name)
            yield
        finally:
            self.execute("SET GLOBAL read_only = 0")

    def _end_connections(self, name: str) -> None:
        users = f"SELECT id FROM information_schema.processlist WHERE db = '{name}'"
        for (connection,) in self.execute(users):
            with suppress(Exception):  # it has ended meanwhile
                self.execute(f"KILL {connection}")

    @classmethod
    def _programs(cls) -> Path | None:
        # /usr/sbin is on root's path only.
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
        found = shutil.which("mariadbd", path=path)
        return Path(found).parent if found and shutil.which("mariadb-install-db") else None

    def _initialisation(self, programs: Path) -> list[str | Path]:
        # Before the first connection, at each start.
        (self.directory / "init.sql").write_text(
            "CREATE USER IF NOT EXISTS admin;\nGRANT ALL ON *.* TO admin WITH GRANT OPTION;\n"
            f"CREATE USER IF NOT EXISTS {self.USER};\nCREATE DATABASE IF NOT EXISTS events;\n"
            # pytest-django's database has a prefix.
            f"GRANT ALL ON `%events%`.* TO {self.USER};\n"
        )
        return [
            "mariadb-install-db", "--no-defaults", f"--datadir={self.directory / 'data'}",
            "--auth-root-authentication-method=normal", "--skip-test-db",
        ]  # fmt: skip

    def _command(self, programs: Path) -> list[str | Path]:
        return [
            programs / "mariadbd", "--no-defaults", f"--datadir={self.directory / 'data'}",
            f"--port={self.port}", f"--bind-address={self.HOST}",
            f"--socket={self.directory / 'socket'}", f"--pid-file={self.directory / 'pid'}",
            # A server deletes the temporary tables that it finds there when it starts.
            f"--tmpdir={self.directory}",
            "--character-set-server=utf8mb4", "--collation-server=utf8mb4_general_ci",
            f"--init-file={self.directory / 'init.sql'}", "--skip-name-resolve", "--skip-log-bin",
            "--max-connections=60", "--innodb-buffer-pool-size=64M",
            # Each change of a table locks those of the statistics, and waits 50 s for it at most.
            "--innodb-stats-persistent=OFF",
            # Twice MAX_BODY, as docs/databases.md asks for.
            "--max-allowed-packet=32M",
            # A commit survives the death of the server, not that of the machine.
            *([] if self.durable else ["--innodb-flush-log-at-trx-commit=2", "--skip-sync-frm",
                                       "--innodb-flush-method=nosync"]),
        ]  # fmt: skip

    def _ready(self) -> bool:
        try:
            socket.create_connection((self.HOST, self.port), timeout=1).close()
        except OSError:
            return False
        return True


if __name__ == "__main__":
    exit_with(lambda: main(MariaDB, __doc__))
