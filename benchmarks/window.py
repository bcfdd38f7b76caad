"""The raw floor: publishing with py-amqp alone, one by one or with a sliding window of confirms.

It also fills the backlogs of all participants.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from urllib.parse import unquote, urlsplit

import amqp

#: Messages that may be unconfirmed at the same time.
WINDOW = 1000
#: Seconds to wait for the next confirm.
PATIENCE = 60.0


def connect(url: str) -> amqp.Connection:
    """Open a connection to a vhost."""
    found = urlsplit(url)
    connection = amqp.Connection(
        host=f"{found.hostname}:{found.port}",
        userid=unquote(found.username or "guest"),
        password=unquote(found.password or "guest"),
        virtual_host=unquote(found.path[1:]) or "/",
        connect_timeout=10,
    )
    connection.connect()
    return connection


class Window:
    """A channel with a sliding window of unconfirmed messages."""

    def __init__(self, url: str, size: int = WINDOW) -> None:
        self.size = size
        self.connection = connect(url)
        self.channel = self.connection.channel()
        self.channel.confirm_select()
        self.channel.events["basic_ack"].add(self._on_ack)
        self.channel.events["basic_nack"].add(self._on_nack)
        self._unconfirmed: dict[int, None] = {}
        self._tag = 0
        self.refused = 0

    def publish(self, messages: Iterable[tuple[amqp.Message, str, str]]) -> int:
        """Publish messages, each with its exchange and routing key.

        Returns:
            how many were confirmed.
        """
        before, refused = self._tag, self.refused
        for message, exchange, routing_key in messages:
            self._tag += 1
            self._unconfirmed[self._tag] = None
            self.channel.basic_publish(message, exchange, routing_key, mandatory=True)
            if len(self._unconfirmed) >= self.size:
                self._wait(self.size // 2)
        self._wait(0)
        return self._tag - before - (self.refused - refused)

    def _wait(self, until: int) -> None:
        while len(self._unconfirmed) > until:
            self.connection.drain_events(timeout=PATIENCE)

    def _settled(self, delivery_tag: int, multiple: bool) -> int:
        if not multiple:
            del self._unconfirmed[delivery_tag]
            return 1
        tags = list(takewhile(lambda tag: tag <= delivery_tag, self._unconfirmed))
        for tag in tags:
            del self._unconfirmed[tag]
        return len(tags)

    def _on_ack(self, delivery_tag: int, multiple: bool) -> None:
        self._settled(delivery_tag, multiple)

    def _on_nack(self, delivery_tag: int, multiple: bool) -> None:
        self.refused += self._settled(delivery_tag, multiple)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
