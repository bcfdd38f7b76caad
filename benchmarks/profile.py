"""Where the time goes: ``python -m benchmarks.profile publish|handle|retry``.

Profiles the hot path of the project (or, with ``--plain``, of plain Celery) with cProfile: a
process that publishes one by one or with ``--many``, or a worker that drains a backlog, main
process and pool separately (``--pool prefork|solo``). Prints the entries with the most own time, or
with the most cumulative time (``--cumulative``), in microseconds per event. cProfile makes calls
two to three times slower, and small functions more than large ones: read shares, not rates.
"""

from __future__ import annotations

import argparse
import pstats
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import results
from .ground import Ground, counted
from .measured import OURS, PLAIN
from .processes import ROOT, until
from .rows.handling import PROJECT, SERVICES

_WAITS = {
    "<method 'poll' of 'select.epoll' objects>",
    "<method 'acquire' of '_thread.lock' objects>",
    "<built-in method posix.waitpid>",
    "<built-in method time.sleep>",
}
#: Functions of an idle process, which are not part of the time per event.
WAITS = {
    "publisher": set[str](),
    "main": _WAITS,
    # The thread that answers for the process's health waits for questions.
    "thread": {*_WAITS, "<method '_accept' of '_socket.socket' objects>"},
    # A pool process also waits while it reads its next job.
    "child": {*_WAITS, "<built-in method posix.read>"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("path", choices=("publish", "handle", "retry"))
    parser.add_argument("--number", type=int, default=5000, help="number of events (5000)")
    parser.add_argument("--top", type=int, default=30, help="number of entries (30)")
    parser.add_argument("--cumulative", action="store_true", help="sort by cumulative time")
    parser.add_argument("--plain", action="store_true", help="profile plain Celery")
    parser.add_argument("--many", action="store_true", help="publish_many instead of single calls")
    parser.add_argument("--pool", choices=("prefork", "solo"), default="prefork")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="store the raw profiles")
    options = parser.parse_args(arguments)
    who = PLAIN if options.plain else OURS
    with ExitStack() as stack:
        ground = Ground(stack)
        folder = options.keep.resolve() if options.keep else ground.path("profiles")
        folder.mkdir(parents=True, exist_ok=True)
        if options.path == "publish":
            publishing(ground, who, options, folder)
        else:
            draining(ground, who, options, folder)
        print(f"{options.path}, {who}, {options.number:,} events, code {results.code()}, "
              f"RabbitMQ {ground.node.version}, {results.machine()}")  # fmt: skip
        report(
            folder, options.number, options.top, "cumulative" if options.cumulative else "tottime"
        )
    return 0


def publishing(ground: Ground, who: str, options: Any, folder: Path) -> None:
    """Profile a process that publishes."""
    _, publisher = SERVICES[who]
    vhost = ground.vhost("profile")
    program = ground.program(publisher, vhost, profiles=str(folder), **_project(who))
    (queue,) = program.ask("declare")["queues"]
    do = "many" if options.many and who == OURS else "one_by_one"
    program.ask(do, number=100)
    vhost.expect(100, queue)
    program.ask("profiled", command=do, number=options.number)
    vhost.expect(100 + options.number, queue)


def draining(ground: Ground, who: str, options: Any, folder: Path) -> None:
    """Profile a worker that drains a backlog."""
    service, publisher = SERVICES[who]
    vhost = ground.vhost("profile")
    tally = ground.tally()
    retry = options.path == "retry"
    calls = options.number * (2 if retry else 1)
    words = {
        **_project(who), "work": "fail_once" if retry else "nothing", "tally": str(tally.path),
        "profiles": str(folder),
    }  # fmt: skip
    program = ground.program(publisher, vhost, **words)
    (queue,) = program.ask("declare")["queues"]
    program.ask("one_by_one", number=1)
    template = vhost.take(queue)
    program.kill()
    vhost.fill([template], options.number)
    worker = ground.worker(
        service, vhost, pool=options.pool, number=1 if options.pool == "solo" else 2,
        program="benchmarks.programs.profiled", **words,
    )  # fmt: skip
    until(lambda: tally.count >= calls, 600, "all are handled", alive=worker)
    counted(tally, calls, vhost, worker, queue)


def _project(who: str) -> dict[str, Any]:
    return dict(PROJECT) if who == PLAIN else {}


def report(folder: Path, number: int, top: int, order: str) -> None:
    """Print the profiles of a folder, those of a pool's processes together."""
    for kind, title in (
        ("publisher", "the publishing process"),
        ("main", "the worker's main process"),
        ("thread", "its other threads, together"),
        ("child", "the pool's processes, together"),
    ):
        paths = [str(path) for path in sorted(folder.glob(f"{kind}-*"))]
        if not paths:
            continue
        stats = pstats.Stats(*paths)
        entries = stats.stats  # type: ignore[attr-defined]
        waited = sum(entry[2] for (*_, name), entry in entries.items() if name in WAITS[kind])
        total: float = stats.total_tt - waited  # type: ignore[attr-defined]
        if total / number < 5e-6:
            continue  # an idle thread
        print(f"\n{title}: {total / number * 1e6:,.0f} µs per event")
        print(f"{'µs/event':>9} {'share':>6} {'calls/event':>11}  "
              f"{'own time' if order == 'tottime' else 'cumulative time'}")  # fmt: skip
        column = 2 if order == "tottime" else 3
        busy = [item for item in entries.items() if item[0][2] not in WAITS[kind]]
        ranked = sorted(busy, key=lambda item: -item[1][column])[:top]
        for (file, line, function), entry in ranked:
            print(f"{entry[column] / number * 1e6:9.1f} {entry[column] / total:6.1%} "
                  f"{entry[1] / number:11.2f}  {place(file, line, function)}")  # fmt: skip


def place(file: str, line: int, function: str) -> str:
    """Return the name of a function without a path of this machine."""
    if file == "~":
        return function
    path = Path(file)
    if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
        return f"{path.relative_to(ROOT)}:{line} {function}"
    for mark in ("site-packages", f"python{sys.version_info.major}.{sys.version_info.minor}"):
        if mark in path.parts:
            at = len(path.parts) - path.parts[::-1].index(mark)
            return f"{Path(*path.parts[at:])}:{line} {function}"
    return f"{path.name}:{line} {function}"


if __name__ == "__main__":
    sys.exit(main())
