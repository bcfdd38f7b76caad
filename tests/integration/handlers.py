"""Handlers for topologies that no worker runs."""

from __future__ import annotations


def handle(**payload):
    """Take anything."""


def handle_too(**payload):
    """Take anything, under another name."""
