"""Checks of libraries, broker URLs, accounts and transports."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from .. import versions
from ..options import Problem
from .project import Project

#: Schemes that kombu hands to py-amqp, besides paths to its transport.
_TRANSPORTS: Final = ("amqp", "amqps", "pyamqp")
#: Environment variables that Celery prefers to the settings of any app.
_VARIABLES: Final = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")


def check_versions(_project: Project) -> Iterator[Problem]:
    """Libraries in a version that is not supported (E031)."""
    for problem, remedy in versions.unsupported():
        yield Problem(
            "E031",
            f"{problem}. Nothing is published, and no worker starts.",
            f"{remedy[0].upper()}{remedy[1:]}.",
        )


def check_transport(project: Project) -> Iterator[Problem]:
    """Brokers that are not RabbitMQ through py-amqp (E027)."""
    for transport in sorted({server.transport for server in project.servers}):
        # A path names a class of the project, which may derive from py-amqp's transport.
        if transport in _TRANSPORTS or ":" in transport or "." in transport:
            continue
        near = difflib.get_close_matches(transport, _TRANSPORTS, n=1)
        yield Problem(
            "E027",
            f"The Celery app reaches its broker through {transport!r} instead of py-amqp: events "
            f"cannot be published, and no worker starts.",
            f"Did you mean {near[0]}://?"
            if near
            else "Use RabbitMQ with pyamqp:// (or amqp:// if librabbitmq is not installed). Tasks "
            "may stay there: make a second Celery app for events, and set CELERY_APP to it."
            f"{_overriding()}",
        )


def _overriding() -> str:
    names = [name for name in _VARIABLES if os.environ.get(name)]
    if not names:
        return ""
    named, them = " and ".join(names), "it" if len(names) == 1 else "them"
    return (
        f" Celery prefers {named} of the environment to the settings of every app: rename {them}."
    )


def check_accounts(project: Project) -> Iterator[Problem]:
    """RabbitMQ's well-known account, and passwords in clear text (W020, W022, W023)."""
    if any(s.user == "guest" and s.login_method.upper() != "EXTERNAL" for s in project.servers):
        yield Problem(
            "W020",
            "The Celery app logs in to the broker as guest, RabbitMQ's well-known account.",
            "Set broker_url with an account of this project, and delete guest.",
        )
    try:
        url = urlsplit(project.settings.management_url)
        host, user = url.hostname or "", url.username
    except ValueError:
        return
    if user == "guest":
        yield Problem(
            "W022",
            "AMQP_EVENTS['MANAGEMENT_URL'] logs in as guest, RabbitMQ's well-known account.",
            "Use another account with the tag management.",
        )
    if url.scheme == "http" and not _is_loopback(host):
        yield Problem(
            "W023",
            f"AMQP_EVENTS['MANAGEMENT_URL'] sends its password to {host!r} over plain http.",
            "Use https, or the management API on this machine.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
