"""Receivers of signals, connected for a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def connected(receiver: Callable[..., Any], *signals: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for signal in signals:
            signal.connect(receiver, weak=False)
            stack.callback(signal.disconnect, receiver)
        yield
