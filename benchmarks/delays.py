"""Measured delays beside their schedule, and which handlers get a retry.

``make show``, or ``python -m benchmarks.delays [--countdown 100]``: two services with real workers
on a private broker. Prints, for an event that fails four times, each wait beside the declared
delay; the wait of ``self.retry(countdown=100)``; and how often three handlers of one event in
two services were called when one of them fails three times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import django
from celery import Celery
from django.conf import settings

from .ground import Ground
from .processes import Child, until
from .programs.given import BROKER, GIVEN

SERVICE = GIVEN.get("service", "alpha")
LEDGER = Path(GIVEN.get("ledger", os.devnull))
#: Calls of the failing handler for each of three events, and of the two healthy handlers.
CALLS = 5 + 4 + 2 + 2 * 3

settings.configure(
    SECRET_KEY="of a benchmark",
    USE_TZ=True,
    INSTALLED_APPS=["django_amqp_events"],
    AMQP_EVENTS={"SERVICE": SERVICE, "PUBLISH": "immediate", "TOPOLOGY": "auto"},
)
app = Celery("delays", broker=BROKER)
app.conf.update(
    broker_channel_error_retry=True, worker_cancel_long_running_tasks_on_connection_loss=True
)
app.set_default()
django.setup()

from django_amqp_events import event  # noqa: E402 - needs Django's settings


@event("bench.happened")
def happened(case: str, countdown: int = 0) -> None:
    """Case ``four`` fails four times, ``three`` three times, ``later`` requests a countdown."""


def note(task: Any, case: str) -> None:
    with LEDGER.open("a") as ledger:
        ledger.write(json.dumps([time.time(), case, task.name, task.event.attempt]) + "\n")


if SERVICE == "alpha":

    @happened.handler(name="alpha.failing", bind=True, max_retries=5)
    def failing(self: Any, case: str, countdown: int) -> None:
        note(self, case)
        if self.event.attempt <= {"four": 4, "three": 3}.get(case, 0):
            raise ValueError(case)
        if case == "later" and self.event.attempt == 1:
            self.retry(countdown=countdown)

    @happened.handler(name="alpha.healthy", bind=True)
    def healthy(self: Any, case: str) -> None:
        note(self, case)

else:

    @happened.handler(name="beta.healthy", bind=True)
    def other_service(self: Any, case: str) -> None:
        note(self, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--countdown", type=int, default=100, help="seconds (100)")
    countdown = parser.parse_args().countdown
    with ExitStack() as stack:
        ground = Ground(stack)
        ledger = ground.path("ledger")
        ledger.touch()
        app.conf.broker_url = ground.node.amqp_url()
        given = {"broker": app.conf.broker_url, "ledger": str(ledger)}
        workers = []
        for service in ("alpha", "beta"):
            command = [sys.executable, "-m", "celery", "-A", "benchmarks.delays", "worker"]
            command += ["-c", "1", "-l", "INFO", "-n", f"{service}@%h"]
            log = ground.path(f"{service}.log")
            workers.append(worker := Child(command, {**given, "service": service}, log))
            stack.callback(worker.stop)
        until(lambda: all("consuming" in each.said() for each in workers), 60, "workers consume")
        happened.publish(case="four")
        happened.publish(case="three")
        happened.publish(case="later", countdown=countdown)
        until(lambda: len(calls(ledger)) >= CALLS, countdown + 60, "all handlers were called")
        report(calls(ledger), countdown)


def calls(ledger: Path) -> list[Any]:
    return [json.loads(line) for line in ledger.read_text().splitlines()]


def report(lines: list[Any], countdown: int) -> None:
    def waits(case: str) -> list[float]:
        times = [at for at, name, handler, _ in lines if (name, handler) == (case, "alpha.failing")]
        return [round(later - at, 3) for at, later in itertools.pairwise(times)]

    print("declared  measured, seconds")
    for declared, measured in zip((1, 2, 4, 8), waits("four"), strict=True):
        print(f"{declared:8}  {measured:.3f}")
    print(f"{countdown:8}  {waits('later')[0]:.3f}   (countdown={countdown})")
    print("\nthree handlers of one event in two services, the first fails three times:")
    for handler in ("alpha.failing", "alpha.healthy", "beta.healthy"):
        calls = sum(1 for _, case, name, _ in lines if (case, name) == ("three", handler))
        print(f"  {handler:14} called {calls}x")


if __name__ == "__main__":
    main()
