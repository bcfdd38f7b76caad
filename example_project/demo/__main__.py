"""``python -m example_project.demo``: from an empty broker to a table that has to add up.

Exit codes: 0 nothing was lost; 1 something was, or it did not end; 2 it could not begin; 130
interrupted. Whatever it was, nothing is left running unless --keep was asked for.
"""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
from typing import Any

from . import keeping
from .place import RUN
from .processes import DemoError
from .run import Demo
from .screen import YELLOW, Screen

from broker import BrokerError  # isort: skip - processes.py has its path


def main() -> int:
    options = arguments()
    screen = Screen()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    RUN.mkdir(parents=True, exist_ok=True)
    with (RUN / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("demo: another one runs in this checkout; wait for its end", file=sys.stderr)
            return 2
        if options.stop:
            return keeping.end(screen)
        if keeping.read():
            print("demo: one that was kept runs; end it: make demo ARGS=--stop", file=sys.stderr)
            return 2
        demo = Demo(screen, orders=options.orders, keep=options.keep)
        try:
            return demo.run()
        except KeyboardInterrupt:
            screen.write(screen.paint("interrupted", YELLOW))
            return 130
        except (BrokerError, DemoError) as exc:
            screen.clear()
            print(f"demo: {exc}", file=sys.stderr)
            return 1 if demo.workers else 2
        finally:
            demo.clean_up()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m example_project.demo",
        description="Two services, some hundred orders, failures, retries and the archive, on a "
        "real RabbitMQ: a private node, or the broker that AMQP_URL names (there in a vhost of "
        "its own, or below a prefix).",
    )
    parser.add_argument("--orders", type=int, metavar="N", help="only the first N lines of orders")
    parser.add_argument(
        "--keep", action="store_true", help="leave broker and workers running, and say where"
    )
    parser.add_argument("--stop", action="store_true", help="end what --keep has left running")
    options = parser.parse_args()
    if options.orders is not None and options.orders < 1:
        parser.error("--orders is 1 or more")
    return options


def interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
