#!/usr/bin/env python3
"""Compile requirements/ from pyproject.toml, with hashes, for all supported Pythons.

    python3 scripts/lock.py [dev.txt] [celery-5.5.txt] [celery-5.6.txt] [example.txt]
        [deploy.txt] [bench.txt] [mutants.txt] [docs.txt] [--upgrade]

uv asks pip's main index, as this machine configures it. It does not ask additional indexes: uv
reads the hashes of a version from one place, and a folder with the wheel of one Python would leave
out the others.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

from machine import exit_with, run

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Made by `make lock` from pyproject.toml: {what}, Python 3.11 to 3.14.
# Installed with: pip install --require-hashes --no-deps -r requirements/{name}
"""
DEVELOPMENT = ("--all-extras", "--group", "pyproject.toml:dev", "pyproject.toml")
#: File name: description, arguments of uv. The peers of benchmarks/ are installed on their own.
LOCKS = {
    "dev.txt": (
        "all that a developer needs, and all extras",
        DEVELOPMENT,
    ),
    "celery-5.5.txt": (
        "dev.txt with the oldest supported Celery",
        ("--group", "pyproject.toml:celery-5-5", *DEVELOPMENT),
    ),
    "celery-5.6.txt": (
        "dev.txt with Celery 5.6",
        ("--group", "pyproject.toml:celery-5-6", *DEVELOPMENT),
    ),
    "example.txt": (
        "what the image of the example project needs",
        (
            "--extra",
            "results",
            "--extra",
            "prometheus",
            "--group",
            "pyproject.toml:example",
            "pyproject.toml",
        ),
    ),
    "deploy.txt": (
        "what checks the files in deploy/",
        ("--group", "pyproject.toml:deploy"),
    ),
    # yattag has no wheel; Cosmic Ray imports it for HTML reports only.
    "mutants.txt": (
        "what scripts/mutants.py runs in",
        ("--no-emit-package", "yattag", "--group", "pyproject.toml:mutants"),
    ),
    # autodoc imports the package.
    "docs.txt": (
        "what builds docs/ and checks the package's metadata",
        ("--extra", "contracts", "--group", "pyproject.toml:docs", "pyproject.toml"),
    ),
    "bench.txt": ("the peers of benchmarks/", ("--group", "pyproject.toml:peers")),
}


def main() -> int:
    upgrade = [argument for argument in sys.argv[1:] if argument == "--upgrade"]
    chosen = set(sys.argv[1:]) - {"--upgrade"}
    with tempfile.TemporaryDirectory() as directory:
        run(sys.executable, "-m", "venv", directory)
        programs = Path(directory) / "bin"
        run(programs / "python", "-m", "pip", "install", "--quiet", "uv")
        settings = pip_settings()
        names = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
        env = os.environ | {names[key]: settings[key] for key in names if key in settings}
        for name in chosen or LOCKS:
            compile_lock(name, programs / "uv", upgrade, env)
    return 0


def compile_lock(name: str, uv: Path, upgrade: list[str], env: dict[str, str]) -> None:
    what, sources = LOCKS[name]
    path = ROOT / "requirements" / name
    run(
        uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11",
        "--generate-hashes", "--no-header", "--no-annotate", *upgrade, *sources,
        "--output-file", path, cwd=ROOT, env=env,
    )  # fmt: skip
    path.write_text(HEADER.format(what=what, name=name) + path.read_text())


def pip_settings() -> dict[str, str]:
    """Return pip's options as this machine configures them: "index-url", "find-links", ..."""
    lines = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {key.rpartition(".")[2]: shlex.split(value)[0] for key, _, value in pairs}


if __name__ == "__main__":
    exit_with(main)
