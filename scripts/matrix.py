#!/usr/bin/env python3
"""Run the tests on fresh Debian systems, and here on other databases and older Celerys.

    sudo python3 scripts/matrix.py [all | faults | soak | bench] [system ...] [-- arguments]

Runs `make test`; with `all` `make test-all`, with `faults`, `soak` or `bench` the command of that
name. The systems:

    debian12      Python 3.11, RabbitMQ 3.10, Django 5.2
    debian13      Python 3.13, RabbitMQ 4.0, the newest Django
    forky         Python 3.14, RabbitMQ 4.3, the newest Django
    postgresql    this machine, its default database on a private PostgreSQL
    mariadb       the same on a private MariaDB
    celery-5.5    this machine, with the oldest supported Celery, kombu and billiard
    celery-5.6    the same with Celery 5.6

Python 3.11 gets Django 5.2 from the lock file, because later Djangos need 3.12. debootstrap creates
each Debian below .run/matrix/ with nothing but Python, make and git, from apt's mirror; `make` runs
there, in its own namespaces, and must install the rest.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import apt_install
from lock import pip_settings
from machine import ScriptError, exit_with, run

ROOT = Path(__file__).resolve().parent.parent
MATRIX = ROOT / ".run" / "matrix"
PACKAGES = "python3,python3-venv,make,git,ca-certificates"
TARGETS = {"all": "test-all", "faults": "faults", "soak": "soak", "bench": "bench"}
DEBIAN = {"debian12": "bookworm", "debian13": "trixie", "forky": "forky"}
DATABASES = ("postgresql", "mariadb")
CELERYS = ("celery-5.5", "celery-5.6")
SYSTEMS = (*DEBIAN, *DATABASES, *CELERYS)
LEFT_OUT = shutil.ignore_patterns(".run", ".venv", "dist", "build", "__pycache__", ".*_cache")


def main() -> int:
    words, _, arguments = f" {shlex.join(sys.argv[1:])}".partition(" -- ")
    systems = words.split()
    target = TARGETS[systems.pop(0)] if systems and systems[0] in TARGETS else "test"
    if unknown := set(systems) - set(SYSTEMS):
        raise ScriptError(f"Unknown: {' '.join(unknown)}. Choose from {', '.join(SYSTEMS)}.")
    # The others start a database of their own on each system.
    own = () if target.startswith("test") else DATABASES
    systems = systems or [each for each in SYSTEMS if each not in own]
    if os.geteuid() != 0 and set(systems) & set(DEBIAN):
        raise ScriptError("chroot needs root: sudo make matrix. ARGS=postgresql does not.")
    # Like Ctrl-C: the command that runs is ended, and all of its namespace.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    MATRIX.mkdir(parents=True, exist_ok=True)
    passed = [passes(name, target, arguments) for name in systems]
    return 0 if all(passed) else 1


def passes(name: str, target: str, arguments: str) -> bool:
    """Run `make` on a system, into a log, and print its last lines."""
    began = time.monotonic()
    log = MATRIX / f"{name}-{target}.log"
    print(f"== {name}, make {target}: log in {log.relative_to(ROOT)}", flush=True)
    if name in CELERYS and target == "faults":
        # docs/ has the table of the newest Celery.
        arguments += f" --output .run/{name}"
    if target == "bench":
        # RESULTS.md's own tables are this machine's.
        arguments += f" --elsewhere {name}"
    command = ["make", target, f"ARGS={arguments}"]
    if name in DEBIAN:
        command = in_chroot(name, shlex.join(command))
    elif name in CELERYS:
        command += [f"ENVIRONMENT=.run/{name}", f"LOCK=requirements/{name}.txt"]
    else:
        command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *command]
    with log.open("wb") as output:
        code = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        ).returncode
    tail = log.read_text(errors="replace").splitlines()[-3:]
    print(*(f"   {line}" for line in tail), sep="\n")
    verdict = f"FAILED ({code})" if code else "passed"
    print(f"== {name}, make {target}: {verdict} in {time.monotonic() - began:.0f} s", flush=True)
    return code == 0


def in_chroot(name: str, make: str) -> list[str]:
    """Return the command that runs `make` in a copy of the project; create its system."""
    root = MATRIX / name
    if not root.exists():
        bootstrap(DEBIAN[name], root)
    shutil.rmtree(root / "src", ignore_errors=True)
    shutil.copytree(ROOT, root / "src", symlinks=True, ignore=LEFT_OUT)
    for file in ("resolv.conf", "hosts"):
        (root / "etc" / file).unlink(missing_ok=True)
        shutil.copy(Path("/etc", file), root / "etc" / file)
    environment, paths = from_this_machine()
    place = shlex.quote(str(root))
    steps = [
        f"mount --bind {place} {place}",
        f"cd {place}",
        "mkdir -p old",
        "mount -t proc proc proc",
        "mount --rbind /dev dev",
    ]
    # Fault table and ratios are written here.
    written = {ROOT / name: root / "src" / name for name in ("docs", "benchmarks")}
    mounts = {path: root / str(path).lstrip("/") for path in paths} | written
    for path, inside in mounts.items():
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.mkdir(exist_ok=True) if path.is_dir() else inside.touch()
        steps.append(shlex.join(["mount", "--bind", str(path), str(inside)]))
    variables = [f"{key}={value}" for key, value in environment.items()]
    inside_it = f"umount -l /old && cd /src && {make}"
    command = ["chroot", ".", "/usr/bin/env", "-i", *variables, "sh", "-c", inside_it]
    # Below a mere chroot, Linux refuses namespaces for users, which some tests need.
    steps += ["pivot_root . old", f"exec {shlex.join(command)}"]
    # All processes and mounts of the namespaces are gone when the command ends.
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    return [*unshare, "sh", "-e", "-c", "\n".join(steps)]


def bootstrap(suite: str, root: Path) -> None:
    """Create a minimal Debian in a folder."""
    if shutil.which("debootstrap") is None:
        apt_install.install(["debootstrap"], why="make matrix creates Debian systems in folders")
    partial = root.with_name(f"{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    scripts = Path("/usr/share/debootstrap/scripts")
    # debootstrap's mounts of /proc and /sys end with the namespace.
    command = ["unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={PACKAGES}"]
    command += [suite, str(partial), debian_mirror()]
    # An older debootstrap does not know the newest release, which is made like sid.
    run(*command, *([] if (scripts / suite).exists() else [scripts / "sid"]))
    partial.rename(root)


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
