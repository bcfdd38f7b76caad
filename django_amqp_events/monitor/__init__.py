"""Snapshots of the service, statistics, alerts, queue status."""
