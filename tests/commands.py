"""Management commands as a process would run them, and processes of the example project."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from django.core.management import CommandError, call_command

from tests import forked

ROOT = Path(__file__).resolve().parents[1]


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


def run_program(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; its exit code may be any."""
    options = {"stdin": subprocess.DEVNULL, "timeout": 120, **options}
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own, in which nothing is imported."""
    done = run_program(sys.executable, "-W", "error", "-c", code, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done


def run_example(*arguments: str, settings: str = "shop", text: str = "", **env: str) -> str:
    """Run Python in the example project; return what it prints."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("AMQP_", "DJANGO_", "EXAMPLE_"))
    }
    done = forked.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=kept | {"DJANGO_SETTINGS_MODULE": f"example_project.{settings}"} | env,
        input=text,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)
