"""``python -m example_project.demo``: two services, from an empty broker to a balanced account.

Exit codes: 0 all accepted events are handled; 1 some are not, or the demo did not finish; 2 it
could not start; 130 interrupted (0 with --serve). Nothing keeps running, except with --keep.
"""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
from typing import Any

from . import serve, state_file
from .processes import RUN
from .run import Demo
from .screen import YELLOW, Screen

from machine import ScriptError  # isort: skip - processes.py adds its path


def main() -> int:
    options = arguments()
    screen = Screen()
    # SIGINT too: a shell makes background programs ignore it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    RUN.mkdir(parents=True, exist_ok=True)
    if options.fix:
        return serve.release(screen)
    if options.stop and (code := serve.end(screen)) is not None:
        return code
    with (RUN / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return refuse("another demo runs in this checkout. Wait, or: make serve ARGS=--stop")
        if options.stop:
            return state_file.end(screen)
        if state_file.read():
            return refuse("a demo was left running. Stop it first: make demo ARGS=--stop")
        if options.serve and options.keep:
            lock.close()  # for the other process
            return serve.in_background(screen, orders=options.orders)
        demo: Demo
        if options.serve:
            demo = serve.Serving(screen, orders=options.orders)
        else:
            demo = Demo(screen, orders=options.orders, keep=options.keep)
        try:
            return demo.run()
        except KeyboardInterrupt:
            if demo.served:
                return 0
            screen.write(screen.paint("interrupted", YELLOW))
            return 130
        except ScriptError as exc:
            screen.clear()
            print(f"demo: {exc}", file=sys.stderr)
            return 1 if demo.working else 2
        finally:
            demo.clean_up()


def refuse(message: str) -> int:
    print(f"demo: {message}", file=sys.stderr)
    return 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m example_project.demo",
        description="Two services, 300 orders, failures, retries, the archive, a release with the "
        "fix, and the replay in the admin, on a real RabbitMQ: a private node, or a vhost on the "
        "broker of AMQP_URL.",
    )
    parser.add_argument("--orders", type=int, metavar="N", help="read only the first N orders")
    parser.add_argument("--keep", action="store_true", help="leave everything running")
    parser.add_argument(
        "--serve", action="store_true", help="stop with a full archive, and serve the admin"
    )
    parser.add_argument("--fix", action="store_true", help="release the fix while --serve runs")
    parser.add_argument("--stop", action="store_true", help="stop what --keep or --serve runs")
    options = parser.parse_args()
    if options.orders is not None and options.orders < 1:
        parser.error("--orders must be 1 or more")
    return options


def interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
