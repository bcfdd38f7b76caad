"""A time-out is for the whole, however many addresses there are; odd management APIs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from django_amqp_events.broker import confirms
from django_amqp_events.broker.confirms import ConfirmChannel, accepts_publishes
from django_amqp_events.broker.connection import connect
from django_amqp_events.broker.provisioning.management_api import ManagementApi, ManagementApiError
from django_amqp_events.broker.publisher_pool import PublisherPool
from django_amqp_events.exceptions import AmqpEventsError, ConfigurationError
from django_amqp_events.message.types import Message
from django_amqp_events.publish.relay import OutboxChannel
from tests.waiting import Stopwatch

TIMEOUT = 0.6
MESSAGE = Message(exchange="events", routing_key="a.b", body=b"{}", headers={}, properties={})


def publish(target: PublisherPool | ConfirmChannel) -> None:
    [error] = target.publish([MESSAGE], mandatory=True)
    assert error is not None
    raise error


WAYS: dict[str, Callable[[Celery], object]] = {
    "connect": lambda app: connect(app, timeout=TIMEOUT),
    "pool": lambda app: publish(PublisherPool(app, timeout=TIMEOUT)),
    "channel": lambda app: publish(ConfirmChannel(app, timeout=TIMEOUT)),
    "relay": lambda app: publish(OutboxChannel(app, timeout=TIMEOUT)),
    "question": lambda app: accepts_publishes(app, TIMEOUT),
}


@pytest.mark.parametrize(
    ("urls", "addresses"), [(["amqp://rabbit"], 1), (["amqp://rabbit", "amqp://hare"], 3)]
)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_time_out_is_for_the_whole(
    way: Callable[[Celery], object],
    urls: list[str],
    addresses: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 9))
    tried: list[float] = []

    def stall(self: socket.socket, _: Any) -> None:
        tried.append(self.gettimeout() or 0.0)
        time.sleep(tried[-1])
        raise TimeoutError("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry] * addresses)
    monkeypatch.setattr(socket.socket, "connect", stall)
    app = Celery(set_as_current=False)
    app.conf.broker_url = urls
    watch = Stopwatch()
    with suppress(AmqpEventsError, OSError):
        assert not way(app)
    assert watch.seconds < 1.8 * TIMEOUT
    assert len(tried) == addresses * len(urls)


class Dripping:
    """Servers that answer without end, each time within the time-out."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.accepted = stack, 0

    def serve(self, first: bytes, then: bytes) -> str:
        """Start one, and return its address."""
        listener = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=self._drip, args=(listener, first, then), daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def _drip(self, listener: socket.socket, first: bytes, then: bytes) -> None:
        with suppress(OSError):
            client, _ = listener.accept()
            self.accepted += 1
            with client:
                client.recv(65536)
                client.sendall(first)
                while True:
                    time.sleep(TIMEOUT / 8)
                    client.sendall(then)


@pytest.fixture
def dripping() -> Iterator[Dripping]:
    with ExitStack() as stack:
        yield Dripping(stack)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("urls", [1, 2])
def test_a_handshake_without_end(dripping: Dripping, urls: int) -> None:
    """Each URL has its share of the time."""
    heartbeat = b"\x08\0\0\0\0\0\0\xce"
    app = Celery(set_as_current=False)
    app.conf.broker_url = [f"amqp://{dripping.serve(heartbeat, heartbeat)}" for _ in range(urls)]
    with pytest.raises(AmqpEventsError, match="no connection"):
        connect(app, timeout=TIMEOUT)
    assert dripping.accepted == urls


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("header", "piece"),
    [(b"Content-Length: 100000", b" "), (b"Transfer-Encoding: chunked", b"1\r\n \r\n")],
)
def test_a_response_without_end(dripping: Dripping, header: bytes, piece: bytes) -> None:
    address = dripping.serve(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % header, piece)
    api = ManagementApi(f"http://{address}", vhost="/", timeout=TIMEOUT)
    with pytest.raises(ManagementApiError, match="no whole response"):
        api.queues()


def test_a_broker_url_that_cannot_be_read() -> None:
    app = Celery(broker="amqp://u:pa[ss]word@rabbit//", set_as_current=False)
    with pytest.raises(ConfigurationError, match="the broker URL cannot be read") as raised:
        connect(app, timeout=TIMEOUT)
    assert "ss" not in str(raised.value).replace("password", "")


def test_answers_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ opens a channel late, and gives no answer after that."""
    limits: list[float] = []

    def channel() -> Any:
        time.sleep(0.9 * TIMEOUT)
        return SimpleNamespace(confirm_select=silence)

    def silence() -> None:
        raise TimeoutError("timed out")

    sock = SimpleNamespace(settimeout=limits.append)
    amqp = SimpleNamespace(transport=SimpleNamespace(sock=sock), channel=channel)
    conn = SimpleNamespace(connection=amqp)
    monkeypatch.setattr(confirms, "connect", lambda *_, **__: conn)
    with pytest.raises(AmqpEventsError, match="opened no channel"):
        publish(ConfirmChannel(Celery(set_as_current=False), timeout=TIMEOUT))
    assert limits[0] > TIMEOUT / 2 > limits[1]


# -- the management API ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["http://[::1:15672", "http://u:pa[ss@rabbit:15672", "http://u:p/w@rabbit", "http://a\u2100"],
)
def test_a_url_of_the_management_api_that_cannot_be_read(url: str) -> None:
    with pytest.raises(ManagementApiError, match="MANAGEMENT_URL"):
        ManagementApi(url, vhost="/")


def test_a_management_api_that_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ManagementApi, "get", lambda *_: [])
    with pytest.raises(ManagementApiError, match="/api/overview is not an object"):
        ManagementApi("http://rabbit:15672", vhost="/").check_cluster({})
