"""A project with the admin's pages."""

from __future__ import annotations

import pytest
from django.test import override_settings

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
