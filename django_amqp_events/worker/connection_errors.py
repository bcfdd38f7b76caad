"""React when RabbitMQ refuses a worker: a wrong password, a missing vhost, no permissions, a name.

Celery treats this as a lost connection and retries at once, five times a second and without end.
A worker that was never accepted is configured wrongly, so it ends. One that was accepted before
retries with a growing delay, since a password or permissions may change while it runs.

Celery waits without limit for an answer on an open connection, so a broker that falls silent before
the event loop sends heartbeats would block the worker for ever. Here such a connection is lost.

A name is in use while another connection has the worker's exclusive queue for remote control. That
may be this worker's former connection, until RabbitMQ notices that it is dead, which it does by
heartbeats only; without them the worker answers to another name.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from time import monotonic, sleep
from typing import Any, Final

from amqp.exceptions import AccessRefused, NotFound, ResourceLocked
from celery import bootsteps
from celery.exceptions import WorkerShutdown

from .. import liveness
from ..backoff import Backoff
from ..broker.connection import broker_urls, close_socket, limit_waits, login_refusal
from ..conf import get_settings
from .celery_internals import rename_mailbox, state

logger = logging.getLogger(__name__)

#: Delays before the next try. They restart when twice the longest has passed without a refusal.
BACKOFF: Final = Backoff(1.0, 30.0)
#: Seconds after which a connection is lost if RabbitMQ does not answer.
SILENCE_SECONDS: Final = 60
#: Seconds between two checks whether the worker is asked to stop.
STOP_CHECK: Final = 0.2
#: Seconds between checks whether the name is free, and for which a worker that starts waits: the
#: connection of a killed one takes a moment to close.
NAME_CHECK: Final = 1.0
NAME_PATIENCE: Final = 3.0
#: Heartbeats after which RabbitMQ has certainly closed a dead connection.
DEAD_HEARTBEATS: Final = 3


class Login(bootsteps.StartStopStep):
    """A bootstep that is called when a connection fails, is lost or is established."""

    requires = ("celery.worker.consumer.connection:Connection",)
    label = "AMQP events login"

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self._refusals, self._last = 0, -math.inf
        self._had_name = self._warned = False
        self._changes = 0
        self.consumer, self.app, self.mailbox_name = c, c.app, c.hostname
        _claim_names(c.app.control.mailbox)
        self._connect_before, c.connect = c.connect, self._connect
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
        if not self._warned and not c.connection.get_heartbeat_interval():
            self._warned = True
            logger.warning(
                "this worker's connection has no heartbeats, so RabbitMQ may keep a dead one, with "
                "its deliveries, for hours. The worker notices it by TCP's keepalive, but never "
                "if a load balancer answers for RabbitMQ. Set broker_heartbeat to 60 or so"
            )

    def _connect(self) -> Any:
        # Not earlier: the pool has been forked, and RabbitMQ may be unreachable for long.
        liveness.listen(get_settings())
        connection = self._connect_before()
        if self.app.conf.worker_enable_remote_control and _is_rabbitmq(connection):
            try:
                self._wait_for_name(connection)
            except BaseException:
                close_socket(connection)
                raise
        return connection

    def _ensure_connected(self, conn: Any) -> Any:
        connection = self._ensure_before(conn)
        if _is_rabbitmq(connection):
            limit_waits(connection, SILENCE_SECONDS, partial(self._silent, connection))
        return connection

    def _wait_for_name(self, connection: Any) -> None:
        """Wait while another connection has this worker's name.

        Raises:
            WorkerShutdown: it is not a former connection of this worker.
        """
        heartbeat = connection.get_heartbeat_interval()
        patience = NAME_PATIENCE
        if self._had_name:
            patience = DEAD_HEARTBEATS * heartbeat or SILENCE_SECONDS
        queue = self.app.control.mailbox.get_queue(self.mailbox_name).name
        began = monotonic()
        reported = False
        while _is_locked(connection, queue):
            if monotonic() >= began + patience:
                if self._had_name and not heartbeat:
                    self._change_name()
                    return
                logger.critical(
                    "this worker ends: another worker named %s is connected to this vhost; pass "
                    "another -n",
                    self.mailbox_name,
                )
                raise WorkerShutdown(1)
            if not reported:
                reported = True
                logger.warning(
                    "another connection uses the name %s; waiting until it is closed",
                    self.mailbox_name,
                )
            _sleep(NAME_CHECK)

    def _change_name(self) -> None:
        """Answer remote control by another name, as RabbitMQ may keep the former connection."""
        self._changes += 1
        self.mailbox_name = f"{self.consumer.hostname}.{self._changes}"
        rename_mailbox(self.consumer, self.mailbox_name)
        logger.warning(
            "RabbitMQ still has the former connection of this worker. Remote control of it has the "
            "name %s until it restarts. Set broker_heartbeat, so that RabbitMQ closes dead ones",
            self.mailbox_name,
        )

    def _not_connected(self, exc: Exception) -> None:
        self._before(exc)
        refused = login_refusal(exc)
        if refused is None:
            return
        if not self._was_accepted:
            logger.critical("this worker does not start: %s", refused)
            raise WorkerShutdown(1) from exc
        self._wait(str(refused))

    def _broken(self, exc: Exception) -> None:
        self._close_sockets()
        self._after(exc)
        if not isinstance(exc, ResourceLocked):
            self._had_name = True
        # The login succeeded, but a permission is missing.
        if isinstance(exc, AccessRefused):
            self._wait(f"{exc.reply_text}: check the user's permissions on this vhost")

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

    def _wait(self, refused: str) -> None:
        now = monotonic()
        if now - self._last > 2 * BACKOFF.last:
            self._refusals = 0
        wait = BACKOFF.delay(self._refusals)
        logger.error("%s; the next try is in %g s", refused, wait)
        _sleep(wait)
        self._refusals, self._last = self._refusals + 1, monotonic()


def _sleep(seconds: float) -> None:
    """Wait, unless the worker is asked to stop.

    Raises:
        WorkerShutdown: it is.
    """
    until = monotonic() + seconds
    while monotonic() < until:
        state.maybe_shutdown()
        sleep(STOP_CHECK)


def _claim_names(mailbox: Any) -> None:
    """Make the queues of workers for remote control exclusive, as Celery itself does since 5.7.

    Two workers of one name would share such a queue, and each would answer half of the questions.
    """
    get_queue = mailbox.get_queue

    def get_exclusive_queue(hostname: str) -> Any:
        queue = get_queue(hostname)
        queue.exclusive = not queue.durable
        return queue

    mailbox.get_queue = get_exclusive_queue


def _is_rabbitmq(connection: Any) -> bool:
    """Return False for a worker of ordinary tasks on another broker, such as in development."""
    return bool(connection.transport.driver_name == "py-amqp")


def _is_locked(connection: Any, queue: str) -> bool:
    """Return True if a queue is exclusive to another connection."""
    channel = connection.channel()
    try:
        channel.queue_declare(queue, passive=True)
    except (NotFound, ResourceLocked) as exc:
        # py-amqp has opened the channel again.
        return isinstance(exc, ResourceLocked)
    finally:
        channel.close()
    return False
