"""Failure groups: archived events that failed alike."""
