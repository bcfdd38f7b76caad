"""The catalogue as an AsyncAPI 3.0 document. Pure.

Each event is a channel whose address is its routing key, and each handler queue another one: AMQP's
bindings (version 0.3.0) describe either an exchange or a queue. The service sends to the channels
of the events that it publishes, and receives from those of its queues.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from ..message import formats, headers
from ..options import Format
from .entries import Catalogue, Consumer, Entry, handler_document
from .json_schema import Schema

ASYNCAPI: Final = "3.0.0"
#: The extension with what AsyncAPI has no place for.
EXTENSION: Final = "x-django-amqp-events"

_BINDING: Final = {"bindingVersion": "0.3.0"}


def document(catalogue: Catalogue) -> dict[str, Any]:
    """Return the AsyncAPI document of a service."""
    names = _keys(entry.name for entry in catalogue.entries)
    events = {names[entry.name]: entry for entry in catalogue.entries}
    handlers = _keys(consumer.handler.name for consumer in catalogue.consumers)
    queues = _keys((consumer.handler.queue for consumer in catalogue.consumers), taken=events)
    channels = {
        key: _event_channel(entry, key, catalogue.exchange)
        for key, entry in events.items()
        if not entry.is_pattern
    }
    operations = {
        f"publish.{key}": _send(entry, key)
        for key, entry in events.items()
        if entry.publisher == catalogue.service
    }
    for queue, key in queues.items():
        consumers = [
            consumer for consumer in catalogue.consumers if consumer.handler.queue == queue
        ]
        received: list[str] = []
        for consumer in consumers:
            own = [name for name, entry in events.items() if consumer in entry.consumers]
            operations[f"handle.{handlers[consumer.handler.name]}"] = _receive(consumer, key, own)
            received += own
        channels[key] = _queue_channel(catalogue.exchange, queue, consumers, received)
    return {
        "asyncapi": ASYNCAPI,
        "info": {
            "title": catalogue.service,
            "version": "0.0.0",
            "description": f"Events that the service {catalogue.service} publishes or handles.",
        },
        "defaultContentType": headers.CONTENT_TYPE,
        EXTENSION: {"service": catalogue.service, "exchange": catalogue.exchange},
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {key: _message(entry, key) for key, entry in events.items()},
            "messageTraits": {
                form: _trait(form) for form in sorted({entry.format for entry in catalogue.entries})
            },
            "schemas": {
                key: entry.payload(f"#/components/schemas/{key}") or {"type": "object"}
                for key, entry in events.items()
            },
        },
    }


def _event_channel(entry: Entry, key: str, exchange: str) -> dict[str, Any]:
    return {
        # Braces would be parameters of the address.
        "address": None if "{" in entry.name else entry.name,
        "title": entry.name,
        **_described(entry.contract.docstring if entry.contract else ""),
        "messages": {key: _ref("components", "messages", key)},
        "bindings": {
            "amqp": {
                "is": "routingKey",
                "exchange": {
                    "name": exchange,
                    "type": "topic",
                    "durable": True,
                    "autoDelete": False,
                },
                **_BINDING,
            }
        },
    }


def _queue_channel(
    exchange: str, queue: str, consumers: Iterable[Consumer], received: Iterable[str]
) -> dict[str, Any]:
    keys = dict.fromkeys(key for consumer in consumers for key in consumer.handler.bindings)
    return {
        "address": None if "{" in queue else queue,
        "title": queue,
        "messages": {key: _ref("components", "messages", key) for key in received},
        "bindings": {
            "amqp": {
                "is": "queue",
                "queue": {"name": queue, "durable": True, "exclusive": False, "autoDelete": False},
                "x-bindings": [{"exchange": exchange, "routingKey": key} for key in keys],
                **_BINDING,
            }
        },
    }


def _send(entry: Entry, key: str) -> dict[str, Any]:
    return {
        "action": "send",
        "channel": _ref("channels", key),
        "title": entry.name,
        "messages": [_ref("channels", key, "messages", key)],
        "bindings": {"amqp": {"deliveryMode": 2, **_BINDING}},
    }


def _receive(consumer: Consumer, queue: str, received: Iterable[str]) -> dict[str, Any]:
    return {
        "action": "receive",
        "channel": _ref("channels", queue),
        "title": consumer.handler.name,
        **_described(consumer.interface.docstring),
        "messages": [_ref("channels", queue, "messages", key) for key in received],
        "bindings": {"amqp": {"ack": True, **_BINDING}},
        EXTENSION: handler_document(consumer),
    }


def _message(entry: Entry, key: str) -> dict[str, Any]:
    contract = entry.contract
    return {
        "name": entry.name,
        "title": entry.name,
        **_described(contract.docstring if contract else ""),
        "traits": [_ref("components", "messageTraits", entry.format)],
        "payload": _body(entry.format, _ref("components", "schemas", key)),
        EXTENSION: {
            "publisher": entry.publisher,
            "contract": contract.function if contract else None,
            "options": dict(entry.options),
        },
    }


def _body(form: Format, payload: Schema) -> Schema:
    """Return the schema of a message's body, as docs/message-format.md describes it."""
    if form == "json":
        return payload
    if form == "celery":
        return {
            "type": "array",
            "description": "Celery's protocol 2: positional arguments, payload, options.",
            "items": [{"type": "array", "maxItems": 0}, payload, {"type": "object"}],
            "minItems": 3,
            "maxItems": 3,
        }
    return {
        "type": "object",
        "description": "CloudEvents, structured mode.",
        "properties": {
            "specversion": {"const": formats.SPECVERSION},
            "id": _text("Id of the event."),
            "source": _text("Service that published the event."),
            "type": _text("Name of the event."),
            "time": _text("When it was published.", format="date-time"),
            "datacontenttype": {"const": formats.JSON},
            "correlationid": _text("Shared by all events of one cause."),
            "causationid": _text("Id of the event whose handler published it."),
            "data": payload,
        },
        "required": ["specversion", "id", "source", "type", "data"],
    }


def _trait(form: Format) -> dict[str, Any]:
    """Return what all messages of a format have in common: headers and properties."""
    celery = {
        "id": _text("Id of the event, as Celery's task id."),
        "task": _text("Name of the event, as Celery's task name."),
    }
    return {
        "contentType": formats.STRUCTURED if form == "cloudevents" else formats.JSON,
        "correlationId": {"location": f"$message.header#/{headers.EVENT_CORRELATION_ID}"},
        "bindings": {"amqp": {"contentEncoding": headers.CONTENT_ENCODING, **_BINDING}},
        "headers": {
            "type": "object",
            "properties": {
                **(celery if form == "celery" else {}),
                headers.EVENT_FORMAT: {"const": form},
                headers.EVENT_ID: _text("Id of the event."),
                headers.EVENT_NAME: _text("Name of the event."),
                headers.EVENT_SERVICE: _text("Service that published the event."),
                headers.EVENT_PUBLISHED_AT: _text("When it was published.", format="date-time"),
                headers.EVENT_CORRELATION_ID: _text("Shared by all events of one cause."),
                headers.EVENT_CAUSATION_ID: _text("Id of the event whose handler published it."),
            },
            "required": list(celery) if form == "celery" else [],
        },
    }


def _text(description: str, **more: str) -> Schema:
    return {"type": "string", "description": description, **more}


def _described(text: str) -> dict[str, str]:
    return {"description": text} if text else {}


def _keys(names: Iterable[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """Return a key for each name, of the characters that AsyncAPI allows.

    It is the name itself if possible.
    """
    keys: dict[str, str] = {}
    used = set(taken)
    for name in sorted(set(names)):
        key = re.sub(r"[^\w.-]", lambda character: f"_{ord(character[0]):x}_", name, flags=re.ASCII)
        while key in used:
            key += "_"
        used.add(key)
        keys[name] = key
    return keys


def _ref(*path: str) -> dict[str, str]:
    return {"$ref": "#/" + "/".join(path)}
