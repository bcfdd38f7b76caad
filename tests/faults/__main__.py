"""Run the fault table and write docs/faults.md.

    make faults                                    all rows, a few minutes for every ten
    make faults ARGS="--events 200 child-within"   some of them
    make faults ARGS="--list"

Results are stored in docs/faults/ by broker version and database; the page is written from all of
them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
# Ten times the suite's events, perhaps beside the same table on two other brokers.
os.environ.setdefault("AMQP_EVENTS_FAULT_SECONDS", "600")

import django  # noqa: E402

from tests.conftest import SERVERS  # noqa: E402

from . import all_rows, report  # noqa: E402 - scripts/ has the broker
from .running import Result, run  # noqa: E402
from .world import Grounds  # noqa: E402

#: Published in a row of the table; twice as many units.
EVENTS = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make faults", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="row", help="Names; all rows by default.")
    parser.add_argument("--events", type=int, default=EVENTS, help=f"Per row; {EVENTS} by default.")
    parser.add_argument("--seed", default="1", help="Random seed; 1 by default.")
    parser.add_argument("--database", choices=("sqlite", *SERVERS), default="postgresql")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="docs/ by default.")
    parser.add_argument(
        "--keep", action="store_true", help="Keep ledgers and logs, and print their path."
    )
    parser.add_argument("--list", action="store_true", help="The rows' names.")
    given = parser.parse_args(arguments)
    rows = all_rows()
    if given.list:
        print(*(f"{row.name:32} {row.title}" for row in rows.values()), sep="\n")
        return 0
    if unknown := [name for name in given.rows if name not in rows]:
        parser.error(f"no row is called {', '.join(unknown)}; --list names them all")
    # The texts of the package's errors are translated, which needs Django's registry.
    django.setup()
    directory = Path(tempfile.mkdtemp(prefix="faults-"))
    grounds = Grounds(directory, kind=given.database)
    results: list[Result] = []
    began = time.monotonic()
    try:
        print(f"RabbitMQ {grounds.node.version}, {grounds.kind}, {given.events} events in a row")
        for name in given.rows or rows:
            result = run(rows[name], grounds, events=given.events, seed=given.seed)
            print(report.line(result), flush=True)
            results.append(result)
            # After each: what was measured stays if the machine goes.
            report.keep(given.output, grounds, result, seed=given.seed)
    finally:
        grounds.end()
        if given.keep:
            print(f"Ledgers and logs: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    page = report.write(given.output)
    bad = [result.row for result in results if not result.held]
    print(
        f"{len(results) - len(bad)} of {len(results)} rows held in "
        f"{time.monotonic() - began:.0f} s; see {page.name}"
    )
    if bad:
        print(f"Not held: {', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
