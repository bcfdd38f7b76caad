"""A project with the admin's pages, and a stand-in for the broker."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import override_settings

from django_amqp_events.publish import publisher

from . import admin_world as world


@pytest.fixture(autouse=True, scope="module")
def pages_of_a_project():
    # Once: with other TEMPLATES Django would compile all of them again.
    with override_settings(**world.SETTINGS):
        yield


@pytest.fixture(autouse=True)
def project(pages_of_a_project):
    with override_settings(AMQP_EVENTS=world.EVENTS):
        yield


class Wire:
    """Stands where the broker's connection is: what is published, and its answers."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.errors: list[Any] = []

    def publish(self, messages: list[Any], *, mandatory: bool) -> list[Any]:
        assert mandatory
        self.messages += messages
        return [self.errors.pop(0) if self.errors else None for _ in messages]


@pytest.fixture
def wire(monkeypatch):
    made = Wire()
    monkeypatch.setattr(publisher, "backend", lambda settings: made)
    return made
