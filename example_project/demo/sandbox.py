"""The part of a broker that the demo uses and cleans up."""

from __future__ import annotations

import http.client
import os
import secrets
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from .processes import RUN, DemoError

from broker import Broker, BrokerError, Node  # isort: skip - processes.py adds its path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A private node, or a vhost on the broker of AMQP_URL."""

    url: str
    management_url: str = ""
    vhost: str = ""
    node: Node | None = None

    def __str__(self) -> str:
        if self.node is not None:
            return f"RabbitMQ {self.node.version}, a private node"
        return f"AMQP_URL, vhost {self.vhost}"

    @classmethod
    def create(cls, *, keep: bool) -> Sandbox:
        """Start a private node, or use the broker of AMQP_URL.

        Raises:
            BrokerError, DemoError: there is no broker; the message names the remedies.
        """
        url, management = os.environ.get("AMQP_URL"), os.environ.get("AMQP_MANAGEMENT_URL", "")
        if not url:
            node = Node.start(RUN / "broker", die_with_parent=not keep)
            return cls(url=node.amqp_url(), management_url=node.management_url, node=node)
        name = f"demo-{secrets.token_hex(3)}"
        broker = Broker.from_urls(url, management or None)
        try:
            broker.add_vhost(name)
        except (OSError, BrokerError, http.client.HTTPException, ValueError) as exc:
            raise DemoError(
                f"No vhost can be created on the RabbitMQ of AMQP_URL ({urlsplit(url).hostname}): "
                f"{exc}. Correct AMQP_URL and AMQP_MANAGEMENT_URL, or unset AMQP_URL to start a "
                "private node."
            ) from exc
        own = urlsplit(url)._replace(path=f"/{quote(name, safe='')}").geturl()
        return cls(url=own, management_url=broker.management_url, vhost=name)

    def clean_up(self) -> None:
        """End the node, or delete the vhost."""
        if self.node is not None:
            self.node.end()
        else:
            Broker.from_urls(self.url, self.management_url or None).delete_vhost(self.vhost)
