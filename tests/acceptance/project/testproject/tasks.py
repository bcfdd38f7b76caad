"""Ordinary tasks of the project, which know nothing of events."""

from __future__ import annotations

from celery import shared_task

from . import ledger


@shared_task
def ordinary(name: str) -> str:
    ledger.write("ordinary", task=name)
    return name
