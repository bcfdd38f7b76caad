"""Print the table of crash points: each path of an event, its effects and what was wrong.

python -m tests.acceptance.crash_points                    all paths on SQLite
python -m tests.acceptance.crash_points relay replay       some of them
python -m tests.acceptance.crash_points --database postgresql
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path as File

ROOT = File(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django  # noqa: E402

django.setup()

from broker import Node  # noqa: E402 - scripts/ has it
from tests import forked  # noqa: E402
from tests.conftest import SERVERS  # noqa: E402

from ..harness import Eyes, Service  # noqa: E402
from .paths import PATHS  # noqa: E402
from .scene import Scene, explore  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make crash-points", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [path.name for path in PATHS]
    parser.add_argument("paths", nargs="*", metavar="path", help=f"One of: {'; '.join(names)}.")
    parser.add_argument("--database", choices=("sqlite", *SERVERS), default="sqlite")
    parser.add_argument(
        "--commits", action="store_true", help="Not before and after a transaction's statements."
    )
    options = parser.parse_args()
    if unknown := {*options.paths} - {*names}:
        parser.error(f"no such path: {', '.join(sorted(unknown))}")
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="crash-points-") as name:
        directory = File(name)
        forks = forked.start_server(directory)
        node = Node.start(directory / "node")
        server = None if options.database == "sqlite" else SERVERS[options.database].start()
        try:
            print("| path | database | effects | points | wrong |")
            print("| --- | --- | --- | ---: | ---: |")
            for number, path in enumerate(PATHS):
                if options.paths and path.name not in options.paths:
                    continue
                vhost = f"path-{number}"
                node.add_vhost(vhost)
                eyes = Eyes(node, vhost)
                service = Service(
                    url=eyes.url, where=directory / vhost, name="crash", handlers="paired",
                    eyes=eyes, events={"MANAGEMENT_URL": node.management_url},
                )  # fmt: skip
                service.declare()
                outcome = explore(path, Scene(service, eyes, server), every=not options.commits)
                print(outcome, flush=True)
                for point, what in outcome.wrong.items():
                    print(f"WRONG: {point}: {what}", flush=True)
                wrong += len(outcome.wrong)
                eyes.close()
        finally:
            node.end()
            if server is not None:
                server.end()
            forks.communicate()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
