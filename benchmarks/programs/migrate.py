"""Create the tables of a database."""

from __future__ import annotations

from typing import Any

from . import service_events  # noqa: F401 - sets Django up
from .serving import serve


def migrate() -> dict[str, Any]:
    """Create the project's tables, and the one that handlers write to."""
    from django.core.management import call_command

    call_command("migrate", run_syncdb=True, verbosity=0)
    return {}


if __name__ == "__main__":
    serve(migrate=migrate)
