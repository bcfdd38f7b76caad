"""Tell which failures are alike: one handler, one exception, one place in the code. Pure.

Line numbers change with each release and messages with each event, so neither counts. All parts are
columns of the archive, so a group is found without reading a traceback.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from ...message.types import derived_id

#: Version of the algorithm below. A new one needs ``events_groups --rebuild``.
VERSION: Final = 1

#: As :attr:`django_amqp_events.message.archive_message.Archived.location` writes it.
_LOCATION: Final = re.compile(r"(.*):(?:\d+|\?) in (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The features that the failures of one group share.

    Attributes:
        id: derived from the others and :data:`VERSION`.
        exception: dotted name; ``""`` without an exception.
        frame: ``module in function`` of the innermost frame of the project's code, or of an
            installed package if there is no other; ``""`` if unknown.
        reason: the archive reason if there is no exception, else ``""``.
    """

    id: UUID
    service: str
    handler: str
    exception: str
    frame: str
    reason: str


def fingerprint(
    *, service: str, handler: str, exception: str, reason: str, location: str
) -> Fingerprint:
    """Return the fingerprint of a failure.

    Args:
        location: the failing line, ``module:line in function``.
    """
    match = _LOCATION.fullmatch(location)
    frame = f"{match[1]} in {match[2]}" if match else location
    parts = (service, handler, exception, frame, "" if exception else reason)
    return Fingerprint(
        id=derived_id(VERSION, *parts),
        service=service,
        handler=handler,
        exception=exception,
        frame=frame,
        reason=parts[-1],
    )
