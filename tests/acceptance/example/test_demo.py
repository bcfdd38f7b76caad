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
from urllib.request import urlopen

import pytest

from example_project.demo.admin_user import AdminUser

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "example_project.demo"]
RUN = ROOT / ".run" / "demo"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("demo")]

Start = Callable[..., "subprocess.Popen[str]"]


def environment(**more: str) -> dict[str, str]:
    """Without AMQP_URL, the demo starts its own node."""
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


def account(out: str, archived: str) -> tuple[int, int, int]:
    """Accepted, handled and archived of the line that sums up; none waits, none is lost."""
    sums = re.search(
        rf"(\d+) accepted - (\d+) handled - (\d+) {archived} - 0 waiting = 0 lost\n", out
    )
    assert sums, out
    first, second, third = map(int, sums.groups())
    return first, second, third


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
    accepted, handled, archived = account(out, "archived")
    assert accepted == handled + archived
    assert archived == 2
    assert "Archived: 2 events in the services' databases" in out
    # Failures of the handler itself: these fail finally in the first 75 lines.
    assert "TaxError: there is no tax rate for the country 'HR'" in out
    assert re.search(r"register_sale .*exhausted +4 +TaxOfficeUnavailable", out), out
    assert "the customer has no email" in out
    assert re.search(r"all \d+ retries: none early", out), out
    waited = re.findall(r"(\d) s +(\d+\.\d+) s", out.partition("The retries of one event")[2])
    assert [int(declared) for declared, _ in waited] == [1, 2, 4]
    assert all(float(seconds) >= int(declared) for declared, seconds in waited), out
    # The fix, and the replay in the admin.
    assert re.search(r"billing +2 events published", out), out
    assert re.search(r"shop +nothing is archived", out), out
    replayed = out.partition("Archived, after the replay")[2]
    assert (
        len(re.findall(r"^  billing invoices\.\w+ .* 1  succeeded$", replayed, re.MULTILINE)) == 2
    ), out
    final, settled, open_ = account(out, "still archived")
    # An order more is invoiced, and the shop hears of it.
    assert (final, settled, open_) == (accepted + 1, accepted + 1, 0)
    assert "Nothing was lost." in out
    assert "none is left" in out
    assert ours() == {}


def test_a_killed_demo_leaves_nothing(start: Start) -> None:
    child = start()
    wait_for(child, "orders ")
    child.kill()
    child.wait()
    assert eventually_nothing(), ours()


def test_unreachable_broker_is_named_with_a_remedy(start: Start) -> None:
    child = start(AMQP_URL="amqp://nobody:nothing@127.0.0.1:1/")
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 2
    assert "Correct AMQP_URL" in out
    assert "Traceback" not in out


# -- make serve ---------------------------------------------------------------------------------


def test_serve_runs_until_interrupted(start: Start) -> None:
    server = start("--serve", "--orders", "60")
    out = wait_for(server, "make serve ARGS=--stop")
    addresses = dict(
        re.findall(r"^  (shop|billing) +(http://127\.0\.0\.1:\d+/admin/)$", out, re.MULTILINE)
    )
    login = re.search(r"user (\w+), password (\S+)$", out, re.MULTILINE)
    assert login, out
    assert account(out, "archived")[2] == 1
    for service, address in addresses.items():
        user = AdminUser(address)
        first = user.log_in(*login.groups())
        text = user.open(f"{address}django_amqp_events/archivedevent/").text_content()
        assert f"Example: {service}" in text
        assert ("there is no tax rate" in text) == (service == "billing")
        (style, *_) = first.xpath("//link[@rel='stylesheet']/@href")
        with urlopen(style, timeout=30) as css:  # noqa: S310 - our own
            assert css.headers["Content-Type"] == "text/css"
    fixed = start("--fix")
    told, _ = fixed.communicate(timeout=120)
    assert fixed.returncode == 0, told
    user = AdminUser(addresses["billing"])
    said = user.replay_everything(user.log_in(*login.groups()), "seen enough")
    assert "1 event published" in said[0]
    wait_for(server, "open in the archive: shop 0, billing 0")
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=60)
    assert server.returncode == 0
    assert ours() == {}
