"""The tables: archive, failure groups, replay batches, outbox, inbox, monitoring."""

from __future__ import annotations

from .archive import ArchiveAction as ArchiveAction
from .archive import ArchivedEvent as ArchivedEvent
from .archive import ArchivedFailure as ArchivedFailure
from .archive import Replay as Replay
from .archive import Revision as Revision
from .archive import SearchValue as SearchValue
from .archive import State as State
from .base import LENGTH as LENGTH
from .batches import ReplayBatch as ReplayBatch
from .batches import ReplayBatchAction as ReplayBatchAction
from .batches import ReplayBatchEvent as ReplayBatchEvent
from .groups import FailureGroup as FailureGroup
from .groups import GroupAction as GroupAction
from .groups import GroupCountChange as GroupCountChange
from .groups import GroupHour as GroupHour
from .inbox import InboxEntry as InboxEntry
from .monitoring import Alert as Alert
from .monitoring import Dashboard as Dashboard
from .monitoring import Snapshot as Snapshot
from .outbox import OutboxEvent as OutboxEvent
from .text import clean as clean
from .text import visible as visible
