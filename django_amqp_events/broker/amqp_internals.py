"""Every private or undocumented name of py-amqp and kombu.

Publishing and reading depend on the names in :data:`REQUIRED`: no connection is opened without
them (:func:`check`). The names in :data:`FRAME_READER` and :data:`BATCHED_ACKS` are those that
optional fast paths need besides; without one of them its fast path is switched off with one log
line.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from .private_names import PrivateName, available, require

_CONNECTION: Final = "amqp.connection:Connection"
_CHANNEL: Final = "amqp.channel:Channel"
_TRANSPORT: Final = "amqp.transport:_AbstractTransport"

_PUBLISH: Final = "publish with confirms"
_LIMIT: Final = "limit how long an answer may take"
_ASK: Final = "send requests ahead of their answers"
_HEADERS: Final = "read messages whose headers py-amqp cannot decode"
_READ: Final = "read in large pieces"

REQUIRED: Final = (
    PrivateName(f"{_CONNECTION}.transport", _LIMIT),
    PrivateName(f"{_CONNECTION}.blocking_read", _LIMIT, ("self", "timeout")),
    PrivateName(f"{_TRANSPORT}.sock", _LIMIT),
    PrivateName(f"{_TRANSPORT}.raise_on_initial_eintr", _LIMIT),
    PrivateName(f"{_TRANSPORT}.connected", "leave a connection to the parent process"),
    PrivateName(f"{_TRANSPORT}.write", _PUBLISH, ("self", "s")),
    PrivateName(f"{_CONNECTION}.frame_max", _PUBLISH),
    PrivateName(f"{_CHANNEL}.channel_id", _PUBLISH),
    PrivateName(f"{_CHANNEL}.events", _PUBLISH),
    PrivateName("amqp.basic_message:Message.PROPERTIES", _PUBLISH),
    PrivateName("amqp.serialization:dumps", _PUBLISH, ("format", "values")),
    PrivateName(f"{_CHANNEL}.send_method", _ASK, ("self", "sig", "format", "args")),
    PrivateName(f"{_CHANNEL}.wait", _ASK, ("self", "method")),
    PrivateName(f"{_CHANNEL}.is_closing", "close a channel within a time limit"),
    PrivateName(f"{_CHANNEL}.connection", "close a channel within a time limit"),
    PrivateName(f"{_CHANNEL}.auto_decode", "keep a body byte for byte"),
    PrivateName(f"{_CHANNEL}.callbacks", _HEADERS),
    PrivateName(f"{_CONNECTION}.bytes_recv", _HEADERS),
    PrivateName(f"{_CONNECTION}.on_inbound_frame", _HEADERS),
    PrivateName("amqp.serialization:decode_properties_basic", _HEADERS, ("buf", "offset")),
)
FRAME_READER: Final = (
    PrivateName(f"{_CONNECTION}._transport", _READ),
    PrivateName(f"{_TRANSPORT}._read_buffer", _READ),
    PrivateName(f"{_TRANSPORT}.having_timeout", _READ, ("self", "timeout")),
)
BATCHED_ACKS: Final = (PrivateName(f"{_CONNECTION}.bytes_sent", "acknowledge in batches"),)


@cache
def check() -> None:
    """Check what publishing and reading depend on.

    Raises:
        ConfigurationError: py-amqp has changed a name.
    """
    require("amqp", REQUIRED)


def can_read_frames() -> bool:
    """Return True if py-amqp has the names that ``FrameReader`` needs."""
    return available("amqp", "reading in large pieces", FRAME_READER)


def can_batch_acks() -> bool:
    """Return True if py-amqp has the names that ``BatchedAcks`` needs."""
    return available("amqp", "acknowledging in batches", BATCHED_ACKS)
