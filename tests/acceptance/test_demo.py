"""`make demo`, as a user runs it: what it says is so, and nothing is left of it."""

from __future__ import annotations

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

from tests.conftest import Vhost

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
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


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
    child = start("--orders", "75")
    out, _ = child.communicate(timeout=240)
    assert child.returncode == 0, out
    sums = re.search(
        r"(\d+) accepted - (\d+) handled - (\d+) archived - (\d+) waiting = lost 0", out
    )
    assert sums, out
    accepted, handled, archived, waiting = map(int, sums.groups())
    assert accepted == handled + archived
    assert waiting == 0
    assert archived == 2
    # A handler's own failures, and nobody else's: these fail for good in the first 75 lines.
    assert "TaxError: there is no tax rate for the country 'ZZ'" in out
    assert re.search(r"register_sale .*exhausted +4 +TaxOfficeUnavailable", out), out
    assert "the customer has no email" in out
    assert re.search(r"all \d+ retries: none early", out), out
    waited = re.findall(r"(\d) s +(\d+\.\d+) s", out.partition("One event and its schedule")[2])
    assert [int(declared) for declared, _ in waited] == [1, 2, 4]
    assert all(float(seconds) >= int(declared) for declared, seconds in waited), out
    assert "none is left" in out
    assert ours() == {}


@pytest.mark.parametrize("moment", ["broker ", "workers "])
def test_an_interrupted_demo_leaves_nothing(start: Start, moment: str) -> None:
    child = start()
    wait_for(child, moment)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130
    assert ours() == {}


def test_a_killed_demo_leaves_nothing(start: Start) -> None:
    child = start()
    wait_for(child, "orders ")
    child.kill()
    child.wait()
    assert eventually_nothing(), ours()


def test_a_broker_that_is_away_is_named_with_a_remedy(start: Start) -> None:
    child = start(AMQP_URL="amqp://nobody:nothing@127.0.0.1:1/")
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 2
    assert "Remedy: correct AMQP_URL" in out
    assert "Traceback" not in out


def test_a_kept_demo_on_the_broker_of_others_is_cleared_away_by_stop(
    start: Start, fresh_vhost: Vhost
) -> None:
    """Without a management API there is no vhost of its own, so it stays below a prefix."""
    child = start("--keep", "--orders", "5", AMQP_URL=fresh_vhost.url)
    out, _ = child.communicate(timeout=240)
    try:
        assert child.returncode == 0, out
        assert "prefix demo-" in out
        assert "make demo ARGS=--stop" in out
        second = start()
        second.communicate(timeout=60)
        assert second.returncode == 2
        assert ours(), "the second one must not have ended it"
    finally:
        stopped = start("--stop")
        stopped.communicate(timeout=60)
    assert stopped.returncode == 0
    assert eventually_nothing(), ours()
    node = fresh_vhost.node
    queues = node.http("GET", f"/api/queues/{fresh_vhost.path}?columns=name")
    exchanges = node.http("GET", f"/api/exchanges/{fresh_vhost.path}?columns=name")
    left = [one["name"] for one in [*queues, *exchanges] if one["name"].startswith("demo-")]
    assert left == []
