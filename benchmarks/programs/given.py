"""The arguments of this process, and the payload that all participants publish.

Nothing but the standard library: it is imported in the peers' virtual environment too.
"""

from __future__ import annotations

import json
import os
from typing import Any

#: The words of :meth:`benchmarks.ground.Ground.program`.
GIVEN: dict[str, Any] = json.loads(os.environ.get("BENCH", "{}"))
BROKER: str = GIVEN.get("broker", "amqp://")
#: Bytes of the JSON of a payload.
SIZE = 500


def payload(size: int = SIZE, number: int = 7) -> dict[str, Any]:
    """Return a payload whose JSON, written without spaces, has *size* bytes."""
    found = {"order_id": number, "total": "19.90", "note": ""}
    found["note"] = "x" * (size - len(json.dumps(found, separators=(",", ":"))))
    return found
