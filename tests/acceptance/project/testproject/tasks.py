"""Ordinary tasks of the project, which know nothing of events."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from . import ledger


@shared_task
def ordinary(name: str) -> str:
    ledger.write("ordinary", task=name)
    return name


@shared_task(bind=True, max_retries=3)
def retried(self: Any, name: str) -> None:
    ledger.write("ordinary", task=name, retries=self.request.retries)
    if self.request.retries < 2:
        raise self.retry(countdown=0.2)
