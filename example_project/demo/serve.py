"""`make serve`: both services, with their failures in the archive, until somebody has seen enough.

One process looks after all the others, at a terminal or in the background. It is told by signals:
SIGUSR1 releases the fix, SIGINT and SIGTERM end everything.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

from amqp.exceptions import AMQPError

from . import accounting, state_file
from .processes import ROOT, DemoError
from .run import Demo
from .sandbox import RUN, shown
from .screen import DIM, Screen

from machine import wait_until  # isort: skip - processes.py has its path

#: Ports of the two web servers, where they are free.
PORTS = (8001, 8002)
#: Seconds between looks.
LOOK = 0.5
#: Seconds for a roll-out, for all to begin and for all to end.
PATIENCE = 120.0


class Serving(Demo):
    """A demo that stops half way and waits."""

    def __init__(self, screen: Screen, *, orders: int | None) -> None:
        super().__init__(screen, orders=orders, ports=PORTS)
        self.wanted = False

    def run(self) -> int:
        """Serve until a signal ends it (KeyboardInterrupt)."""
        signal.signal(signal.SIGUSR1, self._want)
        self.set_up()
        with self.broker() as broker:
            self.start(broker, web=True)
            self.publish(broker)
            self.take_stock(broker)
            state_file.explain(self.screen, self)
            self.explain()
            state_file.write(self, server=True)
            self.served = True
            try:
                self.wait(broker)
            except (AMQPError, OSError) as exc:
                raise DemoError(f"the broker is gone: {exc}") from exc
        return 0

    def _want(self, _number: int, _frame: Any) -> None:
        self.wanted = True

    def explain(self) -> None:
        screen = self.screen
        screen.heading("What to try")
        for line in (
            "1. Log in, open Archived events, look at one: what failed, where, and how often",
            "2. Replay it: it is tried anew, fails again, and comes back as the same row",
            "3. Release the fix, in another terminal:  make serve ARGS=--fix",
            "4. Select all, action Replay, in both services; watch them succeed",
        ):
            screen.write(f"  {line}")
        screen.write()
        screen.write("  end with Ctrl-C, or make serve ARGS=--stop")
        screen.write()

    def wait(self, broker: accounting.Queues) -> None:
        """Look on, say what changes, and roll out the fix when it is asked for."""
        said = ""
        while True:
            self.complain()
            if self.wanted and self.release == 1:
                self.roll_out(broker)
                self.screen.write()
                state_file.write(self, server=True)
            state = self.look(broker)
            opened = ", ".join(f"{name} {count}" for name, count in state.archived.items())
            text = f"handled {state.handled} of {state.expected}; open in the archive: {opened}"
            if text != said:
                said = text
                moment = self.screen.paint(time.strftime("%H:%M:%S"), DIM)
                self.screen.write(f"  {moment}  {text}")
            time.sleep(LOOK)


def in_background(screen: Screen, *, orders: int | None) -> int:
    """Start a process that serves, and return when it does; returns the exit code."""
    command = [sys.executable, "-m", "example_project.demo", "--serve"]
    command += ["--orders", str(orders)] if orders else []
    state_file.OUTPUT.unlink(missing_ok=True)
    state_file.OUTPUT.touch(mode=0o600)  # it has passwords in it
    with state_file.OUTPUT.open("w") as out:
        child = subprocess.Popen(  # noqa: S603 - this program
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with state_file.OUTPUT.open() as said:
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
    child.returncode = 0  # it goes on without us
    return 0


def _pass_on(screen: Screen, text: str) -> None:
    screen.out.write(text)
    screen.out.flush()


def _server_pid() -> int:
    process = state_file.server(state_file.read())
    return process.pid if process is not None else 0


def release(screen: Screen) -> int:
    """Ask the process that serves to release the fix; returns the exit code."""
    state = state_file.read()
    server = state_file.server(state)
    if server is None:
        print("demo: nothing is served; begin with: make serve", file=sys.stderr)
        return 2
    if state["release"] == 2:
        screen.write("release 2 runs already")
        return 0
    screen.write("rolling out release 2: workers end what they have in hand and start anew …")
    server.send(signal.SIGUSR1)
    wait_until(lambda: not server.alive or state_file.read().get("release") == 2, PATIENCE)
    if state_file.read().get("release") != 2:
        print(f"demo: the roll-out did not end; look into {shown(RUN / 'log')}", file=sys.stderr)
        return 1
    screen.write("Release 2 runs. What is replayed now is handled.")
    return 0


def end(screen: Screen) -> int | None:
    """End the process that serves, and with it all others; ``None`` where there is none."""
    server = state_file.server(state_file.read())
    if server is None:
        return None
    screen.status("stopping …")
    server.send(signal.SIGTERM)
    gone = server.wait(PATIENCE)
    screen.write("all stopped" if gone else f"still running: {server.pid}")
    return 0 if gone else 1
