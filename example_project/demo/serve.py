"""`make serve`: both services with a full archive, until a signal ends them.

One process watches all the others, at a terminal or in the background. SIGUSR1 releases the fix,
SIGINT and SIGTERM end everything.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

from amqp.exceptions import AMQPError

from . import state_file
from .accounting import Queues
from .processes import ROOT, DemoError
from .run import LOGS, OUTPUT, Demo
from .screen import DIM, Screen

from machine import wait_until  # isort: skip - processes.py adds its path

#: Ports of the two web servers, if they are free.
PORTS = (8001, 8002)
#: Seconds between two looks.
LOOK = 0.5
#: Seconds for a roll-out, and for everything to start or to end.
PATIENCE = 120.0


class Serving(Demo):
    """A demo that stops half way and waits."""

    def __init__(self, screen: Screen, *, orders: int | None) -> None:
        super().__init__(screen, orders=orders, ports=PORTS)
        self.fix_requested = False

    def run(self) -> int:
        """Serve until a signal ends it (KeyboardInterrupt)."""
        signal.signal(signal.SIGUSR1, self._request_fix)
        self.set_up()
        with self.queues() as queues:
            self.start(queues, web=True)
            self.publish(queues)
            self.take_stock(queues)
            self.explain()
            self.suggest()
            self.save_state(server=True)
            self.served = True
            try:
                self.wait(queues)
            except (AMQPError, OSError) as exc:
                raise DemoError(f"RabbitMQ is unreachable: {exc}") from exc
        return 0

    def _request_fix(self, _number: int, _frame: Any) -> None:
        self.fix_requested = True

    def suggest(self) -> None:
        screen = self.screen
        screen.heading("What to try")
        for line in (
            "1. Log in, open Archived events, look at one: the error, the traceback, the attempts",
            "2. Replay it: it fails again and returns to the same row",
            "3. In billing, search for an order by its number: S-20260071, or number=S-202600*",
            "4. Release the fix, in another terminal:  make serve ARGS=--fix",
            "5. Select all events, choose Replay, in both services, and watch them succeed",
        ):
            screen.write(f"  {line}")
        screen.write()
        screen.write("  stop with Ctrl-C, or make serve ARGS=--stop")
        screen.write()

    def wait(self, queues: Queues) -> None:
        """Print every change, and roll out the fix on request."""
        said = ""
        while True:
            self.check_workers()
            if self.fix_requested and self.release == 1:
                self.roll_out(queues)
                self.screen.write()
                self.save_state(server=True)
            now = self.look(queues)
            opened = ", ".join(f"{name} {count}" for name, count in now.open.items())
            handled = f"handled {now.total('handled')} of {now.total('events')}"
            text = f"{handled}; open in the archive: {opened}"
            if text != said:
                said = text
                moment = self.screen.paint(time.strftime("%H:%M:%S"), DIM)
                self.screen.write(f"  {moment}  {text}")
            time.sleep(LOOK)


def in_background(screen: Screen, *, orders: int | None) -> int:
    """Start a process that serves, and return the exit code when it is ready."""
    command = [sys.executable, "-m", "example_project.demo", "--serve"]
    command += ["--orders", str(orders)] if orders else []
    OUTPUT.unlink(missing_ok=True)
    OUTPUT.touch(mode=0o600)  # it contains passwords
    with OUTPUT.open("w") as out:
        child = subprocess.Popen(  # noqa: S603 - this program
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with OUTPUT.open() as said:
            while child.poll() is None and _server_pid() != child.pid:
                _pass_on(screen, said.read())
                time.sleep(0.1)
            _pass_on(screen, said.read())
    except KeyboardInterrupt:
        child.terminate()
        child.wait(PATIENCE)
        raise
    if child.poll() is not None:
        return child.returncode or 1
    child.returncode = 0  # it outlives this process
    return 0


def _pass_on(screen: Screen, text: str) -> None:
    screen.out.write(text)
    screen.out.flush()


def _server_pid() -> int:
    process = state_file.server(state_file.read())
    return process.pid if process is not None else 0


def release(screen: Screen) -> int:
    """Ask the serving process to release the fix; return the exit code."""
    state = state_file.read()
    server = state_file.server(state)
    if server is None:
        print("demo: make serve is not running. Start it first.", file=sys.stderr)
        return 2
    if state["release"] == 2:
        screen.write("release 2 is running already")
        return 0
    screen.write("rolling out release 2: the workers finish their events and restart …")
    server.send(signal.SIGUSR1)
    wait_until(lambda: not server.alive or state_file.read().get("release") == 2, PATIENCE)
    if state_file.read().get("release") != 2:
        print(f"demo: the roll-out did not finish. Look into {LOGS}.", file=sys.stderr)
        return 1
    screen.write("Release 2 is running. Replayed events are handled now.")
    return 0


def end(screen: Screen) -> int | None:
    """End the serving process and all others; return the exit code, None if it does not run."""
    server = state_file.server(state_file.read())
    if server is None:
        return None
    screen.status("stopping …")
    server.send(signal.SIGTERM)
    gone = server.wait(PATIENCE)
    screen.write("all processes stopped" if gone else f"still running: {server.pid}")
    return 0 if gone else 1
