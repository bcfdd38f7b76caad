"""Checks of broker URLs, accounts and transports."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from ..options import Problem
from .project import Project

#: Largest message that RabbitMQ takes by default from 4.0 on (max_message_size).
BROKER_MAXIMUM: Final = 16 * 1024 * 1024


# -- the Celery app's configuration -------------------------------------------------------


#: Schemes that kombu hands to py-amqp, beside paths to its transport.
_TRANSPORTS: Final = ("amqp", "amqps", "pyamqp")


def check_transport(project: Project) -> Iterator[Problem]:
    """Brokers without what events rest on (E027)."""
    for transport in sorted({server.transport for server in project.servers}):
        # Only a worker or a publisher sees what a class of somebody's own is made of.
        own = ":" in transport or "." in transport
        if transport not in _TRANSPORTS and not own:
            near = difflib.get_close_matches(transport, _TRANSPORTS, n=1)
            yield Problem(
                "E027",
                f"The Celery app's broker is reached by {transport!r}, and not by py-amqp: nothing "
                f"can be published, and no worker starts.",
                f"Did you mean {near[0]}://?"
                if near
                else "Use RabbitMQ with pyamqp:// (or amqp://, where librabbitmq is not "
                "installed), or give events an app of their own with CELERY_APP.",
            )


# -- deployment ---------------------------------------------------------------------------


def check_accounts(project: Project) -> Iterator[Problem]:
    """RabbitMQ's well-known account, and passwords in the clear (W020, W022, W023)."""
    if any(s.user == "guest" and s.login_method.upper() != "EXTERNAL" for s in project.servers):
        yield Problem(
            "W020",
            "The Celery app logs in to the broker as guest, RabbitMQ's well-known account.",
            "Set broker_url with an account of this project's own, and delete guest.",
        )
    try:
        url = urlsplit(project.settings.management_url)
        host, user = url.hostname or "", url.username
    except ValueError:
        return
    if user == "guest":
        yield Problem(
            "W022",
            'AMQP_EVENTS["MANAGEMENT_URL"] logs in as guest, RabbitMQ\'s well-known account.',
            "Use an account with the tag management; declaring needs no more.",
        )
    if url.scheme == "http" and not _is_loopback(host):
        yield Problem(
            "W023",
            f'AMQP_EVENTS["MANAGEMENT_URL"] sends its password to {host!r} over plain http.',
            "Use https, or reach the management API on this machine.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
