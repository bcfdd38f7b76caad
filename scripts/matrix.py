#!/usr/bin/env python3
"""Run `make test-all` and `make faults` on fresh Debian systems and on PostgreSQL.

    sudo python3 scripts/matrix.py [debian12] [debian13] [forky] [postgresql] [tests] [faults]
                                   [-- arguments of the one that is named]

Each system is made by debootstrap below .run/matrix/ and entered by chroot in namespaces of its
own, with nothing installed but Python, make and git: what `make test-all` needs, RabbitMQ included,
it has to see to itself. That gives Python 3.11 with RabbitMQ 3.10, 3.13 with 4.0, 3.14 with 4.3.

The mirror is the one that apt uses on this machine and the indexes are pip's, read at run time.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import apt_install

ROOT = Path(__file__).resolve().parent.parent
MATRIX = ROOT / ".run" / "matrix"
PACKAGES = "python3,python3-venv,make,git,ca-certificates"
#: What is done, and the target of make that does it.
WORK = {"tests": "test-all", "faults": "faults"}
LEFT_OUT = {".run", ".venv", "dist", "build", "__pycache__", ".mypy_cache", ".ruff_cache"}


@dataclass(frozen=True, slots=True)
class System:
    """A Debian release."""

    name: str
    suite: str


SYSTEMS = {
    system.name: system
    for system in (
        System("debian12", "bookworm"),
        System("debian13", "trixie"),
        System("forky", "forky"),
    )
}


def main() -> int:
    arguments, _, rest = " ".join(map(shlex.quote, sys.argv[1:])).partition("--")
    words = shlex.split(arguments)
    work = [word for word in WORK if word in words] or list(WORK)
    chosen = [word for word in words if word not in WORK] or [*SYSTEMS, "postgresql"]
    if rest.strip() and len(work) > 1:
        sys.exit("Arguments behind -- are those of one: say tests or faults.")
    if unknown := set(chosen) - set(SYSTEMS) - {"postgresql"}:
        sys.exit(
            f"Unknown: {', '.join(sorted(unknown))}. There are {', '.join(SYSTEMS)}, postgresql."
        )
    if os.geteuid() != 0 and set(chosen) & set(SYSTEMS):
        sys.exit("chroot needs root: sudo make matrix, or `make matrix ARGS=postgresql` without.")
    # As Ctrl+C does: run() ends what it waits for, and with it all of its namespace.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    results = {}
    for name, what in product(chosen, work):
        began, now = time.monotonic(), time.time()
        log = MATRIX / f"{name}-{what}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"== {name}, {what}: log in {log.relative_to(ROOT)}", flush=True)
        if name != "postgresql":
            try:
                code = on_debian(SYSTEMS[name], WORK[what], rest.strip(), log)
            finally:
                # Each broker has a file of its own; the page is written from all of them. What
                # was found stays where the rest is stopped.
                for path in (MATRIX / name / "src" / "docs" / "faults").glob("*.json"):
                    if what == "faults" and path.stat().st_mtime >= now:
                        shutil.copy(path, ROOT / "docs" / "faults" / path.name)
        elif what == "tests":
            code = on_postgresql(rest.strip(), log)
        else:
            continue  # faults are on PostgreSQL everywhere
        results[name, what] = code
        tail = log.read_text(errors="replace").splitlines()[-3:]
        print(*(f"   {line}" for line in tail), sep="\n")
        verdict = "passed" if code == 0 else f"FAILED ({code})"
        print(f"== {name}, {what}: {verdict} in {time.monotonic() - began:.0f} s", flush=True)
    if "faults" in work:
        subprocess.run(["make", "faults", "ARGS=--write"], cwd=ROOT, check=True)
    return 1 if any(results.values()) else 0


def on_debian(system: System, target: str, arguments: str, log: Path) -> int:
    """Make the system where it is not there yet, and run `make` in a copy of the project."""
    root = MATRIX / system.name
    if not (root / "made").exists():
        bootstrap(system, root)
        (root / "made").touch()
    source = root / "src"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(
        ROOT, source, symlinks=True, ignore=lambda _, names: [n for n in names if n in LEFT_OUT]
    )
    environment, mounts = machine(root)
    inside = f"python3 --version && make {target} ARGS=" + shlex.quote(arguments)
    steps = [
        "set -e",
        "mount -t proc proc proc",
        "mount --rbind /dev dev",
        *(f"mount --bind {shlex.quote(str(p))} {shlex.quote(str(p).lstrip('/'))}" for p in mounts),
        "exec chroot . /usr/bin/env -i "
        + " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
        + " sh -c "
        + shlex.quote(f"cd /src && {inside}"),
    ]
    # All processes and mounts of the namespaces are gone when the command ends.
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "sh",
        "-c",
        "\n".join(steps),
    ]
    with log.open("wb") as output:
        return subprocess.run(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def bootstrap(system: System, root: Path) -> None:
    """A minimal Debian in a folder."""
    if shutil.which("debootstrap") is None:
        apt_install.install(["debootstrap"], why="make matrix makes Debian systems in folders")
    shutil.rmtree(root, ignore_errors=True)
    mirror = debian_mirror()
    scripts = Path("/usr/share/debootstrap/scripts")
    script = scripts / system.suite
    done = subprocess.run(
        # Its mounts of /proc and /sys end with a namespace of its own.
        ["unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={PACKAGES}"]
        + [system.suite, str(root), mirror]
        # An older debootstrap does not know the newest release, but how releases are made.
        + ([] if script.exists() else [str(scripts / "sid")]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}\ndebootstrap {system.suite} failed.")


def debian_mirror() -> str:
    """Where apt on this machine gets Debian from."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in listed.stdout.splitlines():
        uri, _, codename = line.partition(" ")
        if codename and "-" not in codename and uri.rstrip("/").endswith("debian"):
            return uri
    sys.exit("apt on this machine has no Debian mirror to make systems from.")


def machine(root: Path) -> tuple[dict[str, str], list[Path]]:
    """What the system inside has to know of this one: resolver, certificates, pip's indexes."""
    for name in ("resolv.conf", "hosts"):
        target = root / "etc" / name
        target.unlink(missing_ok=True)
        shutil.copy(Path("/etc", name), target)
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "CI": "true",
    }
    environment |= {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
    mounts: list[Path] = []
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        key, _, quoted = line.partition("=")
        option = key.rpartition(".")[2]
        value = shlex.split(quoted)[0]
        if option not in {"index-url", "extra-index-url", "find-links", "cert"}:
            continue
        environment["PIP_" + option.upper().replace("-", "_")] = value
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.name == "simple":  # an index, whose files lie beside it
                path = path.parent
            if path.is_absolute() and path.exists() and path not in mounts:
                mounts.append(path)
    if certificate := os.environ.get("SSL_CERT_FILE"):
        environment["SSL_CERT_FILE"] = certificate
        if Path(certificate) not in mounts:
            mounts.append(Path(certificate))
    for path in mounts:
        inside = root / str(path).lstrip("/")
        if path.is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        elif not inside.exists():
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
    return environment, mounts


def on_postgresql(arguments: str, log: Path) -> int:
    """The suite here, on a private PostgreSQL."""
    with log.open("wb") as output:
        return subprocess.run(
            [
                sys.executable,
                str(ROOT / "scripts" / "postgresql.py"),
                "make",
                "test",
                f"ARGS={arguments}",
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
