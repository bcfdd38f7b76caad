"""Waiting for what other processes do."""

from __future__ import annotations


class NotInTime(AssertionError):
    """What was waited for did not come before the deadline.

    On a machine that does several things at once that may be the machine. The test is run once
    more, and named (`only_rerun` in pyproject.toml, `TOO_MANY` in conftest.py); a count that is
    wrong never is.
    """
