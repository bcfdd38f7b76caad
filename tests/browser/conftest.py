"""A browser, a console to look at, and axe-core: one of each for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import Broker
from chromium import Chromium
from tests.conftest import _vhost

from .console import Console, axe_core, serving

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give time to install what is missing: Chromium, npm."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core's program."""
    return axe_core()


@pytest.fixture(scope="session")
def window() -> Iterator[Chromium]:
    with Chromium() as opened:
        yield opened


@pytest.fixture
def browser(window: Chromium) -> Chromium:
    """A wide, light window with no user logged in."""
    window.forget()
    window.look("light", 1280)
    window.complaints()
    return window


@pytest.fixture(scope="session")
def console(rabbit: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """Every page, in a project that is served under the policy of docs/admin-site.md."""
    where: Path = tmp_path_factory.mktemp("console")
    with (
        _vhost(rabbit, "console") as vhost,
        serving(vhost.url, vhost.management_url, where) as served,
    ):
        yield served
