"""The child's half of :class:`benchmarks.processes.Program`: commands in, answers out, as JSON
lines.

Nothing but the standard library: it is imported in the peers' virtual environment too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def serve(**commands: Callable[..., dict[str, Any]]) -> None:
    """Answer commands until standard input ends."""
    # Output of a library must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = commands[asked.pop("do")](**asked)
        print(json.dumps(answer), file=answers, flush=True)


def at_a_pace(number: int, rate: float) -> Iterator[int]:
    """Count to *number*, *rate* times a second; without a pause if *rate* is 0."""
    begin = time.monotonic()
    for n in range(number):
        if rate and (wait := begin + n / rate - time.monotonic()) > 0:
            time.sleep(wait)
        yield n


@contextmanager
def timed() -> Iterator[dict[str, Any]]:
    """Measure a block: wall-clock seconds, and CPU seconds of this process."""
    answer: dict[str, Any] = {}
    cpu, began = time.process_time(), time.perf_counter()
    yield answer
    answer["seconds"] = time.perf_counter() - began
    answer["cpu"] = time.process_time() - cpu
