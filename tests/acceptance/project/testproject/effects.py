"""A handler with ``once`` that writes to a database and dies on request."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from celery.signals import task_postrun
from django.db import connections

from django_amqp_events import current_event, handler

from .steps import perform

ALIAS = os.environ["TESTPROJECT_ALIAS"]
TABLE = "CREATE TABLE effects (event varchar(64), attempt integer)"


@handler("effects.act", bind=True, once=True, using=ALIAS, max_retries=3)
def act(self: Any, plan: list[str]) -> None:
    event = current_event()
    assert event is not None
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("INSERT INTO effects VALUES (%s, %s)", [event.id, event.attempt])
    perform(self, plan)


@task_postrun.connect
def _die_after_the_commit(**_: Any) -> None:
    """Kill the process that has run the handler, before the worker hears of it."""
    mark = Path(os.environ["TESTPROJECT_DIR"], "die-after")
    if mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
