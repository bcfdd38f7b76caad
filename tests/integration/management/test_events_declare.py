"""``events_declare`` on a real broker: what it prints, what it does, how it exits."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from django_amqp_events.broker.provisioning import startup
from django_amqp_events.declare.retry_policy import RetryPolicy
from django_amqp_events.management.commands.events_declare import describe_schedule

from ..conftest import Service

HANDLERS = {
    "send_invoice": {
        "EVENTS": ["shop.order.created", "shop.refund.*"],
        "HANDLER": "tests.integration.handlers.handle",
        "MAX_RETRIES": 5,
        "RETRY_BACKOFF": 30,
        "RETRY_BACKOFF_MAX": 300,
    },
    "book": ["shop.#"],
}


@pytest.fixture
def billing(service, fresh_vhost):
    return service(fresh_vhost, HANDLERS=HANDLERS)


def test_declares_then_finds_nothing_to_do(billing):
    code, out, err = billing.command("events_declare")
    assert (code, err) == (0, "")
    assert "billing.send_invoice" in out
    assert "shop.order.created, shop.refund.*" in out
    assert "30 s, 60 s, 120 s … 300 s, total 12 min 30 s; max 5 retries" in out
    assert "1 s, 2 s, 4 s … 512 s, total 17 min 3 s; max 10 retries" in out
    # The topology is what is true now, after the steps.
    assert "missing" not in out
    assert re.search(r"  \d+ ok \(\d+ delays from 1 s to \d+ s\)", out)
    assert "\n  declare queue billing.send_invoice\n" in out
    assert re.search(
        r"\n  bind events → billing\.book \[shop\.#\]\n(  .*\n)*\d+ changes made\n", out
    )
    assert billing.command("events_declare", "--check")[0] == 0
    code, out, err = billing.command("events_declare")
    assert (code, err) == (0, "")
    assert "nothing to do: identical" in out


def test_dry_run_changes_nothing(billing):
    code, out, _ = billing.command("events_declare", "--dry-run")
    assert code == 0
    assert "would declare queue billing.send_invoice" in out
    assert "would bind events → billing.book [shop.#]" in out
    assert billing.api.queues() == []
    assert billing.command("events_declare", "--check")[0] == 1


def change_queue(billing: Service, queue: str = "billing.send_invoice") -> None:
    channel = billing.channel()
    channel.queue_delete(queue)
    channel.queue_declare(
        queue,
        durable=True,
        auto_delete=False,
        arguments={"x-queue-type": "quorum", "x-delivery-limit": 7},
    )


def remove_binding(billing: Service) -> None:
    billing.channel().queue_unbind("billing.book", "events", "shop.#")


def add_binding(billing: Service) -> None:
    billing.channel().queue_bind("billing.book", "events", "crm.#")


def test_check_names_manual_changes_that_are_repaired(billing):
    billing.declare()
    assert billing.command("events_declare", "--check")[0] == 0
    remove_binding(billing)
    billing.channel().exchange_delete("billing:return")
    code, out, _ = billing.command("events_declare", "--check", force_color=True)
    assert code == 1
    assert "\x1b[" in out
    out = billing.command("events_declare", "--check")[1]
    assert "binding events → billing.book [shop.#]  missing" in out
    assert "exchange billing:return  missing" in out
    billing.command("events_declare")
    assert billing.command("events_declare", "--check")[0] == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_queue, "x-delivery-limit is 7, declared is 5"),
        (add_binding, "binding events → billing.book [crm.#]  stale"),
    ],
)
def test_check_names_manual_changes_that_stay(billing, change, named):
    billing.declare()
    change(billing)
    for _ in range(2):
        code, out, err = billing.command("events_declare", "--check")
        assert code == 1
        assert named in out + err
        billing.command("events_declare")


def test_refusal_changes_nothing(billing):
    change_queue(billing)
    code, out, err = billing.command("events_declare")
    assert code == 1
    assert "refused: nothing was changed" in out
    assert "give the handler another QUEUE" in err
    assert [queue["name"] for queue in billing.api.queues()] == ["billing.send_invoice"]


def test_recreate_empty_and_delete_stale(billing, service, fresh_vhost):
    service(fresh_vhost, HANDLERS={**HANDLERS, "gone": ["shop.#"]}).declare()
    billing = service(fresh_vhost, HANDLERS=HANDLERS)
    change_queue(billing, "billing:archive")
    billing.publish("", "billing.gone", b"kept")
    code, out, err = billing.command("events_declare", "--recreate-empty", "--delete-stale")
    assert code == 1
    assert "recreate queue billing:archive" in out
    assert "did not delete queue billing.gone: it holds 1 message" in err
    assert "A stale queue still receives events, which no handler processes" in out
    billing.take("billing.gone")
    code, out, err = billing.command("events_declare", "--recreate-empty", "--delete-stale")
    assert (code, err) == (0, "")
    assert billing.command("events_declare", "--check")[0] == 0


def test_plain_amqp_is_honest(service, fresh_vhost, caplog):
    billing = service(fresh_vhost, HANDLERS=HANDLERS, MANAGEMENT_URL="")
    assert billing.command("events_declare", "--check")[0] == 1
    code, out, _ = billing.command("events_declare")
    assert code == 0
    assert "bindings cannot be seen" in out
    # Nothing shows a policy that removes events, so each says that it has not looked.
    billing.set_policy("limits", ".*", {"message-ttl": 1, "expires": 10**9})
    code, out, err = billing.command("events_declare", "--check")
    assert code == 2
    assert re.search(r"\d+ ok, \d+ unknown", out)
    assert "bindings and policies cannot be seen without MANAGEMENT_URL" in out
    assert "plain AMQP cannot see policies" in err
    seen = service(fresh_vhost, HANDLERS=HANDLERS)
    for made, topology, warned in (
        (billing, "verify", 1), (billing, "auto", 1), (billing, "external", 0), (seen, "verify", 0),
    ):  # fmt: skip
        caplog.clear()
        with made.active():
            startup.prepare(made.app, replace(made.settings, topology=topology), made.topology)
        assert caplog.text.count("plain AMQP cannot see policies") == warned
    code, _, err = seen.command("events_declare", "--check")
    assert (code, "sets expires, message-ttl on" in err) == (1, True)
    billing.set_policy("limits", "^nothing$", {"message-ttl": 1})
    # Binding again what may be there is harmless, and repairs what is not.
    remove_binding(billing)
    code, out, _ = billing.command("events_declare")
    assert code == 0
    assert "nothing was missing, 30 bindings declared again" in out
    assert billing.inspect().result == "identical"
    code, _, err = billing.command("events_declare", "--recreate-empty")
    assert code == 1
    assert "MANAGEMENT_URL" in err


def test_json_is_one_document(billing):
    code, out, err = billing.command("events_declare", "--format", "json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["version"] == 1
    assert set(answer) == {
        "version", "service", "prefix", "vhost", "broker", "source", "result", "exit_code",
        "items", "problems", "refusals", "plan", "done", "refused",
    }  # fmt: skip
    assert (answer["service"], answer["source"], answer["result"]) == (
        "billing",
        "management",
        "declared",
    )
    assert {"action": "declare", "kind": "queue", "name": "billing.book"} in answer["done"]
    change_queue(billing)
    code, out, _ = billing.command("events_declare", "--check", "--format", "json")
    answer = json.loads(out)
    assert code == answer["exit_code"] == 1
    assert answer["result"] == "drift"
    [item] = [item for item in answer["items"] if item["state"] == "different"]
    assert item["name"] == "billing.send_invoice"
    assert {"argument": "x-delivery-limit", "declared": "5", "found": "7"} in item["differences"]


def test_verbosity(billing):
    assert billing.command("events_declare", verbosity=0) == (0, "", "")
    _, out, _ = billing.command("events_declare", verbosity=2)
    assert "queue billing:delay.64s  ok" in out
    assert "binding billing:replay → billing.book [billing.book]  ok" in out


@pytest.mark.parametrize(
    ("keys", "change", "text"),
    [
        ({}, {"url": "amqp://u:p@127.0.0.1:9/x"},
         "no connection to RabbitMQ at amqp://u:**@127.0.0.1:9/x"),
        ({}, {"url": "PASSWORD"}, "Login was refused"),
        ({"MANAGEMENT_URL": "http://u:p@127.0.0.1:9"}, {},
         "management API at http://127.0.0.1:9 does not answer"),
        ({"MANAGEMENT_URL": "PASSWORD"}, {}, "with status 401"),
        ({"SERVICE": ""}, {}, "'SERVICE'"),
        ({"HANDLERS": {"x": {"EVENTS": ["a"], "HANDLER": "no.such.thing"}}}, {},
         "'no.such.thing' cannot be imported"),
    ],
)  # fmt: skip
def test_errors_are_one_sentence_without_a_password(service, vhost, keys, change, text):
    password = vhost.node.password
    if keys.get("MANAGEMENT_URL") == "PASSWORD":
        keys = {"MANAGEMENT_URL": vhost.management_url.replace(password, "wrong")}
    if change.get("url") == "PASSWORD":
        change = {"url": vhost.url.replace(password, "wrong")}
    made = service(vhost, HANDLERS=HANDLERS)
    made.raw = {**made.raw, **keys}
    made.vhost = replace(vhost, **change, **({"management_url": ""} if change else {}))
    if change:
        made.raw = {**made.raw, "MANAGEMENT_URL": ""}
    code, out, err = made.command("events_declare")
    assert (code, out) == (2, "")
    assert text in err
    assert password not in err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_retries": 0}, "none: the first failure is archived"),
        ({"max_retries": 1}, "1 s, total 1 s; max 1 retry"),
        ({"max_retries": 3, "retry_jitter": True},
         "1 s, 2 s, 4 s, total 7 s; max 3 retries; jitter: a random part of each"),
        ({"retry_backoff": 0}, "180 s, 180 s, 180 s … 180 s, total 30 min; max 10 retries"),
        ({"max_retries": None}, "1 s, 2 s, 4 s … 512 s; unlimited retries"),
        ({"max_retries": 2, "retry_backoff": 90_000, "retry_backoff_max": 90_000},
         "90000 s, 90000 s, total 2 d 2 h; max 2 retries"),
    ],
)  # fmt: skip
def test_schedule_in_words(options, text):
    assert describe_schedule(RetryPolicy(**options)) == text
