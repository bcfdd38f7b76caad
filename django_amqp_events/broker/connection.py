"""Connect to RabbitMQ. The only place that opens a socket."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from amqp import exceptions as amqp_errors
from amqp.method_framing import frame_handler
from celery import Celery
from celery.app import app_or_default
from django.utils.module_loading import import_string
from kombu import Connection

from ..conf import Settings
from ..exceptions import (
    BrokerUnavailableError,
    ConfigurationError,
)
from ..reasons import Reason
from . import amqp_internals

#: Errors that py-amqp and its sockets raise. Others come from elsewhere, such as Celery's
#: SoftTimeLimitExceeded from a signal handler, and are not the broker's failure.
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


def current_celery_app() -> Celery:
    """Return the current Celery app and not its proxy, whose identity differs by thread."""
    app: Celery = app_or_default()
    return app


def is_default_app(app: Celery) -> bool:
    """Return True if *app* is the default app that Celery creates for a project without one.

    It is made by ``celery._state._get_current_app`` as ``Celery("default",
    set_as_current=False)``; both are public attributes.
    """
    return bool(app.main == "default" and not app.set_as_current)


def broker_app(settings: Settings) -> Celery:
    """Return :func:`celery_app` for a process that consumes or administers.

    Raises:
        ConfigurationError: as :func:`celery_app`, or ``BACKEND`` replaces RabbitMQ.
    """
    if settings.backend != "amqp":
        raise ConfigurationError(
            f"AMQP_EVENTS['BACKEND'] is {settings.backend!r}, so events are handled in the process "
            f"that publishes them; remove it to use RabbitMQ"
        )
    return celery_app(settings)


def celery_app(settings: Settings) -> Celery:
    """Return the project's Celery app: ``CELERY_APP``, or the current one.

    Raises:
        ConfigurationError: ``CELERY_APP`` cannot be imported or is not a Celery app, or the
            current app is Celery's default, whose broker is on localhost.
    """
    if not settings.celery_app:
        app = current_celery_app()
        if is_default_app(app):
            raise ConfigurationError(
                "the project has no Celery app, or none that is current in this thread; create one "
                "as in Celery's guide for Django and import it in the project's __init__.py, or "
                'name it: AMQP_EVENTS["CELERY_APP"] = "project.celery.app"'
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


def handler_app(settings: Settings) -> Celery:
    """Return the app of the handlers' tasks: as :func:`celery_app`, or Celery's default.

    ``CELERY_APP`` comes first, since in its worker another app of the project may be current.
    """
    return celery_app(settings) if settings.celery_app else current_celery_app()


def broker_urls(option: str | Sequence[str] | None) -> Sequence[str]:
    """Return the brokers in a URL option of Celery; ``[""]``, the default, if it names none."""
    return option.split(";") if isinstance(option, str) else option or [""]


def build_connection(app: Celery, **options: Any) -> Connection:
    """Return an unopened connection for publishing.

    Raises:
        ConfigurationError: the broker URL is not RabbitMQ's.
    """
    scheme, separator, _ = broker_urls(app.conf.broker_write_url)[0].partition("://")
    if not app.conf.broker_transport and (not separator or scheme.lower() == "amqp"):
        # For amqp, kombu tries to import librabbitmq for each connection. A process that is forked
        # meanwhile could never connect: its copy of the module's import lock is not released.
        options["transport"] = "pyamqp"
    try:
        connection: Connection = app.connection_for_write(**options)
        driver = connection.transport.driver_name
    except Exception as exc:
        # kombu imports the transport here, and raises AttributeError if its library is missing.
        raise ConfigurationError(
            f"the transport of the broker URL cannot be used ({type(exc).__name__}: {exc}); events "
            f"need RabbitMQ (amqp://…) and py-amqp"
        ) from exc
    if driver != "py-amqp":
        raise ConfigurationError(
            f"the broker URL is {connection.as_uri()}; events need RabbitMQ (amqp://…) and py-amqp"
        )
    return connection


def login_refusal(exc: BaseException) -> Reason | None:
    """Explain why RabbitMQ refused the login and what to do; ``None`` for other errors."""
    if isinstance(exc, amqp_errors.AccessRefused):
        return Reason("remedy-login")
    return Reason("remedy-vhost") if isinstance(exc, amqp_errors.NotAllowed) else None


def count_addresses(*hosts: str) -> int:
    """Return how many addresses some hosts have together: each may take the time to connect."""
    count = 0
    for host in hosts:
        with suppress(OSError):
            count += len(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    return count or 1


def connect(app: Celery, *, timeout: float, **transport_options: Any) -> Connection:
    """Open a connection for publishing; try each of the broker's addresses once.

    Args:
        timeout: seconds for all addresses together, and for any single read or write.

    Raises:
        BrokerUnavailableError: no address answered, or the login was refused.
        ConfigurationError: the broker URL is not RabbitMQ's, or py-amqp is not supported.
    """
    amqp_internals.check()
    urls = broker_urls(app.conf.broker_write_url)
    end = time.monotonic() + timeout
    failed: list[Exception] = []

    def timely(amqp: Any, on_method: Callable[..., Any]) -> Callable[..., Any]:
        """Return py-amqp's reader of frames, for a handshake that ends in time as a whole."""
        handle: Callable[..., Any] = frame_handler(amqp, on_method)
        # The URLs after this one get their shares.
        until = end - timeout * (len(urls) - 1 - len(failed)) / len(urls)

        def read(frame: object) -> Any:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            # py-amqp's is for the next read.
            amqp.connect_timeout = left
            return handle(frame)

        return read

    options: dict[str, Any] = {
        "frame_handler": timely,
        # ConfirmChannel matches confirms by delivery tag.
        "confirm_publish": False,
        "write_timeout": timeout,
        **transport_options,
    }
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # py-amqp's default, 1 s, would end connections to a broker that is slow to read.
        options["socket_settings"] = {
            socket.TCP_USER_TIMEOUT: int(timeout * 1000),
            **(app.conf.broker_transport_options.get("socket_settings") or {}),
        }
    try:
        addresses = count_addresses(*(urlsplit(url).hostname or "localhost" for url in urls))
    except ValueError:  # it may quote the password
        raise ConfigurationError(
            "the broker URL cannot be read; write special characters of its user and password as "
            "%40 and the like"
        ) from None
    connection = build_connection(
        app, connect_timeout=timeout / addresses, transport_options=options
    )
    try:
        connection.ensure_connection(
            errback=lambda exc, _: failed.append(exc),
            max_retries=len(urls) - 1,
            interval_start=0,
            interval_step=0,
            reraise_as_library_errors=False,
            timeout=timeout,
        )
        amqp = connection.connection
        amqp.on_inbound_frame = frame_handler(amqp, amqp.on_inbound_method)
        # Otherwise py-amqp waits forever for answers, such as that to opening a channel.
        amqp.transport.sock.settimeout(timeout)
    except AMQP_ERRORS as exc:
        close_socket(connection)
        url = connection.as_uri().removeprefix("py")
        error = f"{type(exc).__name__}: {exc}"
        remedy = login_refusal(exc) or Reason("remedy-broker")
        raise BrokerUnavailableError(
            Reason("no-connection", url=url, error=error, remedy=remedy)
        ) from exc
    return connection


@contextmanager
def connection(app: Celery, *, timeout: float, **transport_options: Any) -> Iterator[Connection]:
    """Open a connection for a block; see :func:`connect`."""
    conn = connect(app, timeout=timeout, **transport_options)
    try:
        yield conn
    finally:
        close_socket(conn)


def limit_waits(conn: Connection, seconds: int, on_silence: Callable[[], None]) -> None:
    """Let a wait for an answer of RabbitMQ end with TimeoutError after *seconds*.

    Unlike the socket's own time-out, it does not slow down reads in an event loop, which poll. With
    TLS, py-amqp itself limits each wait to the time-out for connecting.

    Args:
        on_silence: called before the error is raised, if the wait had no time-out of its own. It
            must close the socket: a worker that stops asks for about ten answers, and would wait
            for each.
    """
    amqp = conn.connection
    amqp.transport.raise_on_initial_eintr = True  # otherwise py-amqp waits again
    limit = struct.pack("ll", seconds, 0)
    amqp.transport.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    drain_before = amqp.drain_events

    def drain_events(timeout: float | None = None) -> None:
        try:
            drain_before(timeout)
        except TimeoutError:
            if timeout is None:
                on_silence()
            raise

    amqp.drain_events = drain_events


def close_socket(conn: Connection) -> None:
    """Close the socket without the closing handshake, which could wait for a dead broker."""
    with suppress(Exception):
        if conn.connected:
            # TLS has a closing handshake too.
            conn.connection.transport.sock.settimeout(0)
    with suppress(Exception):
        conn.collect()
