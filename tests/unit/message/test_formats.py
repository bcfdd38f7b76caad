"""CloudEvents and plain JSON: what is read, what is published, and what copies keep."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from django_amqp_events.exceptions import Malformed
from django_amqp_events.message import archive_message, encoding, formats
from django_amqp_events.message.archive_message import Archived
from django_amqp_events.message.decoding import CONTENT_ID, decode, identify
from django_amqp_events.message.headers import PREFIXES
from django_amqp_events.message.types import Failure, Message, Progress, Received
from django_amqp_events.options import Format
from tests.event_messages import delivered

NAME = "shop.order.created"
QUEUE = "billing.billing.send_invoice"
PAYLOAD = {"order_id": 7, "total": "19.90"}
AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
CLOUD = {
    "specversion": "1.0",
    "id": "A234-1234",
    "source": "https://shop.example/orders",
    "type": NAME,
    "time": "2026-03-01T12:00:00Z",
    "subject": "order 7",
    "tenant": "eu",
}


def message(
    body: object, content_type: str = "application/json", *, headers: Any = None, **properties: Any
) -> Received:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Received(
        queue=QUEUE,
        exchange="events",
        routing_key=NAME,
        body=raw,
        headers=headers or {},
        properties={"content_type": content_type, **properties},
    )


def binary(prefix: str = "cloudEvents_", **changes: Any) -> Received:
    given = {**CLOUD, **changes}
    return message(PAYLOAD, headers={f"{prefix}{key}": value for key, value in given.items()})


def structured(**changes: Any) -> Received:
    return message({**CLOUD, "data": PAYLOAD, **changes}, formats.STRUCTURED)


plain = message(PAYLOAD, message_id="m-1", app_id="shop", correlation_id="basket-5")


def returned(copy: Message) -> Received:
    """Return a retry as it comes back from its delay queue."""
    return delivered(copy, QUEUE, exchange="billing:return", routing_key=QUEUE)


def retry(received: Received) -> Message:
    event, _ = identify(received, trusted=False)
    return encoding.retry_message(
        received, event, exchange="billing:delay.1s", routing_key=QUEUE, service="billing",
        handler="send_invoice", attempt=2, due_at=AT, replay_id=None, history=(),
    )  # fmt: skip


def archive(received: Received, **identity: Any) -> Archived:
    """Return what the mirror reads of the archive message of a delivery."""
    copy = archive_message.build(
        received, exchange="billing:archive", reason="failed", at=AT, worker="w", service="billing",
        handler="send_invoice", **identity,
    )  # fmt: skip
    read = archive_message.read(
        replace(returned(copy), queue="billing:archive", exchange="billing:archive")
    )
    assert isinstance(read, Archived)
    return read


@pytest.mark.parametrize("received", [structured(), binary(), binary("ce-")])
def test_cloudevents_attributes_are_the_identity(received: Received) -> None:
    event, _ = identify(received, trusted=False)
    assert (event.id, event.name, event.source) == (CLOUD["id"], NAME, CLOUD["source"])
    assert (event.published_at, event.subject) == (AT, "order 7")
    assert event.extensions == {"tenant": "eu"}
    assert event.service == event.source


def test_properties_are_the_identity_of_plain_json() -> None:
    event, _ = identify(plain, trusted=False)
    assert (event.id, event.name, event.source) == ("m-1", NAME, "shop")
    assert event.correlation_id == "basket-5"
    # Headers of the program's own, which have our names by chance.
    others = replace(plain, headers={"event-id": 12, "event-service": {"a": 1}, "event-name": 5})
    assert identify(others, trusted=False)[0] == event
    timed = message(PAYLOAD, message_id="m-1", timestamp=int(AT.timestamp()))
    assert identify(timed, trusted=False)[0].published_at == AT


def test_a_json_message_without_an_id_gets_one_of_its_content() -> None:
    one, same, other = message({"a": 1}), message({"a": 1}, priority=5), message({"a": 2})
    first, second, third = (identify(each, trusted=False)[0].id for each in (one, same, other))
    assert first == second != third
    assert CONTENT_ID.fullmatch(first)
    assert not CONTENT_ID.fullmatch(f"content-{'0' * 32}"), "a program's own"


@pytest.mark.parametrize(
    ("content_type", "named"), [("text/html", "'text/html'"), (None, "missing"), (5, "5")]
)
def test_a_message_of_no_format_names_its_content_type(content_type: Any, named: str) -> None:
    with pytest.raises(Malformed, match=f"its content type is {named}$"):
        identify(message(b"no object", content_type), trusted=False)


def test_cloud_events_need_no_data() -> None:
    empty = message(dict(CLOUD), formats.STRUCTURED)
    assert decode(empty, 1000).kwargs == {}
    assert decode(replace(binary(), body=b""), 1000).kwargs == {}


def test_equal_events_without_an_id_are_two_in_the_archive() -> None:
    received = message(PAYLOAD)
    event, _ = identify(received, trusted=False)
    one, two = (archive(received, event=event, progress=Progress(attempt=n)) for n in (1, 2))
    assert one.event == replace(two.event or event, attempt=1)
    assert one.identity("billing") != two.identity("billing")
    assert one.identity("billing") == archive(received, event=event).identity("billing")


def test_an_unidentified_json_message_is_not_named_by_its_archive_message() -> None:
    assert archive(plain).event is None


@pytest.mark.parametrize("copy", ["retry", "archive message"])
@pytest.mark.parametrize("prefix", ["cloudEvents_", "ce-"])
def test_a_copy_without_all_headers_keeps_the_format(copy: str, prefix: str) -> None:
    """Of many headers, the attributes are the largest. Without data, nothing else tells."""
    many = {f"{prefix}{number}": "x" for number in range(1_000)}
    many |= {f"h{number}": "x" for number in range(4_000)}
    received = replace(binary(prefix), body=b"")
    received = replace(received, headers={**many, **received.headers})
    event, progress = identify(received, trusted=False)
    if copy == "archive message":
        text = "x" * archive_message.MAX_TRACEBACK
        failure = Failure(exception="ValueError", message=text[:4_000], traceback=text)
        made = archive_message.build(
            received, exchange="billing:archive", reason="exhausted", at=AT, worker="w",
            service="billing", event=event, progress=progress, handler="billing.h",
            failure=failure,
        )  # fmt: skip
    else:
        made = encoding.retry_message(
            received, event, exchange="billing:delay.1s", routing_key="k", service="billing",
            handler="billing.h",
            attempt=2, due_at=AT, replay_id=None, history=(),
        )  # fmt: skip
    assert len(made.headers) < len(received.headers)
    again = replace(received, headers=made.headers, properties=made.properties)
    assert formats.wire_format(again) == "cloudevents-binary"
    assert decode(again, 1_000).kwargs == {}
    assert identify(again, trusted=True)[0].subject == "order 7"


#: What a payload and headers may have that means something to another format.
WORDS = (
    "task", "id", "args", "kwargs", "embed", "specversion", "source", "type", "data", "data_base64",
    "__type__", "__value__", "lang", "retries", "event-id", "compression",
)  # fmt: skip
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from([*WORDS, "1.0", "uuid", "date"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
        | st.fixed_dictionaries({"__type__": inner, "__value__": inner})
    ),
    max_leaves=6,
)
publisher_headers = st.dictionaries(
    st.sampled_from(
        [f"{prefix}{name}" for prefix in PREFIXES for name in ("specversion", "id", "type", "x")]
        + ["body", "content_type", "x-shovelled", "timestamp"]
    ),
    st.sampled_from(["1.0", "0.3", "x", 5, 1.5, True]),
    max_size=4,
)

#: Names of Celery's headers, which have no meaning in another format.
CELERY_HEADERS = [
    "group",
    "lang",
    "expires",
    "retries",
    "origin",
    "shadow",
    "eta",
    "meth",
    "stamps",
]


@given(
    form=st.sampled_from(["celery", "cloudevents", "json"]),
    payload=st.dictionaries(st.sampled_from(WORDS), json_values, max_size=6),
    headers=publisher_headers,
)
# As deep as may be published.
@example(form="cloudevents", payload={"a": json.loads("[" * 199 + "]" * 199)}, headers={})
def test_our_own_messages_are_not_guessed_at(
    form: Format, payload: dict[str, Any], headers: dict[str, Any]
) -> None:
    """Whatever a payload and its headers look like, all copies have them as published."""
    identity: dict[str, Any] = {
        "event_id": "e-1", "name": NAME, "service": "shop", "published_at": AT,
        "correlation_id": None, "causation_id": None,
    }  # fmt: skip
    attributes = formats.new_attributes(**identity)
    body = encoding.encode_payload(NAME, payload, form=form, attributes=attributes)
    sent = encoding.event_message(
        exchange="events", body=body, form=form, headers=headers, **identity
    )
    first = replace(returned(sent), exchange="events", routing_key=NAME)
    event, _ = identify(first, trusted=False)
    assert (event.id, event.name, event.service, event.headers) == ("e-1", NAME, "shop", headers)
    for exchange in ("events", "", "billing:return"):
        moved = replace(first, exchange=exchange)
        assert decode(moved, 10_000).kwargs == payload
    again = returned(retry(first))
    assert decode(again, 10_000).kwargs == payload
    assert identify(again, trusted=True)[0] == replace(event, attempt=2, due_at=AT)
    archived = archive(first, event=event)
    assert (archived.payload, archived.event) == (payload, event)


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"task": "x"}, {"task": 5, "id": 5, "compression": "none", "event-format": 7},
        dict.fromkeys(CELERY_HEADERS, "x"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "encoding", [None, "", "utf-8", " UTF-8 ", "identity", "binary", "8bit", "7bit"]
)
@pytest.mark.parametrize(
    "content_type", [None, "", "application/json", "text/plain", "application/octet-stream"]
)
def test_foreign_json_is_a_payload(
    content_type: Any, encoding: str | None, headers: dict[str, Any]
) -> None:
    payload = {"task": "a", "id": "b", "args": [], "kwargs": {}, "__type__": "date", "x": {}}
    received = message(
        payload, content_type, headers=headers, content_encoding=encoding, message_id="m-1"
    )
    event, _ = identify(received, trusted=False)
    assert (event.id, event.name) == ("m-1", NAME)
    assert event.headers == {key: headers[key] for key in headers if key != "event-format"}
    for delivery in (received, returned(retry(received))):
        assert decode(delivery, 1000).kwargs == payload
        assert identify(delivery, trusted=True)[0].headers == event.headers
    assert archive(received, event=event).event == event
    moved = replace(received, exchange="", routing_key=QUEUE)
    assert identify(moved, trusted=False, only_event=NAME)[0].name == NAME
    assert identify(moved, trusted=False)[0].name == QUEUE


@pytest.mark.parametrize("name", ["event-correlation-id", "event-causation-id"])
@pytest.mark.parametrize("value", [5, [], "x" * 256, "\0", "\ud800"])
def test_an_invalid_id_of_another_event_is_left_out(name: str, value: Any) -> None:
    received = message(PAYLOAD, headers={name: value}, message_id="m-1")
    event, _ = identify(received, trusted=False)
    assert (event.correlation_id, event.causation_id) == ("m-1", None)
