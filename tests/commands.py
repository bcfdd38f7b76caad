"""Management commands as a process would run them: exit code, stdout and stderr."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from typing import Any

from django.core.management import CommandError, call_command


def run_command(name: str, *arguments: str, **options: Any) -> tuple[int, str, str]:
    """Run a management command; return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with redirect_stderr(err):
        try:
            call_command(name, *arguments, stdout=out, stderr=err, **options)
        except CommandError as exc:
            # argparse ends a process with 2, and call_command() raises its errors with 1.
            code = 2 if str(exc).startswith("Error: ") else exc.returncode
            err.write(str(exc))
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
    return code, out.getvalue(), err.getvalue()
