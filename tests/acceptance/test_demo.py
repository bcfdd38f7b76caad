"""`make demo`, as a user runs it: what it says is so, and nothing is left of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "example_project.demo"]
RUN = ROOT / ".run" / "demo"

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("demo")]

Start = Callable[..., "subprocess.Popen[str]"]


def environment(**more: str) -> dict[str, str]:
    """Without AMQP_URL: the demo has a node of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AMQP_", "DJANGO_"))}
    return kept | more


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **more: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=ROOT,
            env=environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(child)
        return child

    yield begin
    for child in running:
        if child.poll() is None:
            child.kill()
        child.communicate()


def ours() -> dict[int, str]:
    """Processes that belong to a demo of this checkout: by their environment or command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if str(RUN).encode() in text and state not in "ZX":
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


def eventually_nothing() -> bool:
    deadline = time.monotonic() + 15
    while ours() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not ours()


def wait_for(child: subprocess.Popen[str], text: str) -> str:
    assert child.stdout is not None
    seen = ""
    for line in child.stdout:
        seen += line
        if text in line:
            return seen
    pytest.fail(f"{text!r} did not come:\n{seen}")


def test_everything_that_was_accepted_is_accounted_for(start: Start) -> None:
    child = start("--orders", "110")
    out, _ = child.communicate(timeout=240)
    assert child.returncode == 0, out
    sums = re.search(
        r"(\d+) accepted - (\d+) handled - (\d+) archived - (\d+) waiting = lost 0", out
    )
    assert sums, out
    accepted, handled, archived, waiting = map(int, sums.groups())
    assert accepted == handled + archived
    assert waiting == 0
    assert archived >= 3
    # A handler's own failures, and nobody else's: these fail for good in the first 110 lines.
    assert "TaxError: there is no tax rate for the country 'ZZ'" in out
    assert re.search(r"register_sale .*exhausted +4 +TaxOfficeUnavailable", out), out
    assert "the customer has no email" in out
    assert re.search(r"all \d+ retries: none early", out), out
    assert "none is left" in out
    assert ours() == {}


def test_the_delays_of_an_event_are_those_of_its_schedule(start: Start) -> None:
    child = start("--orders", "90")
    out, _ = child.communicate(timeout=240)
    assert child.returncode == 0, out
    table = out.partition("One event and its schedule")[2]
    waited = re.findall(r"(\d) s +(\d+\.\d+) s", table)
    assert [int(declared) for declared, _ in waited] == [1, 2, 4]
    assert all(float(seconds) >= int(declared) for declared, seconds in waited), table


@pytest.mark.parametrize("moment", ["broker ", "topology ", "orders "])
def test_an_interrupted_demo_leaves_nothing(start: Start, moment: str) -> None:
    child = start()
    wait_for(child, moment)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130
    assert ours() == {}


def test_a_killed_demo_leaves_nothing(start: Start) -> None:
    child = start()
    wait_for(child, "workers ")
    child.kill()
    child.communicate()
    assert eventually_nothing(), ours()


def test_a_broker_that_is_away_is_named_with_a_remedy(start: Start) -> None:
    child = start(AMQP_URL="amqp://nobody:nothing@127.0.0.1:1/")
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 2
    assert "Remedy: correct AMQP_URL" in out
    assert "Traceback" not in out


def test_a_kept_demo_is_found_again_and_ended(start: Start) -> None:
    child = start("--keep", "--orders", "10")
    out, _ = child.communicate(timeout=240)
    try:
        assert child.returncode == 0, out
        assert "make demo ARGS=--stop" in out
        kept = json.loads((RUN / "kept.json").read_text())
        assert len(kept["workers"]) == 2
        second = start()
        second.communicate(timeout=60)
        assert second.returncode == 2
        assert ours(), "the second one must not have ended it"
    finally:
        stopped = start("--stop")
        stopped.communicate(timeout=60)
    assert stopped.returncode == 0
    assert eventually_nothing(), ours()


def test_on_a_broker_of_others_it_clears_away_what_it_made(start: Start, fresh_vhost) -> None:
    """Without the right to make a vhost it stays below a prefix, and takes it away again."""
    node = fresh_vhost.node
    # No management API that answers: as for a user who has no access to it.
    child = start(
        "--orders", "10", AMQP_URL=fresh_vhost.url, AMQP_MANAGEMENT_URL="http://127.0.0.1:1"
    )
    out, _ = child.communicate(timeout=240)
    assert child.returncode == 0, out
    assert "prefix demo-" in out
    queues = node.http("GET", f"/api/queues/{fresh_vhost.path}?columns=name")
    exchanges = node.http("GET", f"/api/exchanges/{fresh_vhost.path}?columns=name")
    left = [one["name"] for one in [*queues, *exchanges] if one["name"].startswith("demo-")]
    assert left == []
