"""Comparing, planning and applying on a real broker."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import quote, urlsplit

import pytest

from broker import Node
from django_amqp_events.broker.provisioning import (
    changes,
    drift,
    inspection,
    startup,
)
from django_amqp_events.broker.provisioning.amqp_api import FLAGS_REQUIRED_VERSION, version_of
from django_amqp_events.broker.provisioning.management_api import ManagementApi, ManagementApiError
from django_amqp_events.broker.provisioning.replacement import Replacement
from django_amqp_events.exceptions import (
    BrokerUnavailableError,
    TopologyDriftError,
    TopologyError,
)
from tests.conftest import Vhost

from ..conftest import Service, wait_until

HANDLERS = {"send_invoice": ["shop.order.created"], "book": ["shop.#"]}


@pytest.fixture
def billing(service, fresh_vhost):
    made = service(fresh_vhost, HANDLERS=HANDLERS)
    made.import_topology()
    return made


def apply(made: Service, **options: bool) -> changes.Applied:
    with made.active():
        plan = drift.plan(made.inspect(), **options)
        return changes.apply(made.app, made.settings, plan, api=made.api)


def names(items: Iterable[drift.Item], *states: str) -> set[str]:
    return {item.name for item in items if not states or item.state in states}


def spoil(made: Service, queue: str = "billing.send_invoice", **arguments: int) -> None:
    """Declare a queue again with other arguments, bound as before."""
    channel = made.channel()
    bindings = [one for one in made.api.bindings() if one.queue == queue]
    declared = dict(next(q for q in made.topology.queues if q.name == queue).arguments)
    changed = {name.replace("_", "-"): value for name, value in arguments.items()}
    channel.queue_delete(queue)
    channel.queue_declare(
        queue,
        durable=True,
        auto_delete=False,
        arguments={**declared, "x-delivery-limit": 3, **changed},
    )
    for found in bindings:
        channel.queue_bind(queue, found.exchange, found.routing_key)


class TestSeeing:
    def test_all_differences_by_the_api_the_first_by_amqp(self, billing):
        spoil(billing, x_message_ttl=5000)
        [item] = billing.inspect().having("different")
        assert {str(difference) for difference in item.differences} == {
            "x-delivery-limit is 3, declared is 5",
            "x-message-ttl is 5000, declared is none",
        }
        [item] = billing.inspect(exact=False).having("different")
        assert len(item.differences) == 1

    @pytest.mark.parametrize("exact", [True, False])
    @pytest.mark.parametrize(
        ("declared", "state"),
        [
            ({"arguments": {"alternate-exchange": "amq.fanout"}}, "ok"),
            ({"arguments": {"x-owner": "shop"}}, "ok"),
            ({"type": "direct", "arguments": {"alternate-exchange": "amq.fanout"}}, "different"),
            ({"durable": False}, "different"),
            ({"auto_delete": True}, "different"),
        ],
    )
    def test_what_another_owner_has_declared(self, billing, declared, state, exact):
        channel = billing.channel()
        channel.exchange_delete("events")
        given = {"type": "topic", "durable": True, "auto_delete": False, **declared}
        channel.exchange_declare("events", **given)
        report = billing.inspect(exact=exact)
        [item] = [item for item in report.items if item.name == "events"]
        assert item.state == state
        if state == "different":
            assert "other services share this exchange" in "".join(drift.plan(report).refusals)
            return
        assert ("UNROUTED has no effect" in item.note) is ("x-owner" not in str(declared))
        apply(billing)
        assert billing.inspect().result == "identical"
        billing.publish("events", "shop.order.created")
        assert billing.ready("billing.book") == 1

    @pytest.mark.parametrize(
        ("definition", "pattern"),
        [
            ({"max-length": 10}, "^billing[.]"),
            ({"message-ttl": 10}, ".*"),
            ({"delivery-limit": 2}, "book"),
            ({"alternate-exchange": "amq.fanout"}, ".*"),
        ],
    )
    def test_harmful_policy_is_reported(self, billing, definition, pattern):
        billing.set_policy("limits", pattern, definition)
        report = billing.inspect()
        assert report.result == "drift"
        [trouble] = report.errors
        assert "'limits'" in trouble.message
        assert next(iter(definition)) in trouble.message
        assert "billing.book" in trouble.message or "and" in trouble.message
        # What others share may have it.
        [shared] = [item for item in report.items if item.name == "events"]
        assert shared.state == "ok"
        assert ("UNROUTED has no effect" in shared.note) is ("alternate-exchange" in definition)

    def test_policy_is_refused_before_anything_is_declared(self, service, fresh_vhost):
        made = service(fresh_vhost, HANDLERS=HANDLERS)
        made.set_policy("limits", "^billing[.]book$", {"max-length": 10})
        with made.active(), pytest.raises(TopologyDriftError, match="'limits' sets max-length"):
            changes.apply(made.app, made.settings, drift.plan(made.inspect()))
        assert made.api.queues() == []

    @pytest.mark.parametrize(
        ("definition", "pattern"),
        [
            ({"queue-leader-locator": "balanced"}, ".*"),
            ({"max-length": 1}, "^other"),
            ({"delivery-limit": 20, "dead-letter-exchange": "dlx"}, "^billing[.]"),
            ({"message-ttl": 10**10}, "^billing:delay"),
        ],
    )
    def test_harmless_policy(self, billing, definition, pattern):
        billing.set_policy("place", pattern, definition)
        assert billing.inspect().result == "identical"

    @pytest.mark.parametrize("kind", ["classic", "quorum"])
    def test_the_lower_number_and_the_arguments_text_win(self, billing, kind):
        channel = billing.channel()
        ours = {"x-message-ttl": 100, "x-dead-letter-exchange": "", "x-queue-type": kind}
        channel.queue_declare(
            "short", durable=True, auto_delete=False,
            arguments={**ours, "x-dead-letter-routing-key": "billing.book"},
        )  # fmt: skip
        billing.set_policy("long", "^short$", {"message-ttl": 10**9, "dead-letter-exchange": "x"})
        wait_until(lambda: billing.api.queue("short").get("policy") == "long", "it applies")
        billing.publish("", "short")
        wait_until(lambda: billing.ready("billing.book") == 1, "it expires")


class TestWorkers:
    def test_verify_names_drift_and_remedy(self, billing):
        billing.channel().queue_delete("billing.book")
        spoil(billing)
        with billing.active(), pytest.raises(TopologyDriftError) as caught:
            startup.prepare(billing.app, billing.settings, billing.topology)
        text = str(caught.value)
        assert "queue billing.book: missing" in text
        assert "x-delivery-limit is 3, declared is 5" in text
        assert "run manage.py events_declare" in text
        assert not billing.exists("billing.book")

    @contextmanager
    def _as_user(self, made, configure):
        """The Celery app logs in as a user with these configure permissions."""
        node, user = made.vhost.node, f"limited-{made.vhost.name[-8:]}"
        node.http("PUT", f"/api/users/{user}", {"password": "secret", "tags": "management"})
        permissions = {"configure": configure, "write": ".*", "read": ".*"}
        node.http("PUT", f"/api/permissions/{made.vhost.path}/{user}", permissions)
        host = made.vhost.url.rpartition("@")[2]
        limited = replace(made, vhost=replace(made.vhost, url=f"amqp://{user}:secret@{host}"))
        try:
            yield limited
        finally:
            node.http("DELETE", f"/api/users/{user}")

    def test_external_tolerates_missing_read_permission(self, service, fresh_vhost, caplog):
        made = service(fresh_vhost, TOPOLOGY="external", HANDLERS=HANDLERS)
        made.declare()
        with self._as_user(made, "^$") as limited, limited.active():
            report = startup.prepare(made.app, made.settings, made.topology)
            assert {item.kind for item in report.having("unknown")} >= {"queue", "exchange"}
            assert report.result == "unknown"
            assert not caplog.records
            made.channel().queue_delete("billing.book")
            with pytest.raises(TopologyDriftError, match=r"billing\.book: missing"):
                startup.prepare(made.app, made.settings, made.topology)

    def test_verify_warns_where_it_may_not_see(self, billing, caplog):
        with self._as_user(billing, "^$") as limited, limited.active():
            startup.prepare(billing.app, billing.settings, billing.topology)
        assert "could not be compared" in caplog.text

    def test_each_refusal_has_its_own_remedy(self, service, fresh_vhost):
        made = service(fresh_vhost, HANDLERS=HANDLERS)
        node, path = made.vhost.node, made.vhost.path
        queues = f"/api/vhost-limits/{path}/max-queues"
        node.http("PUT", queues, {"value": 3})
        with pytest.raises(TopologyError, match=r"limit .* is reached") as caught:
            made.declare()
        found = len(made.api.queues())
        assert found == 3
        (steps,) = re.findall(r"(\d+) of \d+ steps are done", str(caught.value))
        assert int(steps) >= found
        with pytest.raises(TopologyError, match="nothing was changed"):
            made.declare()
        node.http("DELETE", queues)
        made.declare()

        def refused(made: Service, says: str) -> None:
            with pytest.raises(BrokerUnavailableError, match=says):
                made.inspect(exact=False)

        with self._as_user(made, ".*") as limited:
            user = limited.vhost.url.partition("//")[2].partition(":")[0]
            for limit in (
                f"/api/vhost-limits/{path}/max-connections",
                f"/api/user-limits/{user}/max-connections",
                f"/api/user-limits/{user}/max-channels",
            ):
                node.http("PUT", limit, {"value": 0})
                refused(limited, "limits of both")
                node.http("DELETE", limit)
            limited.inspect(exact=False)
            node.http("DELETE", f"/api/permissions/{path}/{user}")
            refused(limited, "set_permissions")
            start, _, _ = limited.vhost.url.rpartition("/")
            refused(
                replace(limited, vhost=replace(limited.vhost, url=f"{start}/x")),
                "name of the vhost",
            )
            wrong = limited.vhost.url.replace(":secret@", ":wrong@")
            refused(replace(limited, vhost=replace(limited.vhost, url=wrong)), "check user and")


class TestRequirements:
    @pytest.mark.slow
    def test_without_the_flag_nothing_is_declared(self, service, make_node, monkeypatch):
        """A node with stream_queue disabled, which only 3.10 and 3.11 support."""
        flags = "quorum_queue,implicit_default_bindings,virtual_host_metadata,user_limits"
        environment = Node._environment
        monkeypatch.setattr(
            Node,
            "_environment",
            lambda self: {**environment(self), "RABBITMQ_FEATURE_FLAGS": flags},
        )
        node = make_node()
        if version_of({"product": "RabbitMQ", "version": node.version}) >= FLAGS_REQUIRED_VERSION:
            pytest.skip(f"RabbitMQ {node.version} always has the flag")
        states = {flag["name"]: flag["state"] for flag in node.http("GET", "/api/feature-flags")}
        assert states["stream_queue"] == "disabled"
        node.add_vhost("v")
        vhost = Vhost(
            name="v",
            url=node.amqp_url("v"),
            management_url=node.management_url,
            node=node,
        )
        made = service(vhost, HANDLERS=HANDLERS)
        with pytest.raises(TopologyDriftError, match="enable_feature_flag stream_queue"):
            made.declare()
        with made.active(), pytest.raises(TopologyError, match="stream_queue disabled"):
            startup.verify(made.app, made.settings, made.topology)
        assert made.api.queues() == []
        node.ctl("enable_feature_flag", "stream_queue")
        made.declare()
        assert made.inspect().result == "identical"

    @pytest.mark.parametrize(
        ("server", "message"),
        [
            ({"product": "RabbitMQ", "version": "3.9.29"}, "older than 3.10"),
            ({"product": "LavinMQ", "version": "2.0"}, "not RabbitMQ"),
        ],
    )
    def test_other_brokers_are_refused(self, billing, server, message, monkeypatch):
        monkeypatch.setattr("django_amqp_events.broker.provisioning.amqp_api.Amqp.server", server)
        with billing.active(), pytest.raises(TopologyError, match=message):
            startup.verify(billing.app, billing.settings, billing.topology)


STALE = {"billing.gone", "billing:delay.7s", "events → billing.book [crm.#]"}


class TestStale:
    @pytest.fixture
    def smaller(self, billing, service, fresh_vhost):
        """The next release, without one handler, pattern and delay."""
        old = service(
            fresh_vhost,
            HANDLERS={
                **HANDLERS,
                "gone": {"EVENTS": ["shop.order.created"], "RETRY_BACKOFF": 7, "MAX_RETRIES": 1,
                         "HANDLER": "tests.integration.handlers.handle"},
                "book": ["shop.#", "crm.#"],
            },
        )  # fmt: skip
        old.declare()
        return service(fresh_vhost, HANDLERS=HANDLERS)

    def test_is_named_and_left(self, smaller):
        report = smaller.inspect()
        assert names(report.having("stale")) == STALE
        assert drift.plan(report).steps == ()
        assert smaller.inspect(exact=False).having("stale") == ()

    def test_consumers_keep_a_queue(self, smaller):
        smaller.consume("billing.gone")
        [(_, reason)] = apply(smaller, delete_stale=True).refused
        assert "1 consumer" in reason

    def test_an_interrupted_deletion_keeps_a_queue(self, smaller, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        before = [one for one in smaller.api.bindings() if one.queue == "billing.gone"]
        monkeypatch.setattr(Replacement, "_verdict", interrupt)
        with pytest.raises(KeyboardInterrupt):
            apply(smaller, delete_stale=True)
        after = [one for one in smaller.api.bindings() if one.queue == "billing.gone"]
        assert set(after) == set(before)

    def test_stuck_dead_letter_keeps_a_queue(self, smaller):
        """Neither ready nor unacked: only fresh totals show it. It is bound again as it was."""
        smaller.channel().exchange_delete("billing:graveyard")
        smaller.publish("", "billing.gone", b"stuck")
        channel = smaller.channel()
        channel.basic_reject(channel.basic_get("billing.gone").delivery_tag, requeue=False)
        wait_until(lambda: not smaller.ready("billing.gone"), "the dead letter")

        def bound() -> list[tuple[str, str]]:
            found = [one for one in smaller.api.bindings() if one.queue == "billing.gone"]
            return sorted((binding.exchange, binding.routing_key) for binding in found)

        before = bound()
        with smaller.active():
            plan = drift.plan(smaller.inspect(), delete_stale=True)
            only = tuple(step for step in plan.steps if step.item.name == "billing.gone")
            applied = changes.apply(
                smaller.app, smaller.settings, replace(plan, steps=only), api=smaller.api
            )
        [(_, reason)] = applied.refused
        assert "holds 1 message" in reason
        assert bound() == before

    def test_a_binding_with_arguments_is_removed_as_it_is(self, smaller):
        apply(smaller, delete_stale=True)
        smaller.channel().queue_bind(
            "billing.book", "events", "shop.#", arguments={"x-priority": 1}
        )
        report = smaller.inspect()
        assert names(report.having("stale")) == {"events → billing.book [shop.#] {'x-priority': 1}"}
        assert names(report.having("missing")) == set()
        apply(smaller, delete_stale=True)
        assert smaller.inspect().result == "identical"

    def test_foreign_queues_and_bindings_are_not_stale(self, smaller):
        channel = smaller.channel()
        channel.exchange_declare("legacy", "topic", durable=True, auto_delete=False)
        channel.queue_bind("billing.book", "legacy", "shop.#")
        """Queues of Celery and of a service with a PREFIX."""
        channel = smaller.channel()
        channel.queue_declare("billing.images", durable=True, auto_delete=False)
        channel.queue_declare("billing:notes", durable=True, auto_delete=False)
        channel.queue_declare(
            "billing.mail.send",
            durable=True,
            auto_delete=False,
            arguments={"x-dead-letter-exchange": "billing.mail:graveyard",
                       "x-dead-letter-routing-key": "billing.mail.send"},
        )  # fmt: skip
        report = smaller.inspect()
        assert names(report.having("stale")) == STALE
        assert "bound by others" in [item.note for item in report.having("ok")]


class TestManagementApi:
    def test_broker_port_speaks_another_protocol(self, billing):
        port = urlsplit(billing.vhost.url).port
        api = ManagementApi(f"http://u:p@127.0.0.1:{port}", vhost="/", timeout=5)
        with pytest.raises(ManagementApiError):
            api.queues()

    def test_a_monitoring_user_is_enough(self, billing):
        node = billing.vhost.node
        user = f"watch-{billing.vhost.name[-8:]}"
        node.http("PUT", f"/api/users/{user}", {"password": "p w/d", "tags": "monitoring"})
        try:
            permissions = {"configure": "^$", "write": "^$", "read": "^$"}
            node.http("PUT", f"/api/permissions/{billing.vhost.path}/{user}", permissions)
            host = billing.vhost.management_url.rpartition("@")[2]
            url = f"http://{user}:{quote('p w/d', safe='')}@{host}"
            api = ManagementApi(url, vhost=billing.vhost.name)
            with billing.active():
                report = inspection.inspect(
                    billing.app, billing.settings, billing.topology, api=api
                )
            assert report.result == "identical"
        finally:
            node.http("DELETE", f"/api/users/{user}")
