"""The project's Celery app: configured as a user's would be, and by TESTPROJECT_CELERY."""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_init
from kombu import Exchange, Queue

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")

PR_SET_PDEATHSIG = 1  # prctl(2)
# A suite that was killed stops no worker any more; its children see the closed pipe.
if not os.environ.get("TESTPROJECT_OUTLIVES"):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

if given := os.environ.get("TESTPROJECT_DESCRIPTORS"):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(given), int(given)))

app = Celery("testproject", broker=os.environ["TESTPROJECT_BROKER"])
app.conf.update(
    broker_channel_error_retry=True,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    worker_hijack_root_logger=True,
    task_default_queue="ordinary",
    # A worker that dies must not take its log lines with it.
    worker_redirect_stdouts=False,
    # Seconds until a lost pool process is one; Celery's default is ten.
    worker_lost_wait=1,
)
given = json.loads(os.environ.get("TESTPROJECT_CELERY", "{}"))
quorum = given.pop("quorum_queues", None)
app.conf.update(**given)
if quorum:
    # A project with its own quorum queues: Celery's native delayed delivery still runs.
    app.conf.task_queues = [
        Queue(
            name, Exchange(name, type="topic"), routing_key=name,
            queue_arguments={"x-queue-type": "quorum"},
        )
        for name in quorum
    ]  # fmt: skip
app.autodiscover_tasks(["testproject"])
if tool := os.environ.get("TESTPROJECT_TELEMETRY"):
    getattr(importlib.import_module("testproject.telemetry"), tool)()
if "TESTPROJECT_STEP" in os.environ:
    from .consumers import Foreign

    app.steps["consumer"].add(Foreign)


@worker_init.connect
def _patch(**_: object) -> None:
    from django_amqp_events.signals import event_hanging

    event_hanging.connect(_hanging, weak=False)
    if "TESTPROJECT_SLOW_LOG" in os.environ:
        logging.getLogger("django_amqp_events.worker").addHandler(_SlowLog(logging.ERROR))
    _die_in_the_reaper(os.environ.get("TESTPROJECT_DIES", "").split())


class _SlowLog(logging.Handler):
    """Waits for a file with each record, as one that sends mail does for its server."""

    def emit(self, record: logging.LogRecord) -> None:
        from . import ledger

        ledger.write("logging", pid=os.getpid())
        while not Path(os.environ["TESTPROJECT_SLOW_LOG"]).exists():
            time.sleep(0.1)
        ledger.write("logged", pid=os.getpid())


def _hanging(
    sender: str, handler: str, event: object, seconds: float, pid: int, **_: object
) -> None:
    from . import ledger

    ledger.write("hanging", handler=handler, event=event.id, seconds=seconds, worker_pid=pid)  # type: ignore[attr-defined]


def _die_in_the_reaper(where: list[str]) -> None:
    """Kill the main process of a reaper while it reads a message (``reading``, ``forwarding``)."""
    from django_amqp_events.worker.reaper import ReaperStep

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_reading(step: ReaperStep, delivered: Any) -> None:
        if delivered.queue != step.names.dead:
            die()

    def die_slowly(step: ReaperStep, _: object) -> None:
        # So that its other queues are consumed in the meantime.
        step.c.timer.call_after(1.0, die)

    if "reading" in where:
        ReaperStep.handler_of = die_reading  # type: ignore[assignment, method-assign]
    if "forwarding" in where:
        ReaperStep._forward = die_slowly  # type: ignore[assignment, method-assign]
