#!/usr/bin/env python3
"""Run a command with a private PostgreSQL: its own port and data, gone when the command ends.

    python3 scripts/postgresql.py make test

The command finds AMQP_EVENTS_TEST_DATABASE=postgresql and libpq's PGHOST, PGPORT, PGUSER and
PGDATABASE in its environment. The server is looked for, else installed by apt; the service that
apt's package brings is neither started nor left behind.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import apt_install

from broker import free_ports


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    programs = find()
    with tempfile.TemporaryDirectory(prefix="postgresql-") as directory:
        data = Path(directory) / "data"
        prefix: list[str] = []
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            somebody = next(u for u in ("postgres", "nobody") if _exists(u))
            prefix = ["setpriv", f"--reuid={somebody}", "--clear-groups", "--"]
            shutil.chown(directory, somebody)
        [port] = free_ports(1)
        quietly(
            [*prefix, str(programs / "initdb"), "--pgdata", str(data), "--username", "events"]
            + ["--auth", "trust", "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync"],
            directory,
        )
        options = f"-p {port} -c listen_addresses=127.0.0.1 -k {directory} -c fsync=off"
        control = [*prefix, str(programs / "pg_ctl"), "--pgdata", str(data), "--wait"]
        log = str(Path(directory) / "log")
        quietly([*control, "--options", options, "--log", log, "start"], directory)
        try:
            return subprocess.run(
                sys.argv[1:],
                env=os.environ
                | {
                    "AMQP_EVENTS_TEST_DATABASE": "postgresql",
                    "PGHOST": "127.0.0.1",
                    "PGPORT": str(port),
                    "PGUSER": "events",
                    "PGDATABASE": "postgres",
                },
                check=False,
            ).returncode
        finally:
            quietly([*control, "--mode", "immediate", "stop"], directory)


def find() -> Path:
    """The directory of initdb and pg_ctl."""
    for attempt in range(2):
        if on_path := shutil.which("initdb"):
            return Path(on_path).parent
        if found := sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=_major):
            return found[-1].parent
        if attempt == 0:
            try:
                apt_install.install(
                    ["postgresql"],
                    why="no PostgreSQL server was found on this machine",
                    services=["postgresql.service"],
                )
            except apt_install.AptError as exc:
                sys.exit(f"No PostgreSQL: {exc}")
    sys.exit("No PostgreSQL: apt's package brought no initdb.")


def _major(path: Path) -> int:
    return int(path.parent.parent.name)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def quietly(command: list[str], directory: str) -> None:
    """Run it; its output is worth reading only where it fails."""
    with (Path(directory) / "output").open("w+") as output:
        done = subprocess.run(
            command, cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        )
        if done.returncode:
            output.seek(0)
            sys.exit(f"{output.read()}\n`{' '.join(command)}` failed ({done.returncode}).")


if __name__ == "__main__":
    sys.exit(main())
