"""An event whose worker the kernel kills for its memory, among healthy ones.

``python -m benchmarks.poison [--events 1000]``: two prefork workers and a reaper on a private
broker; the event is in the middle of the others. Prints the handled and archived events, the
seconds, the kernel's kills and the restarts of workers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

from .ground import Ground

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
EVENT = "core.act"
QUEUE = "core.testproject.act"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--events", type=int, default=1_000, help="number of healthy events")
    events = parser.parse_args().events
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


def ended(core: Any) -> set[str]:
    return {line["event"] for line in core.ledger(what="end")}


if __name__ == "__main__":
    main()
