"""Celery's configuration, the same for plain Celery and the project.

With these options plain Celery loses nothing: confirms, late acks, requeue when a worker is lost,
quorum queues.
"""

from __future__ import annotations

from typing import Any

from .given import BROKER, GIVEN

OPTIONS: dict[str, Any] = {
    "broker_url": BROKER,
    "broker_transport_options": {"confirm_publish": True},
    "broker_connection_retry_on_startup": True,
    "broker_channel_error_retry": True,
    "worker_cancel_long_running_tasks_on_connection_loss": True,
    "worker_prefetch_multiplier": GIVEN.get("prefetch", 4),
    "worker_enable_remote_control": False,
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "task_ignore_result": True,
    "task_default_queue_type": GIVEN.get("queue_type", "quorum"),
    # Django's connections outlive a task: Celery's fixup would close them after each.
    "CELERY_DB_REUSE_MAX": 1_000_000,
}
