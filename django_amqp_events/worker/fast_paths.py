"""Choose the optional fast paths of a worker.

No other module imports ``worker.fast``. A fast path is used if the setting ``FAST_PATHS`` names it
and the libraries have what it needs; otherwise the worker takes the ordinary way.
"""

from __future__ import annotations

from typing import Any

from ..broker import amqp_internals
from ..broker.private_names import available
from ..conf import Settings
from . import celery_internals
from .acks import Acks
from .celery_internals import EventTraceInfo
from .fast import batched_acks, chunks
from .fast.quiet_retries import QuietRetries
from .request import Chunking


def acks(settings: Settings, errors: tuple[type[BaseException], ...]) -> Acks:
    """Return what writes acks."""
    batched = "acks" in settings.fast_paths and amqp_internals.can_batch_acks()
    return batched_acks.BatchedAcks(errors) if batched else Acks(errors)


def trace_info() -> type[EventTraceInfo]:
    """Return Celery's handling of failed runs, quiet about retries if possible."""
    available("celery", "logging an archived event once", celery_internals.ONE_ERROR)
    quiet = available("celery", "tracing retries quietly", celery_internals.QUIET_RETRIES)
    return QuietRetries if quiet else EventTraceInfo


def open_chunk_pipes(settings: Settings, processes: int) -> None:
    """Prepare a pool of at most so many processes for chunks; call it before the pool starts."""
    if _chunks_available(settings):
        chunks.open_pipes(processes)


def event_chunks(settings: Settings, consumer: Any) -> Chunking | None:
    """Return what hands several events to a pool process at once, ``None`` if unavailable."""
    if _chunks_available(settings) and chunks.Chunks.possible(consumer):
        return chunks.Chunks(consumer)
    return None


def _chunks_available(settings: Settings) -> bool:
    return "chunks" in settings.fast_paths and available(
        "kombu", "handing out events in chunks", celery_internals.CHUNKS
    )
