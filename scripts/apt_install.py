"""Install Debian packages for the tests and the demo, and leave none of their services running."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from machine import ScriptError, run

#: Arguments: the packages. UNITS: what they must neither start now nor at the next boot, unless it
#: is installed already. invoke-rc.d asks policy-rc.d; an administrator's own policy stays.
SCRIPT = """
exec 9</usr/sbin && flock 9
policy=/usr/sbin/policy-rc.d
there() { [ -e "/lib/systemd/system/$1" ] || [ -e "/etc/init.d/${1%.*}" ]; }
for unit in $UNITS; do there "$unit" || new="$new $unit"; done
trap 'exit 1' HUP INT TERM
if [ ! -e $policy ] || grep -q django_amqp_events $policy; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\\n# django_amqp_events installs packages\\nexit 101\\n' >$policy
    chmod 755 $policy
fi
get() { apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@"; }
# The package lists may be missing or out of date.
get install -y --no-install-recommends "$@" || {
    get update && get install -y --no-install-recommends "$@"
} || exit
for unit in $new; do
    there "$unit" || continue
    [ -d /run/systemd/system ] && now=--now
    systemctl disable $now "$unit" || true
    [ ! -e "/etc/init.d/${unit%.*}" ] || update-rc.d "${unit%.*}" disable || true
done
"""


def install(
    packages: Sequence[str], *, why: str, units: Sequence[str] = (), stray: Sequence[str] = ()
) -> None:
    """Install packages with apt, asking first at a terminal.

    Args:
        units: systemd units of the packages, which are not started and are left disabled.
        stray: names of programs that the installation may start; these processes are ended.

    Raises:
        ScriptError: apt is missing, not permitted, declined, or failed.
    """
    by_hand = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise ScriptError(f"This machine has no apt to install {' '.join(packages)} with.")
    asked = sys.stdin.isatty() and sys.stderr.isatty() and not os.environ.get("CI")
    sudo: list[str] = []
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            raise ScriptError(f"Installing packages needs root: run `{by_hand}` as root.")
        sudo = ["sudo"] if sys.stdin.isatty() else ["sudo", "-n"]
    print(f"{why}.", end=" ", file=sys.stderr)
    if asked:
        print(f"Install it with `{by_hand}`? [Y/n] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in {"", "y", "yes"}:
            raise ScriptError(f"The installation was declined. Run `{by_hand}` yourself.")
    else:
        print(f"Installing {' '.join(packages)} with apt ...", file=sys.stderr, flush=True)
    running = _pids(stray)
    settings = ["DEBIAN_FRONTEND=noninteractive", f"UNITS={' '.join(units)}"]
    try:
        run(*sudo, "env", *settings, "sh", "-c", SCRIPT, "sh", *packages)
    finally:
        for pid in _pids(stray) - running:
            with suppress(ScriptError):
                run(*sudo, "kill", str(pid))


def _pids(names: Sequence[str]) -> set[int]:
    time.sleep(0.1 if names else 0)
    found = set()
    for entry in Path("/proc").glob("[0-9]*/comm") if names else ():
        with suppress(OSError):
            if entry.read_text().strip() in names:
                found.add(int(entry.parent.name))
    return found
