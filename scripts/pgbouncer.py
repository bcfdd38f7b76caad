"""A private PgBouncer in transaction mode before a private PostgreSQL, for tests."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import apt_install
from database_server import DatabaseServer, setpriv
from machine import HOST, Process, ScriptError, free_ports, wait_until

START_TIMEOUT = 20.0
#: One client has its transactions in several sessions, in turn.
CONFIG = """
[databases]
* = host={server.HOST} port={server.port} user={server.USER}

[pgbouncer]
listen_addr = {host}
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 20
min_pool_size = 3
max_client_conn = 200
server_round_robin = 1
"""


class PgBouncer:
    """A PgBouncer that ends with this process: ``pool = PgBouncer.start(server); pool.end()``."""

    def __init__(self, directory: Path, process: Process, port: int) -> None:
        self.directory = directory
        self.port = port
        self._process = process

    @classmethod
    def start(cls, server: DatabaseServer) -> PgBouncer:
        """Start one before a server."""
        directory, port = Path(tempfile.mkdtemp(prefix="pgbouncer-")), free_ports(1)[0]
        config = directory / "pgbouncer.ini"
        config.write_text(CONFIG.format(server=server, host=HOST, port=port))
        # Like PostgreSQL, it refuses to run as root.
        directory.chmod(0o755)
        process = Process.spawn(
            *setpriv("--pdeathsig=KILL"), find(), config, output=directory / "log", cwd="/"
        )
        pool = cls(directory, process, port)
        if not wait_until(pool._ready, START_TIMEOUT):
            log = (directory / "log").read_text()
            pool.end()
            raise ScriptError(f"PgBouncer does not answer:\n{log}")
        return pool

    def end(self) -> None:
        """End it and delete its directory."""
        self._process.end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _ready(self) -> bool:
        with suppress(OSError), socket.create_connection((HOST, self.port), timeout=1):
            return self._process.alive
        return False


def find() -> str:
    """Return the path of pgbouncer; install it if it is missing."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
    if not shutil.which("pgbouncer", path=path):
        apt_install.install(
            ["pgbouncer"], why="This machine has no PgBouncer", units=["pgbouncer.service"]
        )
    if (found := shutil.which("pgbouncer", path=path)) is None:
        raise ScriptError("apt's package pgbouncer has no pgbouncer.")
    return found
