"""A private Redis: its own port and directory, for tests."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import apt_install
from machine import HOST, Process, ScriptError, free_ports, wait_until

START_TIMEOUT = 20.0


class Redis:
    """A Redis server that ends with this process: ``server = Redis.start(); server.end()``."""

    def __init__(self, directory: Path, process: Process, port: int) -> None:
        self.directory = directory
        self.port = port
        self._process = process

    @classmethod
    def start(cls) -> Redis:
        """Start a server in a new directory, without saving anything."""
        directory, port = Path(tempfile.mkdtemp(prefix="redis-")), free_ports(1)[0]
        process = Process.spawn(
            "setpriv", "--pdeathsig=KILL", "--", find(), "--port", str(port), "--bind", HOST,
            "--save", "", "--appendonly", "no", "--dir", directory,
            output=directory / "log", cwd="/",
        )  # fmt: skip
        server = cls(directory, process, port)
        if not wait_until(server._ready, START_TIMEOUT):
            log = (directory / "log").read_text()
            server.end()
            raise ScriptError(f"Redis does not answer:\n{log}")
        return server

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def end(self) -> None:
        """End the server and delete its directory."""
        self._process.end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _ready(self) -> bool:
        log = (self.directory / "log").read_text(errors="replace")
        return self._process.alive and "Ready to accept connections" in log


def find() -> str:
    """Return the path of redis-server; install it if it is missing."""
    if not shutil.which("redis-server"):
        apt_install.install(
            ["redis-server"], why="This machine has no Redis", units=["redis-server.service"]
        )
    if (found := shutil.which("redis-server")) is None:
        raise ScriptError("apt's package redis-server has no redis-server.")
    return found
