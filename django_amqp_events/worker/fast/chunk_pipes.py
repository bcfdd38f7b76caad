"""Pipes between the worker and its pool processes: tokens of chunks, and reports of events.

Tokens and reports are bytes in pipes that the processes inherit. One reader receives each token,
even if another is killed meanwhile; a lock in shared memory does not guarantee that.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator
from typing import Final

logger = logging.getLogger(__name__)

#: Most events of a chunk.
MAX_EVENTS: Final = 16
#: Chunk, index of the event, seconds; atomic, since it is shorter than PIPE_BUF (pipe(7)).
_REPORT: Final = struct.Struct("=QHd")

#: A worker may open this part of its file descriptors as pipes; the pool needs the others.
DESCRIPTORS_SHARE: Final = 8
#: The pipe of a chunk with one event, which needs no tokens.
NO_TOKENS: Final = -1

Pipe = tuple[int, int]

_reports: Pipe = (-1, -1)
#: One for each chunk that can run at the same time.
tokens: list[Pipe] = []
#: Process id of the worker's main process.
main_process = 0


def open_pipes(processes: int) -> None:
    """Open the pipes for a pool of at most so many processes, which inherit them.

    An event for which there is no pipe runs alone, so a part of the descriptors is enough.
    """
    global _reports, main_process  # noqa: PLW0603 - one process is one worker
    main_process = os.getpid()
    most = os.sysconf("SC_OPEN_MAX") // DESCRIPTORS_SHARE // 2
    try:
        if _reports[0] < 0:
            _reports = _pipe()
        # A process is free a moment before its chunk has ended; ten seconds before if it was
        # killed.
        while len(tokens) < min(2 * processes, most):
            tokens.append(_pipe())
    except OSError as exc:
        logger.warning("events are not handed out in chunks: no pipe can be opened: %s", exc)
        _close_pipes()


def _pipe() -> Pipe:
    pipe = os.pipe()
    os.set_blocking(pipe[0], False)
    return pipe


def _close_pipes() -> None:
    """Leave the descriptors to the pool and its handlers."""
    global _reports  # noqa: PLW0603
    for pipe in (*tokens, _reports):
        for descriptor in pipe:
            if descriptor >= 0:
                os.close(descriptor)
    tokens.clear()
    _reports = (-1, -1)


def take_tokens(pipe: int, number: int) -> bytes:
    """Return up to *number* tokens of a chunk."""
    try:
        return os.read(tokens[pipe][0], number)
    except BlockingIOError:
        return b""


def put_tokens(pipe: int, number: int, token: int) -> None:
    """Replace the tokens in a pipe."""
    while take_tokens(pipe, MAX_EVENTS):
        pass
    os.write(tokens[pipe][1], bytes([token] * number))


def send_report(number: int, index: int, seconds: float) -> None:
    """Report from a pool process that it has handled an event of a chunk."""
    os.write(_reports[1], _REPORT.pack(number, index, seconds))


def read_reports() -> Iterator[tuple[int, int, float]]:
    """Yield chunk, index of the event and seconds of each report so far."""
    while True:
        try:
            raw = os.read(_reports[0], 1024 * _REPORT.size)
        except BlockingIOError:
            return
        yield from _REPORT.iter_unpack(raw)
