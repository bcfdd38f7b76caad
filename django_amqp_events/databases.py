"""Check that writes are committed."""

from __future__ import annotations

from django.db import connections

from .exceptions import ConfigurationError


def check_commits(alias: str) -> None:
    """Refuse to write where ``atomic()`` commits nothing; makes no query.

    Raises:
        ConfigurationError: autocommit is off; names the remedy.
    """
    connection = connections[alias]
    # A transaction that is open, as of a TestCase, is its owner's.
    if connection.in_atomic_block:
        return
    # Django sets it on a connection when that is made.
    made = connection.connection is not None
    if not (connection.autocommit if made else connection.settings_dict["AUTOCOMMIT"]):
        raise ConfigurationError(
            f"autocommit is off on the database {alias!r}, where transaction.atomic() then commits "
            f"nothing: what is written there is rolled back when the connection closes, so nothing "
            f"was done. Take AUTOCOMMIT out of its entry in DATABASES"
        )
