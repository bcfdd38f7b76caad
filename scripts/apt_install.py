"""Install Debian packages for the tests and the demo, and leave no service of theirs behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

POLICY = Path("/usr/sbin/policy-rc.d")
DENY = "#!/bin/sh\n# django_amqp_events: no service starts while packages are installed\nexit 101\n"


class AptError(RuntimeError):
    """The packages could not be installed; the message says why and what to do."""


def install(
    packages: Sequence[str], *, why: str, services: Sequence[str] = (), stray: Sequence[str] = ()
) -> None:
    """Install packages with apt, asking first at a terminal.

    `services` that the installation brings are neither started nor left enabled; processes named
    in `stray` that appear meanwhile are ended, by pid. Raises AptError.
    """
    command = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise AptError(
            f"this is no Debian or Ubuntu, so {' '.join(packages)} cannot be installed by apt"
        )
    prefix: list[str] = []
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            raise AptError(f"installing needs root: run `{command}` as root")
        prefix = ["sudo"] if sys.stdin.isatty() else ["sudo", "-n"]
    if sys.stdin.isatty() and sys.stderr.isatty() and not os.environ.get("CI"):
        print(f"{why}.\nInstall it with `{command}`? [Y/n] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in {"", "y", "yes"}:
            raise AptError(f"installation was declined; by hand: `{command}`")
    else:
        print(f"{why}: installing {' '.join(packages)} with apt ...", file=sys.stderr, flush=True)

    with _one_at_a_time(), _no_services(prefix):
        known = {service for service in services if _unit_exists(service)}
        running = _pids(stray)
        try:
            _install(prefix, packages)
        finally:
            _silence(prefix, [service for service in services if service not in known])
            for pid in _pids(stray) - running:
                subprocess.run([*prefix, "kill", str(pid)], check=False)


def _install(prefix: Sequence[str], packages: Sequence[str]) -> None:
    apt = [
        *prefix,
        "env",
        "DEBIAN_FRONTEND=noninteractive",
        "apt-get",
        "-qq",
        "-o",
        "Dpkg::Use-Pty=0",
    ]
    apt += ["-o", "DPkg::Lock::Timeout=300"]
    get = [*apt, "install", "--yes", "--no-install-recommends", *packages]
    output = ""
    # The package lists may be absent or out of date; both show in the first attempt.
    for step in (get, [*apt, "update"], get):
        done = subprocess.run(
            step,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        output = done.stdout
        if step is get and done.returncode == 0:
            return
    tail = "\n".join(output.splitlines()[-15:])
    raise AptError(f"apt-get could not install {' '.join(packages)}:\n{tail}\n")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two suites at once must not restore each other's policy."""
    path = Path(tempfile.gettempdir()) / f"django-amqp-events-apt.{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _no_services(prefix: Sequence[str]) -> Iterator[None]:
    """Forbid services to start, by Debian's own means, and restore what was there."""

    def run(*command: str) -> None:
        done = subprocess.run([*prefix, *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise AptError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # so that `finally` runs

    kept = POLICY.with_name("policy-rc.d.django-amqp-events")
    if kept.exists():  # an installation before this one was killed
        run("mv", str(kept), str(POLICY))
    elif POLICY.exists() and "django_amqp_events" in POLICY.read_text(errors="replace"):
        run("rm", str(POLICY))
    had_one = POLICY.exists() or POLICY.is_symlink()
    before = signal.signal(signal.SIGTERM, stop)
    try:
        if had_one:
            run("mv", str(POLICY), str(kept))
        with tempfile.NamedTemporaryFile("w", suffix=".policy") as ours:
            ours.write(DENY)
            ours.flush()
            run("install", "-m", "755", ours.name, str(POLICY))
        yield
    finally:
        run("rm", "-f", str(POLICY))
        if had_one:
            run("mv", str(kept), str(POLICY))
        signal.signal(signal.SIGTERM, before)


def _unit_exists(unit: str) -> bool:
    name = unit.split(".", maxsplit=1)[0]
    places = ("/lib/systemd/system", "/usr/lib/systemd/system", "/etc/systemd/system")
    return (
        any((Path(place) / unit).exists() for place in places) or Path("/etc/init.d", name).exists()
    )


def _silence(prefix: Sequence[str], units: Sequence[str]) -> None:
    """What came with the packages shall not run now nor after the next boot."""
    for unit in units:
        if not _unit_exists(unit):
            continue
        if shutil.which("systemctl"):
            now = ["--now"] if Path("/run/systemd/system").exists() else []
            subprocess.run(
                [*prefix, "systemctl", "disable", *now, unit], capture_output=True, check=False
            )
        name = unit.removesuffix(".service")
        if Path("/etc/init.d", name).exists() and shutil.which("update-rc.d"):
            subprocess.run(
                [*prefix, "update-rc.d", name, "disable"], capture_output=True, check=False
            )


def _pids(names: Sequence[str]) -> set[int]:
    time.sleep(0.1 if names else 0)
    found = set()
    for entry in Path("/proc").glob("[0-9]*/comm") if names else ():
        with contextlib.suppress(OSError):
            if entry.read_text().strip() in names:
                found.add(int(entry.parent.name))
    return found
