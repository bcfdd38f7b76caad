"""The tables: archive, failure groups, replay batches, outbox, inbox, monitoring."""

from __future__ import annotations

from .archive import (
    ArchiveAction,
    ArchivedEvent,
    ArchivedFailure,
    Replay,
    Revision,
    State,
)
from .base import (
    LENGTH,
    AppendOnly,
    AppendOnlyRows,
    Moment,
)
from .batches import ReplayBatch, ReplayBatchAction, ReplayBatchEvent
from .groups import (
    FailureGroup,
    GroupAction,
    GroupCountChange,
    GroupHour,
)
from .inbox import InboxEntry
from .monitoring import Alert, Dashboard, Snapshot
from .outbox import OutboxEvent
from .text import clean, visible

__all__ = [
    "LENGTH",
    "Alert",
    "AppendOnly",
    "AppendOnlyRows",
    "ArchiveAction",
    "ArchivedEvent",
    "ArchivedFailure",
    "Dashboard",
    "FailureGroup",
    "GroupAction",
    "GroupCountChange",
    "GroupHour",
    "InboxEntry",
    "Moment",
    "OutboxEvent",
    "Replay",
    "ReplayBatch",
    "ReplayBatchAction",
    "ReplayBatchEvent",
    "Revision",
    "Snapshot",
    "State",
    "clean",
    "visible",
]
