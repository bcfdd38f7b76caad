"""Let random faults overlap, and check what became of every event.

    make soak ARGS="--minutes 10 --seed 7"        one seed
    make soak ARGS="--minutes 60 --runs 6"        six runs of ten minutes, with consecutive seeds
    make soak ARGS="--seed 7 --show"              the schedule of a seed

A run that fails prints its seed; its ledgers and logs are kept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django  # noqa: E402

from broker import Node  # noqa: E402 - in scripts/
from suite import MEMORY, is_roomy  # noqa: E402
from tests import forked  # noqa: E402
from tests.conftest import SERVERS  # noqa: E402
from tests.faults.world import Grounds, world  # noqa: E402

from . import disks  # noqa: E402
from .schedule import Step, schedule  # noqa: E402
from .soaking import Result, soak  # noqa: E402

#: Of what is wrong in a run.
SHOWN: Final = 20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3, help="Of faults; 3 by default.")
    parser.add_argument("--runs", type=int, default=1, help="Divide the minutes into as many runs.")
    parser.add_argument("--seed", type=int, help="Of the first run; a new one by default.")
    parser.add_argument("--steps", help="Only these steps of the schedule: 3,7,12")
    parser.add_argument("--show", action="store_true", help="Print the schedule and end.")
    parser.add_argument("--database", choices=("sqlite", *SERVERS), default="postgresql")
    parser.add_argument("--cluster", action="store_true", help="On a cluster of three nodes.")
    given = parser.parse_args(arguments)
    if given.runs < 1 or given.minutes <= 0:
        parser.error("--runs and --minutes must be positive")
    seconds = given.minutes * 60 / given.runs
    first = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    seeds = range(first, first + given.runs)
    wanted = None
    if given.steps is not None:
        wanted = {int(number) for number in given.steps.split(",") if number}
        for seed in seeds:
            if unknown := wanted - {step.number for step in schedule(seed, seconds)}:
                parser.error(f"--steps: seed {seed} has no {', '.join(map(str, sorted(unknown)))}")
    if given.show:
        for seed in seeds:
            print(*chosen(seed, seconds, wanted), sep="\n")
        return 0
    # The texts of the package's errors are translated, which needs Django's registry.
    django.setup()
    memory = MEMORY if "TMPDIR" not in os.environ and is_roomy(MEMORY) else None
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir=memory))
    disk = directory / "database"
    mounted = disks.mount(disk)
    directory.chmod(0o711)  # the database server has a user of its own
    server = forked.start_server(directory)
    grounds = Grounds(directory, kind=given.database, disk=disk if mounted else None)
    results: list[Result] = []
    try:
        if grounds.server is not None and mounted:
            grounds.server.execute(*disks.SERVERS.get(given.database, ()))
        nodes = grounds.cluster() if given.cluster else [grounds.node]
        print(f"RabbitMQ {nodes[0].version}, {len(nodes)} nodes, {grounds.kind}", flush=True)
        for seed in seeds:
            steps = chosen(seed, seconds, wanted)
            results.append(run(grounds, nodes, seed, steps, seconds))
    finally:
        grounds.end()
        assert server.stdin is not None
        server.stdin.close()
        failed = [result.seed for result in results if result.wrong] or len(results) < given.runs
        disks.unmount(disk)
        if failed:
            print(f"Ledgers and logs: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if given.runs > 1:
        print(f"{given.runs} runs: {verdict(results)}")
    return 1 if failed else 0


def chosen(seed: int, seconds: float, wanted: Collection[int] | None) -> Sequence[Step]:
    """Return a seed's schedule, or those of its steps."""
    steps = schedule(seed, seconds)
    return steps if wanted is None else [step for step in steps if step.number in wanted]


def run(
    grounds: Grounds,
    nodes: Sequence[Node],
    seed: int,
    steps: Sequence[Step],
    seconds: float,
) -> Result:
    """Run a schedule and print what became of it."""
    print(again(grounds, nodes, seed, seconds, steps), flush=True)
    with world(grounds, name="soak", events=0, seed=str(seed), nodes=nodes) as here:
        result = soak(
            here, nodes, seed, steps, seconds, lambda line: print(f"  {line}", flush=True)
        )
    print("  " + "; ".join(result.sizes))
    if result.story:
        print(f"  {result.wrong[0].event}:", *result.story, sep="\n  ")
    for each in result.wrong[:SHOWN]:
        print(f"  WRONG: {each}")
    if len(result.wrong) > SHOWN:
        print(f"  WRONG: and {len(result.wrong) - SHOWN} more")
    print(f"seed {seed}, {seconds / 60:g} min, {grounds.kind}: {verdict([result])}", flush=True)
    return result


def again(
    grounds: Grounds, nodes: Sequence[Node], seed: int, seconds: float, steps: Sequence[Step]
) -> str:
    """Return the command that repeats a run."""
    words = f"--minutes {seconds / 60:.4g} --seed {seed} --database {grounds.kind}"
    if len(nodes) > 1:
        words += " --cluster"
    if len(steps) < len(schedule(seed, seconds)):
        words += f" --steps={','.join(str(step.number) for step in steps)}"
    return f'make soak ARGS="{words}"'


def verdict(results: Sequence[Result]) -> str:
    """Add up the figures of runs."""
    total: Counter[str] = Counter()
    came: Counter[str] = Counter()
    for result in results:
        total.update(asdict(result.figures))
        total["wrong"] += len(result.wrong)
        came += result.came
    faults = ", ".join(f"{number} {fault}" for fault, number in came.most_common())
    return (
        f"{total['pairs']:,} pairs, {came.total()} faults ({faults}); "
        f"{total['handled']:,} handled, {total['archived']} archived, "
        f"{total['discarded']} discarded, {total['lost']} lost, "
        f"{total['doubled']} doubled, {total['early']} early, {total['stuck']} stuck, "
        f"{total['left']} left behind; {total['runs']:,} runs, {total['repeated']} repeated, "
        f"{total['replays']} replays, {total['decisions']} by operators: "
        + (f"{total['wrong']} WRONG" if total["wrong"] else "right")
    )


if __name__ == "__main__":
    sys.exit(main())
