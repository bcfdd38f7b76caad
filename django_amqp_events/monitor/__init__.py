"""Snapshots of the service, statistics, alerts, queue status."""

from __future__ import annotations

from typing import Final

#: The environment variable with the folder in which processes count together.
METRICS_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
