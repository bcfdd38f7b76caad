"""Handlers for topologies that no worker runs."""

from __future__ import annotations


def handle(**payload):
    """Take anything."""
