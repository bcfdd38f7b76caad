"""`events_declare` of 1,000 handlers without changes.

The second run of the command, in a running process, over plain AMQP and with the management API
(which also sees bindings and stale queues). It is compared with passive declares of the same
exchanges and queues, one after another, also in a running process; each opens a new connection.
Passive declares compare no arguments and see no bindings. Over plain AMQP the command therefore
binds everything again, three bindings per handler; passive declares followed by the same binds are
a participant of their own.
"""

from __future__ import annotations

from ..ground import Ground
from ..measured import OURS, Measured, Size, Table, Target, in_turn
from . import Tell

PASSIVE = "raw passive declares"
BINDING = "raw passive declares, and binds"
EXACT = f"{OURS}, management API"


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    handlers = size.number(1000, 100)
    vhost = ground.vhost("declare")
    plain = ground.program("publish_events", vhost, handlers=handlers)
    exact = ground.program(
        "publish_events", vhost, handlers=handlers, management=ground.node.management_url
    )
    declared = plain.ask("declare")
    raw = ground.program("publish_floor", vhost)
    names = {"queues": declared["all_queues"], "exchanges": declared["exchanges"]}
    runs = {
        OURS: lambda: float(plain.ask("declare_again")["seconds"]),
        PASSIVE: lambda: float(raw.ask("passive", **names)["seconds"]),
        BINDING: lambda: float(
            raw.ask("passive", **names, bindings=declared["bindings"])["seconds"]
        ),
        EXACT: lambda: float(exact.ask("declare_again")["seconds"]),
    }
    values = in_turn(runs, size.turns(5), tell)
    what = f"events_declare of {handlers:,} handlers, second run"
    targets = Target.pair(PASSIVE, reach=2, stretch=1.2)
    there = f"{len(names['queues']):,} queues, {len(names['exchanges'])} exchanges"
    return [
        Table(
            what=f"{what}, plain AMQP",
            unit="s",
            better="less",
            values={who: values[who] for who in (OURS, PASSIVE, BINDING)},
            targets=targets,
            counted=f"{there}, {len(declared['bindings']):,} bindings",
            notes=(f"Over plain AMQP, the same result needs {BINDING}.",),
        ),
        Table(
            what=f"{what}, management API",
            unit="s",
            better="less",
            values={who: values[who] for who in (EXACT, PASSIVE)},
            targets=targets,
            counted=there,
            ours=EXACT,
        ),
    ]
