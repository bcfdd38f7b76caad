"""Every private or undocumented name of py-amqp on which publishing and reading depend.

No connection is opened without them (:func:`check`).
"""

from __future__ import annotations

from functools import cache
from typing import Final

from .private_names import PrivateName, require

_CONNECTION: Final = "amqp.connection:Connection"
_CHANNEL: Final = "amqp.channel:Channel"
_TRANSPORT: Final = "amqp.transport:_AbstractTransport"

_PUBLISH: Final = "publish with confirms"
_LIMIT: Final = "limit how long an answer may take"
_HEADERS: Final = "read messages whose headers py-amqp cannot decode"

REQUIRED: Final = (
    PrivateName(f"{_CONNECTION}.transport", _LIMIT),
    PrivateName(f"{_CONNECTION}.blocking_read", _LIMIT, ("self", "timeout")),
    PrivateName(f"{_CONNECTION}.drain_events", _LIMIT, ("self", "timeout")),
    PrivateName(f"{_CONNECTION}.connect_timeout", _LIMIT),
    PrivateName(f"{_CONNECTION}.frame_handler_cls", _LIMIT),
    PrivateName("amqp.method_framing:frame_handler", _LIMIT, ("connection", "callback")),
    PrivateName(f"{_TRANSPORT}.sock", _LIMIT),
    PrivateName(f"{_TRANSPORT}.raise_on_initial_eintr", _LIMIT),
    PrivateName(f"{_TRANSPORT}.connected", "leave a connection to the parent process"),
    PrivateName(f"{_CHANNEL}.channel_id", _HEADERS),
    PrivateName(f"{_CHANNEL}.events", _PUBLISH),
    PrivateName(f"{_CHANNEL}.send_method", _PUBLISH, ("self", "sig", "format", "args", "content")),
    PrivateName(f"{_CHANNEL}.is_closing", "close a channel within a time limit"),
    PrivateName(f"{_CHANNEL}.connection", "close a channel within a time limit"),
    PrivateName(f"{_CHANNEL}.auto_decode", "keep a body byte for byte"),
    PrivateName(f"{_CHANNEL}.callbacks", _HEADERS),
    PrivateName(f"{_CONNECTION}.bytes_recv", _HEADERS),
    PrivateName(f"{_CONNECTION}.on_inbound_frame", _HEADERS),
    PrivateName("amqp.serialization:decode_properties_basic", _HEADERS, ("buf", "offset")),
)


@cache
def check() -> None:
    """Check what publishing and reading depend on.

    Raises:
        ConfigurationError: py-amqp has changed a name.
    """
    require("amqp", REQUIRED)
