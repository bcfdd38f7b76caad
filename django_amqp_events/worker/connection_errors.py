"""React when RabbitMQ refuses a worker: a wrong password, a missing vhost, no permissions, a name.

Celery treats this as a lost connection and retries at once, five times a second and without end.
A worker that was never accepted is configured wrongly, so it ends. One that was accepted before
retries every few seconds, since a password or permissions may change while it runs.

Celery waits without limit for an answer on an open connection, so a broker that falls silent before
the event loop sends heartbeats would block the worker for ever. Here such a connection is lost.

A name is in use while another connection has the worker's exclusive queue for remote control. That
may be this worker's former connection, until RabbitMQ notices that it is dead.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from amqp.exceptions import AccessRefused, ResourceLocked
from celery import bootsteps
from celery.exceptions import WorkerShutdown

from ..broker.connection import broker_urls, close_socket, limit_waits, login_refusal
from ..logs import get_logger
from ..service_loop import sleep
from .celery_internals import shutdown_requested, state

logger = get_logger(__name__)

#: Seconds after a refusal before the next try.
REFUSED_SECONDS: Final = 5.0
#: Seconds after which a connection is lost if RabbitMQ does not answer.
SILENCE_SECONDS: Final = 60


class Login(bootsteps.StartStopStep):
    """A bootstep that is called when a connection fails, is lost or is established."""

    requires = ("celery.worker.consumer.connection:Connection",)
    label = "AMQP events login"

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self.consumer = c
        self._ensure_before, c.ensure_connected = c.ensure_connected, self._ensure_connected
        # With several brokers each attempt begins with the first; another may accept the worker.
        self._was_accepted = len(broker_urls(c.app.conf.broker_read_url)) > 1
        self._before, self._after = (
            c.on_connection_error_before_connected,
            c.on_connection_error_after_connected,
        )
        c.on_connection_error_before_connected = self._not_connected
        c.on_connection_error_after_connected = self._broken
        super().__init__(c, **kwargs)

    def start(self, c: Any) -> None:
        self._was_accepted = True

    def _ensure_connected(self, conn: Any) -> Any:
        connection = self._ensure_before(conn)
        if _is_rabbitmq(connection):
            limit_waits(connection, SILENCE_SECONDS, partial(self._silent, connection))
        return connection

    def _not_connected(self, exc: Exception) -> None:
        self._before(exc)
        refused = login_refusal(exc)
        if refused is None:
            return
        if not self._was_accepted:
            logger.critical("this worker does not start: %s", refused)
            raise WorkerShutdown(1) from exc
        _wait(str(refused))

    def _broken(self, exc: Exception) -> None:
        self._close_sockets()
        self._after(exc)
        # The login succeeded, but a permission is missing.
        if isinstance(exc, AccessRefused):
            _wait(f"{exc.reply_text}: check the user's permissions on this vhost")
        elif isinstance(exc, ResourceLocked):
            _wait(
                f"another connection uses the name {self.consumer.hostname}: that of a worker, "
                f"which needs another -n, or a former one of this worker, which RabbitMQ closes "
                f"when its heartbeats are missing"
            )

    def _silent(self, connection: Any) -> None:
        logger.error(
            "RabbitMQ does not answer: closing this worker's connections. The worker connects "
            "again, or ends if it is stopping. Check RabbitMQ and the network"
        )
        close_socket(connection)
        self._close_sockets()

    def _close_sockets(self) -> None:
        """Close the connections without a handshake, which would wait for an unreachable broker."""
        events = self.consumer.event_dispatcher
        for connection in (self.consumer.connection, events and events.connection):
            if connection is not None:
                close_socket(connection)


def _wait(refused: str) -> None:
    """Wait after a refusal.

    Raises:
        WorkerShutdown: the worker is asked to stop.
    """
    logger.error("%s; the next try is in %g s", refused, REFUSED_SECONDS)
    sleep(REFUSED_SECONDS, shutdown_requested)
    state.maybe_shutdown()


def _is_rabbitmq(connection: Any) -> bool:
    """Return False for a worker of ordinary tasks on another broker, such as in development."""
    return bool(connection.transport.driver_name == "py-amqp")
