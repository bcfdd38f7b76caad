"""Connections to RabbitMQ and its management API; the integration suite opens them."""

from __future__ import annotations

from typing import Any

import kombu.connection
import pytest
from celery import Celery

from django_amqp_events.broker.connection import build_connection
from django_amqp_events.broker.provisioning.management_api import ManagementApi, ManagementApiError


@pytest.mark.parametrize(
    "options",
    [
        {"broker_url": "amqp://u:p@rabbit:5673/v"},
        {"broker_url": "AMQP://rabbit//"},
        {"broker_url": "amqp://one;amqp://two"},
        {"broker_url": ["amqp://one", "amqp://two"]},
        {"broker_url": "amqps://rabbit"},
        {"broker_url": "pyamqp://rabbit"},
        {"broker_url": "amqp://rabbit", "broker_transport": "pyamqp"},
        {},
    ],
)
def test_a_connection_imports_no_other_library(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A process that is forked during the import, in another thread, could not connect."""

    def import_it() -> None:
        raise AssertionError("kombu imports librabbitmq")

    monkeypatch.setattr(kombu.connection, "supports_librabbitmq", import_it)
    app = Celery(set_as_current=False)
    app.conf.update(options)
    assert build_connection(app).transport.driver_name == "py-amqp"


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
