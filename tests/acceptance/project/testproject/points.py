"""Points at which a process of the project kills itself, as TESTPROJECT_POINTS says.

``{"within": {"times": 5, "every": 7, "whom": "worker"}}``: five events, about one in seven of
those that come by, each kill the process at that point; the whole process group with ``worker``.
No event is hit twice: an event that killed again and again would be poison, which is another row.
What is about to happen is on the disk before it happens.
"""

from __future__ import annotations

import json
import os
import signal
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import ledger

POINTS: dict[str, dict[str, Any]] = json.loads(os.environ.get("TESTPROJECT_POINTS", "{}"))
WHERE = Path(os.environ["TESTPROJECT_DIR"])


def point(name: str, event_id: str, hand: int = 0) -> None:
    """Kill this process, or its group, if it is this event's turn.

    Args:
        hand: how many events the process has in hand, where it is not the worker's one.
    """
    if (plan := POINTS.get(name)) is None:
        return
    if zlib.crc32(f"{plan.get('seed', 0)}{event_id}".encode()) % plan.get("every", 1):
        return
    if not _mine(f"point-{name}-{event_id}"):
        return
    if not any(_mine(f"point-{name}.{number}") for number in range(plan["times"])):
        return
    ledger.write(
        "killed", point=name, by=event_id, signal=int(signal.SIGKILL), hand=hand,
        whom=plan.get("whom", "self"),
    )  # fmt: skip
    if plan.get("whom") == "worker":
        os.killpg(os.getpgid(0), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _mine(name: str) -> bool:
    try:
        os.close(os.open(WHERE / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def arm() -> None:
    """Put the points that are not the handlers' own into the package."""
    if lease := os.environ.get("TESTPROJECT_LEASE"):
        _shorten(float(lease))
    if heartbeat := os.environ.get("TESTPROJECT_HEARTBEAT"):
        _notice(int(heartbeat))
    if not POINTS:
        return
    from celery.signals import task_postrun, task_prerun

    from django_amqp_events.archive import replay, states
    from django_amqp_events.broker.batch_reader import BatchReader
    from django_amqp_events.broker.confirms import ConfirmChannel
    from django_amqp_events.publish import outbox_rows
    from django_amqp_events.publish.direct_publisher import DirectPublisher

    def of_the_event(name: str) -> Callable[..., None]:
        def run(task: Any, **_: Any) -> None:
            if event := getattr(task, "event", None):
                point(name, event.id)

        return run

    task_prerun.connect(of_the_event("before"), weak=False)
    task_postrun.connect(of_the_event("after"), weak=False)

    publish = ConfirmChannel.publish

    def published(channel: Any, messages: Any, **options: Any) -> Any:
        errors = publish(channel, messages, **options)
        for message, error in zip(messages, errors, strict=True):
            kind = message.exchange.partition(":")[2].partition(".")[0]
            if error is None and kind in ("delay", "archive"):
                point(f"{kind}-confirmed", message.event_id)
        return errors

    ConfirmChannel.publish = published  # type: ignore[method-assign, assignment]

    def first(owner: Any, name: str, at: str, ids: Callable[..., Iterable[str]]) -> None:
        """Come by a point before a function does its work."""
        real = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            hand = list(ids(*args, **options))
            for event_id in hand:
                point(at, event_id, len(hand))
            return real(*args, **options)

        setattr(owner, name, run)

    def committed(_: Any, commit: Any) -> list[str]:
        ids = [row.message.event_id for row in commit.rows]
        if "committed" in POINTS:
            # Whoever is killed here cannot say it any more: the transaction has committed.
            ledger.write("committed", events=ids)
        return ids

    first(DirectPublisher, "deliver", "committed", committed)
    first(
        outbox_rows,
        "delete_confirmed",
        "relayed",
        lambda _, done, **o: [row.message.event_id for row in done],
    )
    first(
        BatchReader, "ack", "mirrored",
        lambda _, batch, *a: [str(m.properties.get("message_id")) for m in batch.messages],
    )  # fmt: skip
    first(replay, "publish_claimed", "claimed", lambda claimed, *a: [str(c.pk) for c in claimed])
    first(states, "published", "replayed", lambda claimed, **o: [str(c.pk) for c in claimed])


def _shorten(seconds: float) -> None:
    """Let what a dead process has taken be free soon."""
    from django.conf import settings

    from django_amqp_events.archive import mirror, replay
    from django_amqp_events.archive.batches import runner
    from django_amqp_events.publish import outbox_rows

    outbox_rows.LEASE = seconds  # type: ignore[misc]
    outbox_rows.BEGIN_WITHIN = seconds / 2  # type: ignore[misc]
    outbox_rows.RENEW = seconds / 6  # type: ignore[misc]
    # All of it: three confirm time-outs are added.
    confirms: float = 3 * settings.AMQP_EVENTS["CONFIRM_TIMEOUT"]  # type: ignore[assignment]
    replay.LEASE = runner.LEASE = seconds - confirms  # type: ignore[misc]
    mirror.SWEEP = (0.5, 0.5)  # type: ignore[misc]


def _notice(seconds: int) -> None:
    """Shorten the heartbeats of the mirror and the retry interval of the relay."""
    from django_amqp_events.backoff import Backoff
    from django_amqp_events.broker import batch_reader
    from django_amqp_events.publish import outbox_rows

    batch_reader.HEARTBEAT = seconds  # type: ignore[misc]
    outbox_rows._MAYBE_STORED = Backoff(1.0, 10.0)  # type: ignore[misc]
