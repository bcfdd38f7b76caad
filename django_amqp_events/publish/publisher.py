"""Publishing: from a name and a payload to a confirmed message."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final
from uuid import uuid4

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string

from .. import telemetry
from ..broker.publisher_pool import publisher_pool
from ..broker.topology import Names
from ..conf import (
    PUBLISH_MODES,
    PublishMode,
    Settings,
    get_settings,
)
from ..context import current_event
from ..declare.contracts import bind_contract
from ..declare.patterns import full_name_problem
from ..declare.registry import get_registry
from ..exceptions import (
    ConfigurationError,
    InvalidEventError,
    MessageTooLargeError,
    PublishError,
)
from ..message import decoding, encoding, formats
from ..message.headers import check_headers
from ..message.text import has_surrogates
from ..message.types import Message
from ..reasons import Reason
from . import outbox_rows
from .direct_publisher import CommittedRows, get_direct_publisher
from .outbox_rows import Row
from .pending import Backend, Pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one publish.

    Attributes:
        mode: ``outbox``, ``on_commit`` or ``immediate``; the setting ``PUBLISH`` by default.
        event_id: an id of your own, by which consumers recognise a repeat.
        correlation_id, causation_id: those of the event being handled by default.
        headers: further headers, such as tracing.
        using: alias of the database whose transaction the event belongs to; the setting
            ``DATABASE`` by default.
    """

    mode: PublishMode | None = None
    event_id: str | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    headers: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    using: str | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in PUBLISH_MODES:
            raise ConfigurationError(
                f"the publish mode is {self.mode!r}; it must be one of {', '.join(PUBLISH_MODES)}"
            )
        if self.using is not None and self.using not in connections:
            raise ConfigurationError(f"using={self.using!r} is not an alias in DATABASES")
        for name in ("event_id", "correlation_id", "causation_id"):
            value = getattr(self, name)
            if value is None:
                continue
            value = str(value)
            if not value or len(value.encode("utf-8", "surrogatepass")) > decoding.MAX_ID:
                raise InvalidEventError(
                    f"{name} is {value!r:.80}; it must be a text of 1 to {decoding.MAX_ID} bytes"
                )
            if "\0" in value or has_surrogates(value):
                raise InvalidEventError(
                    f"{name} is {value!r:.80}; databases cannot store its NUL or lone surrogate"
                )
            object.__setattr__(self, name, value)


NO_OPTIONS: Final = Options()


def publish_event(
    name: str, payload: Mapping[str, Any], *, options: Options = NO_OPTIONS, validate: bool = True
) -> str:
    """Publish an event whose name is known only at run time.

    Args:
        name: the event's full name, such as ``"shop.order.created"``.
        payload: its arguments by name.
        validate: check the payload against the contract, if this service has one.

    Returns:
        the event id.

    Raises:
        InvalidEventError: the name or payload is invalid; nothing was published.
        PublishError: with ``on_commit`` after the commit; with ``outbox`` never because of
            RabbitMQ.
        ConfigurationError: AMQP_EVENTS is missing or invalid.
        OutboxError: the outbox has no table, or a transaction is open on another database.
    """
    return publish_many(name, [payload], options=options, validate=validate)[0]


def publish_many(
    name: str,
    payloads: Iterable[Mapping[str, Any]],
    *,
    options: Options = NO_OPTIONS,
    validate: bool = True,
) -> list[str]:
    """Publish many events of one name, with a window of unconfirmed messages.

    All payloads are validated before the first message is published. With the outbox, all events
    are written or none. In the other modes, the first error is raised and has all errors by event
    id in ``errors``; the other events are published.

    Returns:
        the event ids, in order.

    Raises:
        as :func:`publish_event`.
    """
    if not telemetry.active():
        return _publish(name, payloads, options, validate)
    from .. import spans

    def send(headers: Mapping[str, Any]) -> list[str]:
        return _publish(name, payloads, replace(options, headers=headers), validate)

    return spans.publish(name, Names.of(get_settings()).events, options.headers, send)


def _publish(
    name: str, payloads: Iterable[Mapping[str, Any]], options: Options, validate: bool
) -> list[str]:
    require_payload_list(name, payloads)
    settings = get_settings()
    target = backend(settings)
    published_at = target.now()
    # The name of a declared event is checked when the registry is built.
    declared = isinstance(name, str) and name in get_registry().events
    if not declared and (wrong := full_name_problem(name)):
        raise InvalidEventError(
            f"{name!r:.80} is not an event name: {wrong}; use words separated by dots, such as "
            f"shop.order.created"
        )
    check_headers(name, options.headers)
    messages = [
        _message(settings, name, payload, options, published_at, validate=validate)
        for payload in payloads
    ]
    if options.event_id is not None and len(messages) > 1:
        raise InvalidEventError("several events cannot share one event_id; omit it")
    ids = [message.event_id for message in messages]
    if not messages:
        return ids
    mode = options.mode or settings.publish
    if mode == "immediate":
        pending = Pending(backend=target, mode=mode, messages=messages)
        target.watch(pending, messages)
        pending()
        return ids
    if mode == "outbox":
        # Its error comes before the INSERT.
        target.prepare()
        alias = outbox_rows.alias_for(settings, options.using)
    else:
        alias = options.using or settings.database
    connection = connections[alias]
    before = _published_before(connection, target, mode)
    pending = before or Pending(backend=target, mode=mode, connection=connection)
    if mode == "on_commit":
        pending.messages += messages
    elif not _insert(settings, messages, pending):
        return ids
    target.watch(pending, messages)
    if before is None:
        connection.on_commit(pending)
    return ids


def require_payload_list(name: str, payloads: object) -> None:
    """Raise InvalidEventError for a single payload in the place of many."""
    if isinstance(payloads, (Mapping, str, bytes)) or not isinstance(payloads, Iterable):
        raise InvalidEventError(
            f"publish_many() of event {name!r} got a {type(payloads).__name__}; pass a list of "
            f"payloads, or use publish()"
        )


def _published_before(
    connection: BaseDatabaseWrapper, target: Backend, mode: PublishMode
) -> Pending | None:
    """Return the events that were published last in this transaction and savepoint, if any.

    Further events join them: Django drops the callbacks after one that raises.
    """
    if not connection.in_atomic_block or not connection.run_on_commit:
        return None
    savepoints, last = connection.run_on_commit[-1][:2]
    if not isinstance(last, Pending) or last.called:
        return None
    if last.backend is not target or last.mode != mode:
        return None
    if any(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks):
        return None  # captureOnCommitCallbacks() executes what is registered in its block
    # A savepoint that was released can only be rolled back with an outer one.
    active = set(connection.savepoint_ids)
    return last if active.intersection(savepoints) == active else None


#: Events of one transaction, and bytes of their bodies, that are published from memory after its
#: commit; a relay publishes the others.
KEPT_EVENTS: Final = 5_000
KEPT_BYTES: Final = 16 * 1024 * 1024


def _insert(settings: Settings, messages: Sequence[Message], pending: Pending) -> bool:
    """Insert messages into the outbox; return False if only a relay publishes them."""
    connection = pending.connection
    assert connection is not None  # noqa: S101
    size = pending.size + sum(len(message.body) for message in messages)
    # With autocommit off, Django does not report commits.
    held = connection.in_atomic_block or connection.get_autocommit()
    if pending.backend.has_relay:
        held = held and len(pending.rows) + len(messages) <= KEPT_EVENTS and size <= KEPT_BYTES
    pending.began = pending.began or time.monotonic()
    rows = outbox_rows.insert(messages, alias=connection.alias, service=settings.service, held=held)
    if held:
        pending.rows += rows
        pending.size = size
    return held


def _message(
    settings: Settings,
    name: str,
    payload: Mapping[str, Any],
    options: Options,
    published_at: datetime,
    *,
    validate: bool,
) -> Message:
    """Validate a payload and build its message."""
    if not isinstance(payload, Mapping) or not all(isinstance(key, str) for key in payload):
        raise InvalidEventError(
            f"the payload of event {name!r} is not a dict with names as keys: {payload!r:.80}"
        )
    known = get_registry().events.get(name)
    if validate and known is not None and known.contract is not None:
        payload = bind_contract(name, known.contract, payload, validate=bool(known.validate))
    cause = current_event()
    identity: dict[str, Any] = {
        "event_id": options.event_id or str(uuid4()),
        "name": name,
        "service": settings.service,
        "published_at": published_at,
        "correlation_id": options.correlation_id or (cause.correlation_id if cause else None),
        "causation_id": options.causation_id or (cause.id if cause else None),
    }
    form = (known and known.format) or settings.format
    attributes = formats.new_attributes(**identity) if form == "cloudevents" else None
    body = encoding.encode_payload(name, payload, form=form, attributes=attributes)
    if len(body) > settings.max_body:
        raise MessageTooLargeError(
            Reason("over-max-body", size=len(body), most=settings.max_body),
            event_id=identity["event_id"],
            event_name=name,
        )
    return encoding.event_message(
        exchange=Names.of(settings).events,
        body=body,
        form=form,
        headers=options.headers,
        **identity,
    )


class AmqpBackend(Backend):
    """Publishes to RabbitMQ, confirmed; rows in the thread of the direct publisher."""

    has_relay = True

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        return publisher_pool(get_settings()).publish(messages, mandatory=mandatory)

    def prepare(self) -> None:
        get_direct_publisher(get_settings())

    def publish_rows(self, rows: list[Row], *, alias: str, began: float) -> None:
        commit = CommittedRows(rows=rows, alias=alias, began=began)
        get_direct_publisher(get_settings()).deliver(commit)


#: Imported at first use: publishing to RabbitMQ needs no in-memory broker.
BACKENDS: Final[Mapping[str, str]] = {
    "amqp": "django_amqp_events.publish.publisher.AmqpBackend",
    "memory": "django_amqp_events.memory.MemoryBackend",
    "inline": "django_amqp_events.memory.InlineBackend",
}


#: Kept when settings change, since those in memory have events.
_instances: dict[str, Backend] = {}
_diverted_backends: list[Backend] = []


def backend(settings: Settings) -> Backend:
    """Return the backend of this process, or of a test's block: whatever publishes asks for it."""
    if _diverted_backends:
        return _diverted_backends[-1]
    name = settings.backend
    if name not in _instances:
        _instances[name] = import_string(BACKENDS[name])()
    return _instances[name]


def diverted() -> bool:
    """Return True within a block of :func:`divert`."""
    return bool(_diverted_backends)


@contextmanager
def divert(to: Backend) -> Iterator[None]:
    """Publish to another backend within a block, in all threads, for tests.

    Events published in the block go there even if their commit comes later.
    """
    _diverted_backends.append(to)
    try:
        yield
    finally:
        _diverted_backends[:] = [other for other in _diverted_backends if other is not to]
