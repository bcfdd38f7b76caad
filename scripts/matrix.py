#!/usr/bin/env python3
"""Run `make test-all` and `make faults` on fresh Debian systems, and the suite on PostgreSQL.

    sudo python3 scripts/matrix.py [debian12] [debian13] [forky] [postgresql] [tests] [faults]
                                   [-- arguments of the one that is named]

debootstrap makes each system below .run/matrix/, with nothing but Python, make and git; it is
entered by chroot in its own namespaces. `make` must install the rest, RabbitMQ included. Versions:
Python 3.11 with RabbitMQ 3.10, 3.13 with 4.0, 3.14 with 4.3.

The mirror is the one that apt uses on this machine, and the indexes are pip's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import apt_install
from lock import pip_settings
from machine import ScriptError, exit_with, run

ROOT = Path(__file__).resolve().parent.parent
MATRIX = ROOT / ".run" / "matrix"
PACKAGES = "python3,python3-venv,make,git,ca-certificates"
SYSTEMS = {"debian12": "bookworm", "debian13": "trixie", "forky": "forky"}
TARGETS = {"tests": "test-all", "faults": "faults"}
LEFT_OUT = shutil.ignore_patterns(".run", ".venv", "dist", "build", "__pycache__", ".*_cache")


def main() -> int:
    words, rest = sys.argv[1:], ""
    if "--" in words:
        at = words.index("--")
        words, rest = words[:at], shlex.join(words[at + 1 :])
    work = [word for word in TARGETS if word in words] or list(TARGETS)
    chosen = [word for word in words if word not in TARGETS] or [*SYSTEMS, "postgresql"]
    if rest and len(work) > 1:
        raise ScriptError("Say tests or faults before the arguments behind --.")
    if unknown := set(chosen) - set(SYSTEMS) - {"postgresql"}:
        systems = ", ".join(SYSTEMS)
        raise ScriptError(f"Unknown: {', '.join(unknown)}. Choose {systems} or postgresql.")
    if os.geteuid() != 0 and set(chosen) & set(SYSTEMS):
        raise ScriptError("chroot needs root: sudo make matrix. ARGS=postgresql does not.")
    # Like Ctrl-C: the command that runs is ended, and all of its namespace.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    MATRIX.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, what in product(chosen, work):
        if (name, what) == ("postgresql", "faults"):
            continue  # they use PostgreSQL everywhere
        began = time.time()
        log = MATRIX / f"{name}-{what}.log"
        print(f"== {name}, {what}: log in {log.relative_to(ROOT)}", flush=True)
        if name == "postgresql":
            script = str(ROOT / "scripts" / "postgresql.py")
            command = [sys.executable, script, "make", "test-all", f"ARGS={rest}"]
        else:
            command = in_chroot(name, TARGETS[what], rest)
        try:
            with log.open("wb") as output:
                code = subprocess.run(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    check=False,
                ).returncode  # fmt: skip
        finally:
            # Keep what was counted, also if the run is stopped.
            for path in (MATRIX / name / "src" / "docs" / "faults").glob("*.json"):
                if what == "faults" and path.stat().st_mtime >= began:
                    shutil.copy(path, ROOT / "docs" / "faults" / path.name)
        failed = failed or code != 0
        tail = log.read_text(errors="replace").splitlines()[-3:]
        print(*(f"   {line}" for line in tail), sep="\n")
        verdict = f"FAILED ({code})" if code else "passed"
        print(f"== {name}, {what}: {verdict} in {time.time() - began:.0f} s", flush=True)
    if "faults" in work:
        subprocess.run(["make", "faults", "ARGS=--write"], cwd=ROOT, check=True)
    return 1 if failed else 0


def in_chroot(name: str, target: str, arguments: str) -> list[str]:
    """Return the command that runs `make` in a copy of the project; create its system."""
    root = MATRIX / name
    if not (root / "made").exists():
        bootstrap(SYSTEMS[name], root)
        (root / "made").touch()
    shutil.rmtree(root / "src", ignore_errors=True)
    shutil.copytree(ROOT, root / "src", symlinks=True, ignore=LEFT_OUT)
    for file in ("resolv.conf", "hosts"):
        (root / "etc" / file).unlink(missing_ok=True)
        shutil.copy(Path("/etc", file), root / "etc" / file)
    environment, mounts = from_this_machine()
    steps = ["set -e", "mount -t proc proc proc", "mount --rbind /dev dev"]
    for path in mounts:
        inside = root / str(path).lstrip("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.mkdir(exist_ok=True) if path.is_dir() else inside.touch()
        steps.append(f"mount --bind {shlex.quote(str(path))} {shlex.quote(str(inside))}")
    inside_command = f"cd /src && python3 --version && make {target} ARGS={shlex.quote(arguments)}"
    variables = [f"{key}={value}" for key, value in environment.items()]
    command = ["exec", "chroot", ".", "/usr/bin/env", "-i", *variables, "sh", "-c", inside_command]
    steps = [f"cd {shlex.quote(str(root))}", *steps, shlex.join(command)]
    # All processes and mounts of the namespaces are gone when the command ends.
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    return [*unshare, "sh", "-c", "\n".join(steps)]


def bootstrap(suite: str, root: Path) -> None:
    """Create a minimal Debian in a folder."""
    if shutil.which("debootstrap") is None:
        apt_install.install(["debootstrap"], why="make matrix creates Debian systems in folders")
    shutil.rmtree(root, ignore_errors=True)
    scripts = Path("/usr/share/debootstrap/scripts")
    # debootstrap's mounts of /proc and /sys end with the namespace.
    command = ["unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={PACKAGES}"]
    command += [suite, str(root), debian_mirror()]
    # An older debootstrap does not know the newest release, which is made like sid.
    run(*command, *([] if (scripts / suite).exists() else [scripts / "sid"]))


def debian_mirror() -> str:
    """Return the address from which apt on this machine gets Debian."""
    listed = run(
        "apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"
    )
    for line in listed.splitlines():
        uri, _, codename = line.partition(" ")
        if codename and "-" not in codename and uri.rstrip("/").endswith("debian"):
            return uri
    raise ScriptError("apt on this machine has no Debian mirror. Add one to its sources.")


def from_this_machine() -> tuple[dict[str, str], list[Path]]:
    """Return the environment of the system, and the local indexes and certificates to mount."""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "CI": "true",
    }
    kept = ("_proxy", "ssl_cert_file")
    environment |= {k: v for k, v in os.environ.items() if k.lower().endswith(kept)}
    settings = pip_settings()
    for option in ("index-url", "extra-index-url", "find-links", "cert"):
        if option in settings:
            environment["PIP_" + option.upper().replace("-", "_")] = settings[option]
    words = " ".join(environment[key] for key in environment if key.startswith(("PIP_", "SSL_")))
    paths = [Path(word.removeprefix("file://")) for word in words.split()]
    # The files of a local index lie beside it.
    paths = [path.parent if path.name == "simple" else path for path in paths]
    return environment, sorted({path for path in paths if path.is_absolute() and path.exists()})


if __name__ == "__main__":
    exit_with(main)
