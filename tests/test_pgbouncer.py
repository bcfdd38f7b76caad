"""scripts/pgbouncer.py: tests behind it notice if something depends on a session."""

from __future__ import annotations

import pytest
from django.db import connections

from tests.acceptance.harness import until
from tests.conftest import Database, on

pytestmark = pytest.mark.slow


@on("pgbouncer")
def test_a_connection_has_its_statements_in_several_sessions(archive_database: Database) -> None:
    sessions: set[int] = set()

    def several() -> bool:
        with connections[archive_database.alias].cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            sessions.add(cursor.fetchone()[0])
        return len(sessions) > 1

    until(several, what="there are several sessions")
