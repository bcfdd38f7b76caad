"""Choose the optional fast paths of a worker; no other module imports ``worker.fast``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..broker import fast_paths
from ..conf import FAST_PATHS, Settings
from .acks import Acks
from .celery_internals import EventTraceInfo
from .fast import batched_acks, chunk_pipes, chunks
from .fast.quiet_retries import QuietRetries
from .request import Chunking


def why_unused(settings: Settings, consumer: Any) -> dict[str, str]:
    """Return why this worker does not use each fast path, ``""`` if it does."""
    reasons = {path: fast_paths.why_unused(path, settings) for path in FAST_PATHS}
    reasons["chunks"] = reasons["chunks"] or chunks.Chunks.problem(consumer)
    return reasons


def acks(reasons: Mapping[str, str], errors: tuple[type[BaseException], ...]) -> Acks:
    """Return what writes acks."""
    return Acks(errors) if reasons["acks"] else batched_acks.BatchedAcks(errors)


def trace_info(settings: Settings) -> type[EventTraceInfo]:
    """Return Celery's handling of failed runs, quiet about retries if possible."""
    return EventTraceInfo if fast_paths.why_unused("retries", settings) else QuietRetries


def open_chunk_pipes(settings: Settings, processes: int) -> None:
    """Prepare a pool of at most so many processes for chunks; call it before the pool starts."""
    if not fast_paths.why_unused("chunks", settings):
        chunk_pipes.open_pipes(processes)


def event_chunks(reasons: Mapping[str, str], consumer: Any) -> Chunking | None:
    """Return what hands several events to a pool process at once, ``None`` if unavailable."""
    return None if reasons["chunks"] else chunks.Chunks(consumer)
