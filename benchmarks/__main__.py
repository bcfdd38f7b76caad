"""``python -m benchmarks [names] [--short] [--rounds N]``: measure, and write RESULTS.md.

``make bench``, ``make bench ARGS="publish handle"``, ``make bench ARGS=--short``. Each benchmark
replaces its part of RESULTS.md and results.json; the rest stays. It appends its figures to
history.jsonl and prints those that differ from the last run on the same machine and RabbitMQ.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from machine import ScriptError

from . import results
from .ground import Ground
from .measured import Size
from .rows import benchmarks


def main() -> int:
    known = benchmarks()
    parser = argparse.ArgumentParser(prog="make bench", description="Run benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, help="turns of each participant")
    parser.add_argument(
        "--short", action="store_true", help="seconds for each, without peers; writes nothing"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor of all numbers of messages, to try it (1)"
    )
    parser.add_argument(
        "--elsewhere",
        metavar="PLACE",
        help="name of another machine or system than RESULTS.md's, where only the ratios go",
    )
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    options = parser.parse_args()
    if options.list:
        for each in known.values():
            print(f"{each.name:10} {each.title}")
        return 0
    if unknown := set(options.names) - set(known):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}. Choose from "
                     f"{', '.join(known)}.")  # fmt: skip
    size = Size(short=options.short, rounds=options.rounds, scale=options.scale)
    names = options.names or [name for name, each in known.items() if each.brief or not size.short]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wrong = 0
    print(results.machine(), flush=True)
    for name in names:
        benchmark = known[name]
        print(f"\n{name}: {benchmark.title}", flush=True)
        began = time.monotonic()
        # A new node: what an earlier benchmark has left, such as idle queues, costs time.
        with ExitStack() as stack:
            ground = Ground(stack)
            try:
                measured = benchmark.run(ground, size, _tell)
            except ScriptError as exc:
                # A wrong count is an error; the other benchmarks still run.
                wrong += 1
                print(f"  NOT MEASURED: {exc}", flush=True)
                continue
            result = results.entry(
                name=name,
                title=benchmark.title,
                about=benchmark.about,
                at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                seconds=round(time.monotonic() - began),
                versions={**ground.versions, **results.versions(options.elsewhere)},
                measured=measured,
            )
            for found in measured:
                for line in results.told(found):
                    print(line, flush=True)
            if not (size.short or size.scale != 1):
                # Now: a later benchmark may fail.
                for line in results.record(result):
                    print(f"  {line}", flush=True)
                kept: dict[str, Any] = {} if options.elsewhere else {name: result}
                results.keep({**results.load(), **kept}, known)
    return 1 if wrong else 0


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
