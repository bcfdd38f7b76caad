"""An event whose worker the kernel kills for its memory, among healthy ones.

``python -m benchmarks.poison [--events 1000]``: two prefork workers and a reaper on a private
broker; the event is in the middle of the others. Prints the handled and archived events, the
seconds, the kernel's kills and the restarts of workers.

``python -m benchmarks.poison --isolate 200``: this many poison events and as many healthy ones are
in the graveyard, and a companion isolates them. Prints the seconds and the events per second.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from .ground import Ground

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
EVENT = "core.act"
QUEUE = "core.testproject.act"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--events", type=int, default=1_000, help="number of healthy events")
    parser.add_argument("--isolate", type=int, help="number of isolated events of each kind")
    options = parser.parse_args()
    if options.isolate:
        isolate(options.isolate)
        return
    events = options.events
    from tests.acceptance.cgroup import memory_limit
    from tests.acceptance.harness import (
        Archive,
        Eyes,
        Service,
        until,
    )
    from tests.acceptance.isolation import Supervisor, reaper

    with memory_limit(64_000_000) as limit, ExitStack() as stack:
        if limit is None:
            sys.exit("No memory control group can be created here. Run it as root.")
        ground = Ground(stack)
        ground.node.add_vhost("poison")
        eyes = Eyes(ground.node, "poison")
        stack.callback(eyes.close)
        core = Service(
            url=eyes.url,
            where=ground.folder / "core",
            environ={"TESTPROJECT_CGROUP": str(limit.path)},
        )
        core.declare()
        workers = [Supervisor(lambda: core.worker("prefork", 2, "-Q", QUEUE)) for _ in "12"]
        beside = Supervisor(lambda: reaper(core))
        archive = Archive(eyes)
        for each in (*workers, beside):
            stack.callback(each.kill)
        until(lambda: eyes.consumers(QUEUE) == 2, 60, "two workers consume")
        began = time.monotonic()
        half = [eyes.message(EVENT, {"plan": ["ok"]}) for _ in range(events // 2)]
        deadly = eyes.message(EVENT, {"plan": ["oom"]})
        rest = [eyes.message(EVENT, {"plan": ["ok"]}) for _ in range(events - len(half))]
        eyes.send(*half, deadly, *rest)
        good = {message.event_id for message in (*half, *rest)}
        handled = archived = 0.0
        while not (handled and archived):
            passed = time.monotonic() - began
            if passed > 300:
                break
            handled = handled or (passed if ended(core) >= good else 0.0)
            archived = archived or (passed if archive.of(deadly.event_id) else 0.0)
            time.sleep(0.1)
        again = sum(each.deaths for each in workers)
        reason = {entry["reason"] for entry in archive.of(deadly.event_id)}
        print(f"RabbitMQ {ground.node.version}, 2 workers (prefork 2) and a reaper")
        print(f"{len(ended(core) & good):,} of {events:,} healthy handled in {handled:.1f} s")
        print(f"{len(archive.collect())} archived ({', '.join(reason)}) after {archived:.1f} s")
        print(f"{limit.kills} kills by the kernel; {again} restarts of workers, "
              f"{beside.deaths} of the reaper")  # fmt: skip
        twice = len(core.ledger(what="end")) - len(ended(core))
        print(f"{twice} healthy ones ran to their end twice")


def isolate(number: int) -> None:
    """Measure how fast isolated events are run alone."""
    from django_amqp_events.message import headers
    from tests.acceptance.harness import Archive, Eyes, Service, Worker, until

    with ExitStack() as stack:
        ground = Ground(stack)
        ground.node.add_vhost("isolate")
        eyes = Eyes(ground.node, "isolate")
        stack.callback(eyes.close)
        core = Service(url=eyes.url, where=ground.folder / "core")
        core.declare()
        archive = Archive(eyes)
        for kind, plan in (("poison", "kill"), ("healthy", "ok")):
            messages = []
            for _ in range(number):
                made = eyes.message(EVENT, {"plan": [plan]})
                # As a retry that returns to the graveyard.
                isolated = {**made.headers, headers.EVENT_HANDLER: "testproject.act"}
                messages.append(
                    replace(made, exchange="core:return", routing_key="core:graveyard",
                            headers=isolated)
                )  # fmt: skip
            eyes.send(*messages)
            found = {message.event_id for message in messages}
            path = ground.folder / "companion.log"
            with path.open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "django", "events_companion", "--no-mirror"],
                    env=core.env(), cwd=core.where, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            companion = Worker(process, path, "companion")
            stack.callback(companion.kill)
            began = time.monotonic()

            def done(found: set[str] = found) -> bool:
                archived = {entry["event_id"] for entry in archive.collect()}
                return archived | ended(core) >= found

            until(done, 60 + 10 * number, "all are isolated")
            seconds = time.monotonic() - began
            print(f"{number} {kind} events isolated in {seconds:.1f} s, "
                  f"{number / seconds:.1f} per second, with the start of the reaper")  # fmt: skip
            companion.stop()
        runs = len(core.ledger(what="start"))
        reasons = Counter(entry["reason"] for entry in archive.collect())
        print(f"{runs} runs, archived: {dict(reasons)}; left: "
              f"{sum(eyes.totals('core').values())}")  # fmt: skip


def ended(core: Any) -> set[str]:
    return {line["event"] for line in core.ledger(what="end")}


if __name__ == "__main__":
    main()
