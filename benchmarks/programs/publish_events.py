"""Publish events of the project: one by one, many at once, at a steady pace."""

from __future__ import annotations

import time
from typing import Any

from .given import payload
from .service_events import HANDLERS, app, happened, name, queue
from .serving import at_a_pace, serve, timed


def declare() -> dict[str, Any]:
    """Declare the topology; return the declared names."""
    from django_amqp_events import conf
    from django_amqp_events.broker import topology
    from django_amqp_events.broker.provisioning import startup
    from django_amqp_events.declare import registry

    found = conf.get_settings()
    wanted = topology.build(found, registry.get_registry())
    startup.declare(app, found, wanted)
    return {
        "queues": [queue(number) for number in range(HANDLERS)],
        "all_queues": [each.name for each in wanted.queues],
        "exchanges": [each.name for each in wanted.exchanges],
        "bindings": [(each.queue, each.exchange, each.routing_key) for each in wanted.bindings],
    }


def one_by_one(number: int, size: int = 500) -> dict[str, Any]:
    """Call an event *number* times; each call returns when RabbitMQ has confirmed."""
    given = payload(size)
    publish = happened.publish
    with timed() as answer:
        for _ in range(number):
            publish(**given)
    return answer


def many(number: int, size: int = 500) -> dict[str, Any]:
    """Publish *number* events by one call."""
    given = [payload(size)] * number
    with timed() as answer:
        accepted = len(happened.publish_many(given))
    return {**answer, "accepted": accepted}


def each() -> dict[str, Any]:
    """Publish one event for each handler."""
    from django_amqp_events import publish_event

    for number in range(HANDLERS):
        publish_event(name(number), payload())
    return {}


def named(number: int, event: str) -> dict[str, Any]:
    """Publish an event by its name, one by one."""
    from django_amqp_events import publish_event

    given = payload()
    with timed() as answer:
        for _ in range(number):
            publish_event(event, given)
    return answer


def declare_again() -> dict[str, Any]:
    """Run ``events_declare``, as a deployment does; seconds of the command alone."""
    from django.core.management import call_command

    with timed() as answer:
        call_command("events_declare", verbosity=0)
    return answer


def paced(number: int, rate: float) -> dict[str, Any]:
    """Publish at a steady pace, each with the start time of its call."""
    given = payload()
    for _ in at_a_pace(number, rate):
        happened.publish(**given, sent=time.monotonic())
    return {}


if __name__ == "__main__":
    serve(
        declare=declare, declare_again=declare_again, one_by_one=one_by_one, many=many, each=each,
        named=named, paced=paced,
    )  # fmt: skip
