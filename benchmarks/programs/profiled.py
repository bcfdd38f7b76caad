"""Run Celery's worker with a profiler in its main process and in each process of its pool.

``python -m benchmarks.programs.profiled -A … worker …``. At its end, the worker writes the files
``main-PID``, ``thread-PID-N`` and ``child-PID`` in the folder ``profiles``.
"""

from __future__ import annotations

import cProfile
import os
import sys
import threading
from pathlib import Path
from typing import Any

from celery import signals
from celery.__main__ import main

from .given import GIVEN

_here: dict[str, cProfile.Profile] = {}
_threads: list[cProfile.Profile] = []


def begin(name: str) -> None:
    """Profile this process from now on."""
    _here[name] = cProfile.Profile()
    _here[name].enable()


def end(name: str) -> None:
    """Write the profile of this process."""
    if profile := _here.pop(name, None):
        profile.disable()
        profile.dump_stats(Path(GIVEN["profiles"]) / f"{name}-{os.getpid()}")


def _in_thread(*_: Any) -> None:
    """Profile a thread: retries are published by one. Since Python 3.12 there is one profiler."""
    sys.setprofile(None)
    profile = cProfile.Profile()
    try:
        profile.enable()
    except ValueError:
        return
    _threads.append(profile)


@signals.worker_process_init.connect
def _in_child(**_: Any) -> None:
    # The parent's profiler came with the fork.
    threading.setprofile(None)
    _threads.clear()
    if parent := _here.pop("main", None):
        parent.disable()
    begin("child")


@signals.worker_process_shutdown.connect
def _child_ends(**_: Any) -> None:
    end("child")


@signals.worker_ready.connect
def _ready(**_: Any) -> None:
    # Without the start-up.
    begin("main")


if __name__ == "__main__":
    threading.setprofile(_in_thread)
    try:
        sys.exit(main())
    finally:
        threading.setprofile(None)
        end("main")
        for number, each in enumerate(_threads):
            each.dump_stats(Path(GIVEN["profiles"]) / f"thread-{os.getpid()}-{number}")
