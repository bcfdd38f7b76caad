"""The tables: archive, failure groups, replays, outbox, inbox, monitoring."""

from __future__ import annotations

from ..message.text import clean as clean
from ..message.text import visible as visible
from .archive import ArchiveAction as ArchiveAction
from .archive import ArchivedEvent as ArchivedEvent
from .archive import ArchivedFailure as ArchivedFailure
from .archive import Revision as Revision
from .archive import SearchValue as SearchValue
from .archive import State as State
from .base import LENGTH as LENGTH
from .groups import FailureGroup as FailureGroup
from .groups import GroupAction as GroupAction
from .inbox_entry import InboxEntry as InboxEntry
from .inbox_entry import LatestVersion as LatestVersion
from .monitoring import Alert as Alert
from .monitoring import Dashboard as Dashboard
from .monitoring import Snapshot as Snapshot
from .outbox_event import OutboxEvent as OutboxEvent
from .replays import Replay as Replay
from .replays import ReplayBatch as ReplayBatch
from .replays import ReplayBatchAction as ReplayBatchAction
