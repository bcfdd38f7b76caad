"""A broker in memory for ``BACKEND`` ``memory`` and ``inline``.

``broker``   RabbitMQ's routing, delays and dead letters
``backend``  publishing and handling, with the code of the real worker
"""

from __future__ import annotations

from .backend import InlineBackend, MemoryBackend, Waiting
from .broker import Clock, MemoryBroker

__all__ = ["Clock", "InlineBackend", "MemoryBackend", "MemoryBroker", "Waiting"]
