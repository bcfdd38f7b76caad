"""``python -m example_project.demo``: from an empty broker to a table that has to add up.

Exit codes: 0 all that was accepted is handled; 1 it is not, or it did not end; 2 it could not
begin; 130 interrupted, which for --serve is a regular end (0). Whatever it was, nothing is left
running unless --keep was asked for.
"""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
from typing import Any

from . import serve, state_file
from .processes import DemoError
from .run import Demo
from .sandbox import RUN
from .screen import YELLOW, Screen

from broker import BrokerError  # isort: skip - processes.py has its path


def main() -> int:
    options = arguments()
    screen = Screen()
    # SIGINT too: a shell lets programs in its background ignore it.
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
            print(
                "demo: another one runs in this checkout; wait for its end, or where it serves: "
                "make serve ARGS=--stop",
                file=sys.stderr,
            )
            return 2
        if options.stop:
            return state_file.end(screen)
        if state_file.read():
            print("demo: one that was kept runs; end it: make demo ARGS=--stop", file=sys.stderr)
            return 2
        if options.serve and options.keep:
            lock.close()  # the other process takes it
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
        except (BrokerError, DemoError) as exc:
            screen.clear()
            print(f"demo: {exc}", file=sys.stderr)
            return 1 if demo.working else 2
        finally:
            demo.clean_up()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m example_project.demo",
        description="Two services, some hundred orders, failures, retries, the archive, a release "
        "that mends them and their replay in the admin, on a real RabbitMQ: a private node, or the "
        "broker that AMQP_URL names (there in a vhost of its own, or below a prefix).",
    )
    parser.add_argument("--orders", type=int, metavar="N", help="only the first N lines of orders")
    parser.add_argument(
        "--keep", action="store_true", help="leave everything running in the background"
    )
    parser.add_argument(
        "--serve", action="store_true", help="stop half way, and leave the archive to you"
    )
    parser.add_argument("--fix", action="store_true", help="release the fix where --serve runs")
    parser.add_argument(
        "--stop", action="store_true", help="end what --keep has left running, or --serve"
    )
    options = parser.parse_args()
    if options.orders is not None and options.orders < 1:
        parser.error("--orders is 1 or more")
    return options


def interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
