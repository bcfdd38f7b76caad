"""Redact payloads for pages and exports; ``admin/payload_pages.py`` decides who sees what.

``AMQP_EVENTS["REDACT"]`` names a callable that gets an event's name and a copy of its payload, and
returns the payload to show. If it fails, the payload is hidden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from django.utils.module_loading import import_string

from .. import conf
from ..callables import unrun
from ..databases import error_line, user_code
from ..logs import event_fields, get_logger
from ..reasons import Reason

logger = get_logger(__name__)

#: What someone sees of a payload.
Sight = Literal["none", "redacted", "raw"]


def has_hook() -> bool:
    """Return True if a hook is configured, even if other settings are invalid."""
    return bool(conf.load()[0].redact)


def redact(name: str, payload: Mapping[str, Any]) -> Mapping[str, Any] | Reason:
    """Return the redacted payload of an event, or the payload if there is no hook.

    If the hook fails, return the problem, which does not quote the payload.
    """
    path = conf.load()[0].redact
    if not path:
        return payload
    with user_code():
        try:
            redacted: Mapping[str, Any] = import_string(path)(name, deepcopy(dict(payload)))
            if unrun(redacted) or not isinstance(redacted, Mapping):
                raise TypeError("it did not return a dict")
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - a project's own code
            # The text of the exception may quote the payload.
            kind = type(exc).__name__
            about = {**event_fields(None), "event_name": name}
            logger.error(  # noqa: TRY400
                "AMQP_EVENTS['REDACT'] (%s) failed for event %r: %s", path, name, kind, extra=about
            )
            return Reason("redaction-failed", hook=path, error=kind)
        return redacted


def redact_json(name: str, payload: Mapping[str, Any]) -> Mapping[str, Any] | Reason:
    """As :func:`redact`; return the problem if what is to be shown is not valid JSON."""
    redacted = redact(name, payload)
    if isinstance(redacted, Reason):
        return redacted
    try:
        json.dumps(redacted, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        return Reason("redaction-no-json", error=error_line(exc))
    return redacted
