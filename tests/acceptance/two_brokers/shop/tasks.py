"""Tasks on Redis, one of each kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import current_task, shared_task

from .celery import app


def note(what: str, **more: Any) -> None:
    """Add a line about the current task: its broker, as its app and its delivery have it."""
    scheme = current_task.app.conf.broker_url.partition(":")[0]
    with Path(os.environ["SHOP_NOTES"]).open("a") as notes:
        notes.write(f"{what} on {scheme}{''.join(f', {k}={v}' for k, v in more.items())}\n")


@shared_task
def pack(order: int) -> None:
    note("packed", order=order)


@app.task
def ship(order: int) -> None:
    note("shipped", order=order)


@shared_task
def order(number: int) -> None:
    """Publish an event from a task."""
    from .events import ordered

    note("ordered", order=number)
    ordered.publish(order=number)
