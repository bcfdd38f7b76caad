"""A broker in memory with the worker's half on it: ``BACKEND`` ``memory`` and ``inline``.

``broker``   interprets a topology as RabbitMQ does: routing, delays, dead letters
``backend``  publishes to it and runs handlers from it, with the code of the real worker
"""

from __future__ import annotations

from .backend import InlineBackend, MemoryBackend, Waiting
from .broker import Clock, MemoryBroker

__all__ = ["Clock", "InlineBackend", "MemoryBackend", "MemoryBroker", "Waiting"]
