"""Run a management command in the project: ``python -m benchmarks.programs.command NAME …``."""

from __future__ import annotations

import sys

from django.core.management import execute_from_command_line

from . import service_events  # noqa: F401 - declares the handlers

execute_from_command_line(["manage.py", *sys.argv[1:]])
