#!/usr/bin/env python
"""Django's command line for the example project; the shop, unless DJANGO_SETTINGS_MODULE says."""

from __future__ import annotations

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.shop")
    try:
        from django.core.management import execute_from_command_line
    except ImportError as exc:
        sys.exit(f"{exc}. Remedy: make venv, then .venv/bin/python manage.py …")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
