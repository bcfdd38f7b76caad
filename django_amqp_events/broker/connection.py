"""Connect to RabbitMQ. The only place that opens a socket."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from amqp import exceptions as amqp_errors
from celery import Celery, current_app
from django.utils.module_loading import import_string
from kombu import Connection

from ..conf import Settings
from ..exceptions import (
    BrokerUnavailableError,
    ConfigurationError,
    ExchangeMissingError,
    MessageTooLargeError,
    PublishError,
    PublishInterruptedError,
    PublishRefusedError,
    PublishTimeoutError,
)
from ..message.types import Message

#: What py-amqp and the sockets below it raise. Anything else comes from elsewhere, such as
#: Celery's SoftTimeLimitExceeded out of a signal handler, and is not the broker's failure.
AMQP_ERRORS = (
    amqp_errors.AMQPError,
    OSError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    struct.error,
)


#: The broker's answers that blame the publish itself; it took nothing of it.
_REFUSALS = (
    amqp_errors.AccessRefused,
    amqp_errors.PreconditionFailed,
    amqp_errors.ContentTooLarge,
    amqp_errors.ResourceLocked,
    amqp_errors.FrameError,
    amqp_errors.FrameSyntaxError,
    amqp_errors.NotAllowed,
    amqp_errors.AMQPNotImplementedError,
)


def current_celery_app() -> Celery:
    """Return the current Celery app itself: the proxy has another identity in each thread."""
    app: Celery = current_app._get_current_object()  # noqa: SLF001 - Celery has no other way
    return app


def is_default_app(app: Celery) -> bool:
    """Return True if *app* is the default app that Celery creates for a project without one.

    It is made by ``celery._state._get_current_app`` as ``Celery("default",
    set_as_current=False)``; both are public attributes.
    """
    return bool(app.main == "default" and not app.set_as_current)


def celery_app(settings: Settings) -> Celery:
    """Return the project's Celery app: ``CELERY_APP``, or the current one.

    Raises:
        ConfigurationError: ``CELERY_APP`` cannot be imported or is no Celery app, or there is
            no current one: Celery would make one of its own, with a broker on localhost.
    """
    if not settings.celery_app:
        app = current_celery_app()
        if is_default_app(app):
            raise ConfigurationError(
                "there is no current Celery app in this thread, so the broker is not known; "
                "import the project's app in its __init__.py and make it the default "
                '(app.set_default()), or name it: AMQP_EVENTS["CELERY_APP"] = "project.celery.app"'
            )
        return app
    try:
        app = import_string(settings.celery_app)
    except ImportError as exc:
        raise ConfigurationError(
            f'AMQP_EVENTS["CELERY_APP"] is {settings.celery_app!r}, which cannot be imported: '
            f"{exc}; give the dotted path of the Celery app"
        ) from exc
    if not isinstance(app, Celery):
        raise ConfigurationError(
            f'AMQP_EVENTS["CELERY_APP"] is {settings.celery_app!r}, a '
            f"{type(app).__name__}; give the dotted path of the Celery app"
        )
    return app


def broker_urls(option: str | Sequence[str] | None) -> Sequence[str]:
    """Return the brokers that a URL option of Celery names, at least one: ``""`` is the default."""
    return option.split(";") if isinstance(option, str) else option or [""]


def build_connection(app: Celery, **options: Any) -> Connection:
    """Return a connection for writing that is not open yet.

    Raises:
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    try:
        connection: Connection = app.connection_for_write(**options)
        driver = connection.transport.driver_name
    except Exception as exc:
        # kombu imports the transport here, and says AttributeError where its library is missing.
        raise ConfigurationError(
            f"the transport of the broker URL cannot be used ({type(exc).__name__}: {exc}); events "
            f"need RabbitMQ (amqp://…) and py-amqp"
        ) from exc
    if driver != "py-amqp":
        raise ConfigurationError(
            f"the broker URL is {connection.as_uri()}; events need RabbitMQ (amqp://…) and py-amqp"
        )
    return connection


def login_refusal(exc: BaseException) -> str | None:
    """Explain why RabbitMQ refused the login and what to do; ``None`` for other errors."""
    if isinstance(exc, amqp_errors.AccessRefused):
        return (
            "RabbitMQ refuses the login; check user and password in the broker URL, and that the "
            "user may log in from this machine (guest may from localhost alone)"
        )
    if isinstance(exc, amqp_errors.NotAllowed):
        return (
            "RabbitMQ does not open the vhost; check its name in the broker URL, that there is "
            "one, that the user has permissions on it, and that no limit of connections is reached"
        )
    return None


def connect(app: Celery, *, timeout: float, **transport_options: Any) -> Connection:
    """Open a connection for writing, each of the broker's addresses tried once.

    Args:
        timeout: seconds for connecting, shared by the addresses, and for any single read or
            write afterwards.

    Raises:
        BrokerUnavailableError: no address answered, or the login was refused.
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    options: dict[str, Any] = {
        # Confirms are matched here, by delivery tag.
        "confirm_publish": False,
        "write_timeout": timeout,
        **transport_options,
    }
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # py-amqp sets one second: a broker that reads nothing for longer would lose connections.
        options["socket_settings"] = {
            socket.TCP_USER_TIMEOUT: int(timeout * 1000),
            **(app.conf.broker_transport_options.get("socket_settings") or {}),
        }
    addresses = len(broker_urls(app.conf.broker_write_url))
    connection = build_connection(
        app, connect_timeout=timeout / addresses, transport_options=options
    )
    try:
        connection.ensure_connection(
            max_retries=addresses - 1,
            interval_start=0,
            interval_step=0,
            reraise_as_library_errors=False,
            timeout=timeout,
        )
        # py-amqp waits for ever for answers such as that to opening a channel.
        connection.connection.transport.sock.settimeout(timeout)
    except AMQP_ERRORS as exc:
        close_socket(connection)
        raise BrokerUnavailableError(
            f"no connection to RabbitMQ at {connection.as_uri()}: {type(exc).__name__}: {exc}; "
            f"{login_refusal(exc) or 'check that the broker runs and that the broker URL is right'}"
        ) from exc
    return connection


@contextmanager
def connection(app: Celery, *, timeout: float) -> Iterator[Connection]:
    """Open a connection for the time of a block."""
    conn = connect(app, timeout=timeout)
    try:
        yield conn
    finally:
        close_socket(conn)


def close_socket(conn: Connection) -> None:
    """Close the socket without the closing handshake, which could wait for a dead broker."""
    with suppress(Exception):
        if conn.connected:
            # TLS has a closing handshake as well.
            conn.connection.transport.sock.settimeout(0)
    with suppress(Exception):
        conn.collect()


def describe_message(message: Message) -> str:
    """Name a message, as the errors of publishing do."""
    return f"{message.name or message.routing_key!r} ({message.event_id or 'no id'})"


def message_id_of(properties: Any) -> str:
    return str(properties.get("message_id", ""))


def unavailable_errors(messages: Sequence[Message], why: str) -> list[PublishError | None]:
    return [
        BrokerUnavailableError(
            f"{describe_message(message)} was not published: {why}",
            event_id=message.event_id,
            event_name=message.name,
        )
        for message in messages
    ]


def _blames(text: str, message: Message, alone: bool) -> bool:
    """Return True if the broker's reply text is about this message."""
    if alone:
        return True
    if size := re.search(r"message size \d+ is larger than .*?(\d+)", text):
        return len(message.body) > int(size[1])
    if topic := re.search(r"topic '(.*)' in exchange '(.*)' in", text):
        return (message.routing_key, message.exchange) == topic.groups()
    return f"exchange '{message.exchange}'" in text


def publish_error(message: Message, exc: Exception, blocked: str, alone: bool) -> PublishError:
    """Name what an exception says about a message that was on its way.

    Args:
        alone: no other message was; else the exception may be about another one.
    """
    ids = {"event_id": message.event_id, "event_name": message.name}
    what = describe_message(message)
    if isinstance(exc, TimeoutError):
        why = f" (RabbitMQ blocks publishers: {blocked})" if blocked else ""
        return PublishTimeoutError(
            f"no confirm for {what} in time{why}: it may be stored; repeat with the same event id",
            **ids,
        )
    text = str(getattr(exc, "reply_text", "") or exc)
    if isinstance(exc, (amqp_errors.NotFound, *_REFUSALS)) and _blames(text, message, alone):
        if isinstance(exc, amqp_errors.NotFound):
            return ExchangeMissingError(
                f"{text}: {what} was not published; run `manage.py events_declare`, or publish it "
                f"again if EXCHANGE has another name by now",
                **ids,
            )
        if isinstance(exc, amqp_errors.ContentTooLarge) or "message size" in text:
            return MessageTooLargeError(
                f"{text}: {what} was not published; publish a reference to the data", **ids
            )
        return PublishRefusedError(
            f"RabbitMQ refused {what} ({exc.reply_code}: {text}); check the user's permissions "
            f"and the broker's log",
            **ids,
        )
    return PublishInterruptedError(
        f"the connection broke before {what} was confirmed ({type(exc).__name__}: {exc}): it "
        f"may be stored; repeat with the same event id",
        **ids,
    )
