"""Which failures are alike: those of one handler, with one exception, from one place. Pure.

A group is made of what a row of the archive has in its columns, so that it can be told anew
without reading a traceback. No line number and no message is in it: the one changes with each
release, the other with each event.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid5

#: Of the algorithm below. Another one makes other groups: ``events_groups --rebuild`` moves the
#: events into them.
VERSION: Final = 1

_NAMESPACE: Final = UUID("6f2d1c9e-52f1-4c0b-9a3e-2f1f4f0f7a51")
#: As :attr:`django_amqp_events.message.archive_message.Archived.location` writes it.
_LOCATION: Final = re.compile(r"(.*):(?:\d+|\?) in (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The features that failures of one group share.

    Attributes:
        id: made of all the others and :data:`VERSION`.
        exception: dotted name, ``""`` where nothing was raised.
        frame: ``module in function``, the innermost frame of the project's own code; of an
            installed package where no other is known; ``""`` where none is.
        reason: why it was archived, where there is no exception; else ``""``.
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
    found = _LOCATION.fullmatch(location)
    frame = f"{found[1]} in {found[2]}" if found else location
    parts = (service, handler, exception, frame, "" if exception else reason)
    # JSON, so that no text can be cut in another place than it was joined.
    return Fingerprint(
        id=uuid5(_NAMESPACE, json.dumps([VERSION, *parts])),
        service=service,
        handler=handler,
        exception=exception,
        frame=frame,
        reason=parts[-1],
    )
