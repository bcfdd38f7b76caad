"""An exchange and a queue of a test's own, settings that publish to them, and a proxy between.

The proxy reads AMQP frames: it can hold back confirms, let them through later, write frames of
its own in the broker's name, stop without a word, and speak TLS.
"""

from __future__ import annotations

import itertools
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import amqp
from celery import Celery
from django.db import connections
from django.test import override_settings
from kombu.utils.url import parse_url

from broker import Node
from django_amqp_events.broker import publisher_pool
from django_amqp_events.broker.publisher_pool import PublisherPool
from django_amqp_events.conf import get_settings
from django_amqp_events.message.types import Message
from django_amqp_events.publish import direct_publisher
from tests import waiting

#: The Celery app of the test that runs; AMQP_EVENTS names it by its dotted path.
app = Celery("wire", set_as_current=False)

NAME = "shop.order.created"
#: Seconds after which something that should be bounded is taken to hang.
DEADLINE = 60.0

until = waiting.until

_names = itertools.count()

ACK = (60, 80)
NACK = (60, 120)


class Wire:
    """One test's view of the broker."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url = url
        self.stack = stack
        self.exchange = f"events-{next(_names)}"
        self.queue = f"{self.exchange}.all"
        connection = raw_connection(url)
        stack.callback(connection.collect)
        self.channel = connection.channel()
        self.channel.auto_decode = False
        self.channel.exchange_declare(self.exchange, "topic", durable=True, auto_delete=False)
        self.declare(self.queue, "#")

    @classmethod
    @contextmanager
    def on(cls, url: str, **keys: Any) -> Iterator[Wire]:
        """Declare, and put settings in force that publish there, for a block."""
        with ExitStack() as stack:
            wire = cls(url, stack)
            wire.configure(**keys)
            yield wire

    def configure(
        self, *, url: str = "", celery: dict[str, Any] | None = None, **keys: Any
    ) -> None:
        """Publish from now on with a new Celery app, and pool, and these keys of AMQP_EVENTS."""
        global app  # noqa: PLW0603 - CELERY_APP is a dotted path
        close_pools()
        app = Celery("wire", broker=url or self.url, set_as_current=False)
        app.conf.update(celery or {})
        self.stack.callback(close_pools)
        raw = {
            "SERVICE": "shop",
            "AUTODISCOVER": [],
            "CELERY_APP": f"{__name__}.app",
            "EXCHANGE": self.exchange,
            "PUBLISH": "immediate",
            "CONFIRM_TIMEOUT": 20,
            **keys,
        }
        self.stack.enter_context(override_settings(AMQP_EVENTS=raw))

    @property
    def pool(self) -> PublisherPool:
        return publisher_pool.publisher_pool(get_settings())

    def proxy(self, **options: Any) -> Proxy:
        """Return a proxy to the broker that ends with the test."""
        return self.stack.enter_context(Proxy.to(self.url, **options))

    def message(self, body: bytes = b"[[],{},{}]", **changes: Any) -> Message:
        """Build a message as other parts of the library hand them to the pool."""
        event_id = str(uuid4())
        values: dict[str, Any] = {
            "exchange": self.exchange,
            "routing_key": NAME,
            "body": body,
            "headers": {},
            "properties": {"message_id": event_id, "delivery_mode": 2},
            "event_id": event_id,
            "name": NAME,
            **changes,
        }
        return Message(**values)

    # -- the broker's side

    def declare(self, queue: str, *keys: str, **arguments: Any) -> None:
        self.channel.queue_declare(
            queue,
            durable=True,
            auto_delete=False,
            arguments={"x-queue-type": "quorum", **arguments},
        )
        for key in keys:
            self.channel.queue_bind(queue, self.exchange, key)

    def unbind(self) -> None:
        """Let no queue be bound."""
        self.channel.queue_unbind(self.queue, self.exchange, "#")

    def take(self, queue: str = "", *, about: int = 0) -> list[amqp.Message]:
        """Take what is in the queue, acked; quickly, where it holds *about* that many."""
        queue = queue or self.queue
        messages: list[amqp.Message] = []
        if about:
            tag = self.channel.basic_consume(queue, no_ack=True, callback=messages.append)
            until(lambda: self._read(messages, about), f"{about} messages, got {len(messages)}")
            self.channel.basic_cancel(tag)
        return messages + drain(self.channel, queue)

    def _read(self, messages: list[amqp.Message], about: int) -> bool:
        with suppress(TimeoutError):
            while len(messages) < about:
                self.channel.connection.drain_events(timeout=1)
        return len(messages) >= about

    def payloads(self, queue: str = "") -> list[dict[str, Any]]:
        """Take what is in the queue, and return the events' arguments."""
        return [json.loads(message.body)[1] for message in self.take(queue)]

    def ids(self, *, about: int = 0) -> list[str]:
        return [message.properties["message_id"] for message in self.take(about=about)]


def raw_connection(url: str) -> amqp.Connection:
    parts = parse_url(url)
    connection = amqp.Connection(
        host=f"{parts['hostname']}:{parts['port']}",
        userid=parts["userid"],
        password=parts["password"],
        virtual_host=parts["virtual_host"],
    )
    connection.connect()
    return connection


def drain(channel: amqp.Channel, queue: str) -> list[amqp.Message]:
    messages = []
    while (message := channel.basic_get(queue)) is not None:
        messages.append(message)
    if messages:
        channel.basic_ack(messages[-1].delivery_tag, multiple=True)
    return messages


# -- the proxy --------------------------------------------------------------------------------


def ack(tag: int, *, multiple: bool = False, nack: bool = False) -> bytes:
    """Write the frame of a confirm, as the broker does."""
    method = struct.pack(">HHQB", *(NACK if nack else ACK), tag, int(multiple))
    return struct.pack(">BHI", 1, 1, len(method)) + method + b"\xce"


#: connection.blocked ("low on memory") and connection.unblocked.
BLOCKED = b"\x01\0\0\0\0\0\x12" + b"\0\x0a\0\x3c\x0dlow on memory" + b"\xce"
UNBLOCKED = b"\x01\0\0\0\0\0\x04" + b"\0\x0a\0\x3d" + b"\xce"


@dataclass
class Link:
    """One client's connection through the proxy."""

    client: socket.socket
    server: socket.socket
    held: list[bytes] = field(default_factory=list)
    closed: bool = False
    dead: bool = False
    #: Directions in which something may still come.
    open: int = 2
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, data: bytes) -> None:
        """Write to the client in the broker's name."""
        with self.lock, suppress(OSError):
            self.client.sendall(data)

    def release(self) -> None:
        """Let through what was held back."""
        held, self.held = self.held, []
        self.write(b"".join(held))

    def close(self) -> None:
        self.closed = True
        for sock in (self.client, self.server):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A TCP proxy in front of the broker.

    Attributes:
        hold: methods whose frames are held back, with their content; ``{ACK, NACK}``.
        everything: all frames are held back but the first *passes* of each connection.
        flowing: cleared, nothing is read or written in either direction.
    """

    def __init__(self, url: str, tls: Path | None = None) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._context: ssl.SSLContext | None = None
        if tls:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(tls)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = url.replace(f"@{parts.hostname}:{parts.port}", f"@127.0.0.1:{port}")
        self.hold: set[tuple[int, int]] = set()
        self.everything = False
        self.passes = 0
        self.flowing = threading.Event()
        self.flowing.set()
        self.links: list[Link] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._start(self._accept)

    @classmethod
    @contextmanager
    def to(cls, url: str, **options: Any) -> Iterator[Proxy]:
        proxy = cls(url, **options)
        try:
            yield proxy
        finally:
            proxy.end()

    def end(self) -> None:
        self._ended.set()
        self.flowing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self.links:
            link.close()
        for thread in self._threads:
            thread.join(10)
        for link in self.links:
            link.client.close()
            link.server.close()

    def release(self) -> None:
        """Hold nothing back any more, and let through what was."""
        self.hold, self.everything = set(), False
        for link in self.links:
            link.release()

    def forget(self) -> None:
        """Let only new connections flow, as after a firewall's restart.

        Those of now are dead, and neither side is told.
        """
        for link in self.links:
            link.dead = True
        self.flowing.set()

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                continue
            try:
                if self._context is not None:
                    client = self._context.wrap_socket(client, server_side=True)
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            link = Link(client, server)
            self.links.append(link)
            self._start(self._upwards, link)
            self._start(self._downwards, link)

    def _upwards(self, link: Link) -> None:
        with suppress(OSError):
            while (data := link.client.recv(65536)) and self._flows(link):
                link.server.sendall(data)
        self._close(link)

    def _downwards(self, link: Link) -> None:
        with suppress(OSError, struct.error), link.server.makefile("rb") as stream:
            holding, seen = False, 0
            while head := stream.read(7):
                kind, _, size = struct.unpack(">BHI", head)
                payload = stream.read(size + 1)
                if not self._flows(link):
                    break
                if kind == 1:
                    holding = struct.unpack(">HH", payload[:4]) in self.hold
                seen += 1
                if holding or (self.everything and seen > self.passes):
                    link.held.append(head + payload)
                else:
                    link.write(head + payload)
        self._close(link)

    def _flows(self, link: Link) -> bool:
        self.flowing.wait()
        return not link.dead

    def _close(self, link: Link) -> None:
        """Close the other end too; of a dead link that does not hear of it."""
        if not self._flows(link):
            self._ended.wait()
        link.close()
        with link.lock:
            link.open -= 1
        if not link.open:
            link.client.close()
            link.server.close()


@contextmanager
def message_size(node: Node, size: int) -> Iterator[None]:
    """Let a node refuse larger messages on channels that are opened in this block."""

    def limit(size: int) -> None:
        node.ctl(
            "eval",
            # Up to 3.x, and since 4.0.
            f"application:set_env(rabbit, max_message_size, {size}), "
            f"persistent_term:put(max_message_size, {size}).",
        )

    limit(size)
    try:
        yield
    finally:
        limit(16 * 1024 * 1024)


def finished(*threads: threading.Thread) -> None:
    """Wait for threads that must not hang."""
    for thread in threads:
        thread.join(DEADLINE)
        if thread.is_alive():
            raise waiting.NotInTime("a thread hangs")


def close_pools() -> None:
    """Close all connections that publish, and let the next publish make its own."""
    # A thread that outlives its test would find its database gone, and leave it open.
    direct_publisher.close_direct_publishers(10)
    publisher_pool.close_pools()
    publisher_pool._pools.clear()


def in_threads(count: int, work: Callable[[int], object]) -> Sequence[BaseException]:
    """Run *work* in that many threads; return what they raised."""
    raised: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as exc:  # noqa: BLE001 - it is handed on
            raised.append(exc)
        finally:
            connections.close_all()  # this thread's; on_commit looks at the transaction

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    finished(*threads)
    return raised
