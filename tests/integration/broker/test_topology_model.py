"""Releases, drift, publishes and applied plans in any order: no message is lost.

`AMQP_EVENTS_FUZZ=200` in the environment tries 200 examples, at random.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import amqp
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from django_amqp_events.broker.provisioning import changes, drift
from django_amqp_events.declare.patterns import pattern_matches
from django_amqp_events.exceptions import TopologyDriftError
from tests.stateful import FUZZ

from ..conftest import Service

LONG_RUN = FUZZ in os.environ
CALLABLE = "tests.integration.handlers.handle"
#: What a service may have from one release to the next: a handler is renamed, moved to another
#: queue, has other patterns or another delay, or is removed.
RELEASES: list[dict[str, Any]] = [
    {"mail": ["shop.order"], "book": ["shop.#"]},
    {"post": ["shop.order"], "book": ["shop.#"]},
    {"mail": {"EVENTS": ["shop.order"], "HANDLER": CALLABLE, "QUEUE": "slow"}, "book": ["shop.#"]},
    {"mail": ["shop.order", "crm.#"], "book": ["crm.#"]},
    {"mail": {"EVENTS": ["shop.order"], "HANDLER": CALLABLE, "RETRY_BACKOFF": 7, "MAX_RETRIES": 1}},
]
QUEUES = [f"billing.{name}" for name in ("mail", "post", "book", "slow")]

steps = st.one_of(
    st.tuples(st.just("release"), st.integers(0, len(RELEASES) - 1)),
    st.tuples(st.just("apply"), st.booleans(), st.booleans()),
    st.tuples(st.just("publish"), st.sampled_from(["shop.order", "shop.paid", "crm.lead"])),
    st.tuples(st.sampled_from(["drop", "unbind"]), st.sampled_from(QUEUES)),
    st.tuples(st.just("spoil"), st.sampled_from(["billing:archive", "billing:delay.2s"])),
)


class Play:
    """The releases of a service on one vhost, and the messages that its queues must have."""

    def __init__(self, releases: Sequence[Service]) -> None:
        self.releases = releases
        self.now = releases[0]
        self.channel = self.now.channel()
        self.published = 0
        #: Messages by their queue.
        self.expected: set[tuple[str, bytes]] = set()

    def release(self, number: int) -> None:
        self.now = self.releases[number]

    def apply(self, delete_stale: bool, recreate_empty: bool) -> changes.Applied | None:
        options = {"delete_stale": delete_stale, "recreate_empty": recreate_empty}
        with self.now.active():
            plan = drift.plan(self.now.inspect(), **options)
            before = self.found()
            if plan.refusals:
                with pytest.raises(TopologyDriftError):
                    changes.apply(self.now.app, self.now.settings, plan, api=self.now.api)
                assert self.found() == before
                return None
            applied = changes.apply(self.now.app, self.now.settings, plan, api=self.now.api)
        report = self.now.inspect()
        assert not report.having("missing")
        kept = {step.item.name for step, _ in applied.refused}
        states: Mapping[drift.State, bool] = {"different": recreate_empty, "stale": delete_stale}
        for state, wanted in states.items():
            left = {item.name for item in report.having(state) if item.kind == "queue"}
            assert not wanted or left <= kept, (left, kept)
        return applied

    def found(self) -> dict[str, set[tuple[str, str]]]:
        """Return the service's queues and their bindings."""
        return {
            queue["name"]: {
                (binding.exchange, binding.routing_key)
                for binding in self.now.api.bindings()
                if binding.queue == queue["name"]
            }
            for queue in self.now.api.queues()
        }

    def publish(self, key: str) -> None:
        self.published += 1
        body = b"%d" % self.published
        for queue, bindings in self.found().items():
            if any(at == "events" and pattern_matches(to, key) for at, to in bindings):
                self.expected.add((queue, body))
        message = amqp.Message(body, delivery_mode=2)
        self.channel.basic_publish_confirm(message, "events", key)

    def drop(self, queue: str) -> None:
        self.channel.queue_delete(queue)
        self.expected = {each for each in self.expected if each[0] != queue}

    def unbind(self, queue: str) -> None:
        for exchange, key in self.found().get(queue, ()):
            if exchange == "events":
                self.channel.queue_unbind(queue, exchange, key)

    def spoil(self, queue: str) -> None:
        """Declare an empty queue again with other arguments, bound as before."""
        bindings = self.found().get(queue)
        if bindings is None or self.now.ready(queue):
            return
        arguments = {"x-queue-type": "quorum", "x-delivery-limit": 3}
        self.channel.queue_delete(queue)
        self.channel.queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)
        for exchange, key in bindings:
            if exchange:
                self.channel.queue_bind(queue, exchange, key)

    def end(self) -> None:
        """Read all queues; then one plan makes the topology that of the first release."""
        found: Counter[tuple[str, bytes]] = Counter()
        for queue in self.found():
            if queue.startswith("billing."):
                for message in self.now.take_all(queue):
                    body = message.body
                    found[queue, body.encode() if isinstance(body, str) else body] += 1
        assert self.expected <= found.keys(), "a message is lost"
        assert found.keys() <= self.expected
        assert max(found.values(), default=0) <= 1
        self.release(0)
        self.apply(True, True)
        applied = self.apply(True, True)
        assert applied is not None
        assert not applied.refused
        assert self.now.inspect().result == "identical"


@settings(
    max_examples=int(os.environ.get(FUZZ, "5")),
    derandomize=not LONG_RUN,
    deadline=None,
    database=None,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if LONG_RUN else [])],
)
@example(plan=[("spoil", "billing:archive"), ("publish", "shop.paid"), ("apply", True, True)])
@given(plan=st.lists(steps, min_size=3, max_size=10))
def _any_order(releases: Sequence[Service], plan: list[tuple[Any, ...]]) -> None:
    play = Play(releases)
    for name, *arguments in plan:
        getattr(play, name)(*arguments)
    play.end()


def test_no_message_is_lost_in_any_order(service, fresh_vhost):
    releases = [service(fresh_vhost, HANDLERS=handlers) for handlers in RELEASES]
    releases[0].import_topology()
    _any_order(releases)
