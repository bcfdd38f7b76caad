#!/usr/bin/env python3
"""Bring the catalogues up to date with the code, and compile them.

.venv/bin/python scripts/messages.py

Texts that are new or have changed are left to whoever translates: they are named, and the exit
code is 1. Needs gettext's programs, which are installed where they are missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import apt_install

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "django_amqp_events"
PROGRAMS = ("xgettext", "msgmerge", "msguniq", "msgattrib", "msgcat", "msgfmt")


def main() -> int:
    if not all(map(shutil.which, PROGRAMS)):
        try:
            apt_install.install(["gettext"], why="Catalogues of translations are made by gettext")
        except apt_install.AptError as exc:
            sys.exit(f"{exc}")
    catalogues = sorted(PACKAGE.glob("locale/*/LC_MESSAGES/django.po"))
    # No line numbers: they would change with every change of the code.
    subprocess.run(
        [sys.executable, "-m", "django", "makemessages", "--no-location", "--no-obsolete"]
        + [f"--locale={each.parent.parent.name}" for each in catalogues],
        cwd=PACKAGE,
        env={key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"},
        check=True,
    )
    complete = [compile_(each) for each in catalogues]
    return 0 if all(complete) else 1


def compile_(catalogue: Path) -> bool:
    """Make the .mo file; says whether every text is translated."""
    lines = catalogue.read_text(encoding="utf-8").splitlines(keepends=True)
    # The day on which somebody ran this is no news.
    kept = [line for line in lines if not line.startswith('"POT-Creation-Date:')]
    catalogue.write_text("".join(kept), encoding="utf-8")
    subprocess.run(
        ["msgfmt", "--check-format", "--check-domain", "--output-file"]
        + [str(catalogue.with_suffix(".mo")), str(catalogue)],
        check=True,
    )
    open_ = [
        subprocess.run(
            ["msgattrib", "--no-wrap", kind, str(catalogue)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for kind in ("--untranslated", "--only-fuzzy")
    ]
    for text in open_:
        print(text, end="")
    print(f"{catalogue.relative_to(ROOT)}: {'to be translated' if any(open_) else 'complete'}")
    return not any(open_)


if __name__ == "__main__":
    sys.exit(main())
