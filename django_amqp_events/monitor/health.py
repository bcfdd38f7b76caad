"""Probes: do the processes of this container work?"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from .. import liveness
from ..conf import Settings

#: Seconds without a turn after which a loop counts as hanging. Its steps take less, except those
#: that wait for RabbitMQ, which turn it.
HANGING_SECONDS: Final = 300.0
#: The parts that ``--part companion`` stands for.
COMPANION: Final = ("relay", "mirror", "batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of a process, and what is wrong with it (``""``: nothing)."""

    part: str
    process: int
    problem: str


def examine(settings: Settings, *, ready: bool, parts: Collection[str] = ()) -> list[Finding]:
    """Examine the processes of a service in this container.

    A process is alive if its loops turn; so it is while RabbitMQ or a database is unreachable. It
    is ready if it also works.

    Args:
        ready: report what is alive but not ready.
        parts: parts that must be there, and the only ones to examine; otherwise any.
    """
    findings = []
    for state in liveness.read(settings):
        if parts and state.part not in parts:
            continue
        problem = state.problem if ready else ""
        seconds = time.time() - state.turned
        if seconds > HANGING_SECONDS and not state.rests:
            problem = f"its loop has not turned for {seconds:.0f} s: restart it"
        findings.append(Finding(part=state.part, process=state.process, problem=problem))
    for part in parts:
        if not any(finding.part == part for finding in findings):
            problem = f"no process of this container runs it: start events_{part}"
            findings.append(Finding(part=part, process=0, problem=problem))
    if not findings:
        problem = f"no process of service {settings.service!r} runs in this container"
        findings.append(Finding(part="", process=0, problem=problem))
    return findings
