"""A private database server."""

from __future__ import annotations

import threading

import pytest

from postgresql import Postgres

pytestmark = pytest.mark.slow


def test_a_server_outlives_the_thread_that_starts_it_again() -> None:
    server = Postgres.start()
    try:
        server.kill()
        thread = threading.Thread(target=server.start_again)
        thread.start()
        thread.join()
        assert server.execute("SELECT 1") == [(1,)]
        assert server.alive
    finally:
        server.end()
