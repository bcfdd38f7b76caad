#!/usr/bin/env python3
"""Update the translation catalogues from the code, and compile them.

    .venv/bin/python scripts/messages.py

Prints texts without a translation; the exit code is 1 if there are any. apt installs gettext if it
is missing.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import apt_install
from machine import exit_with, run

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "django_amqp_events"


def main() -> int:
    if shutil.which("msgfmt") is None:
        apt_install.install(["gettext"], why="Translation catalogues are compiled by gettext")
    catalogues = sorted(PACKAGE.glob("locale/*/LC_MESSAGES/django.po"))
    env = {key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"}
    locales = [f"--locale={each.parent.parent.name}" for each in catalogues]
    # No line numbers: they would change with every change of the code.
    makemessages = ("makemessages", "--no-location", "--no-obsolete", *locales)
    run(sys.executable, "-m", "django", *makemessages, cwd=PACKAGE, env=env)
    complete = [compile_catalogue(each) for each in catalogues]
    return 0 if all(complete) else 1


def compile_catalogue(path: Path) -> bool:
    """Write the .mo file; return True if every text is translated."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # The date would change with every run.
    kept = [line for line in lines if not line.startswith('"POT-Creation-Date:')]
    path.write_text("".join(kept), encoding="utf-8")
    checks = ("--check-format", "--check-domain")
    run("msgfmt", *checks, "--output-file", path.with_suffix(".mo"), path)
    missing = "".join(
        run("msgattrib", "--no-wrap", kind, path) for kind in ("--untranslated", "--only-fuzzy")
    )
    print(f"{missing}{path.relative_to(ROOT)}: {'incomplete' if missing else 'complete'}")
    return not missing


if __name__ == "__main__":
    exit_with(main)
