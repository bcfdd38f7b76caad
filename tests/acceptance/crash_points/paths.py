"""The paths of an event, in the order of the table in docs/architecture.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from django_amqp_events.message import headers
from django_amqp_events.message.types import Message

from ..harness import Eyes, until
from .scene import Path, Point, Scene

EVENT = "paired.happened"
HANDLERS = ("call", "effect")
#: Deliveries without an answer after which RabbitMQ takes a message from its handler's queue.
LOSSES = 6


def _publish(scene: Scene, *plans: Sequence[str]) -> dict[str, list[str]]:
    """Publish an event for each plan; return the plans by event id."""
    return {scene.eyes.event(EVENT, {"plan": plan}): [*plan] for plan in plans}


# -- publishing ------------------------------------------------------------------------------------


class Publish(Path):
    """A process publishes; what it was told is accepted is in both queues."""

    kinds: ClassVar[tuple[str, ...]] = ("sql", "commit", "publish")
    mode: ClassVar[str]

    def prepare(self, scene: Scene) -> None:
        self.ids = [str(uuid4()) for _ in range(3)]

    def act(self, scene: Scene, *, crash: bool) -> None:
        accepted = [line["events"][0] for line in scene.service.ledger(what="accepted")]
        events = [event_id for event_id in self.ids if event_id not in accepted]
        plan = {"mode": self.mode, "events": events, "plan": ["ok"]}
        scene.command(json.dumps(plan), program=("-m", "testproject.paired"), crash=crash)

    def check(self, scene: Scene) -> None:
        self.expect(scene, self.ids)

    def expect(self, scene: Scene, published: Sequence[str]) -> None:
        """Each event is in the queue of each handler, twice at most if its process died."""
        found = {unit: len(messages) for unit, messages in scene.copies().items()}
        assert found.keys() == {f"{pk} {name}" for pk in published for name in HANDLERS}, found
        assert max(found.values(), default=1) <= 1 + scene.died, found


class Immediate(Publish):
    name = "publish, immediate"
    kinds = ("publish",)
    mode = "immediate"


class Outbox(Publish):
    """Of its two transactions one is rolled back; the relay is what follows a crash."""

    name = "publish, outbox"
    mode = "outbox"

    def act(self, scene: Scene, *, crash: bool) -> None:
        if crash:
            super().act(scene, crash=True)
        else:
            scene.command("events_relay", "--until-empty")

    def is_over(self, scene: Scene) -> bool:
        return not scene.rows("outboxevent")

    def check(self, scene: Scene) -> None:
        committed = scene.database.effects
        assert committed in ([], self.ids[1:])
        assert committed or scene.died
        self.expect(scene, committed)


class OnCommit(Outbox):
    """What was committed may be lost, as documented; what was not is never published."""

    name = "publish, on_commit"
    mode = "on_commit"

    def act(self, scene: Scene, *, crash: bool) -> None:
        if crash:
            super().act(scene, crash=True)

    def expect(self, scene: Scene, published: Sequence[str]) -> None:
        found = {unit: len(messages) for unit, messages in scene.copies().items()}
        wanted = {f"{pk} {name}" for pk in published for name in HANDLERS}
        assert found.keys() <= wanted, found
        assert scene.died or found.keys() == wanted, found
        assert max(found.values(), default=1) == 1, found


#: Lets the leases of a dead process end.
_ENDED = (
    "from django_amqp_events.models import OutboxEvent\n"
    "from django.db.models import F\n"
    "OutboxEvent.objects.update(due_at=F('created_at'))"
)


class Relay(Outbox):
    """A relay publishes what a dead process has committed."""

    name = "relay"

    def make(self, scene: Scene) -> None:
        super().prepare(scene)
        scene.begin(Point(1, "after"), kinds=("commit",))
        super().act(scene, crash=True)
        assert scene.died
        scene.keep()

    def prepare(self, scene: Scene) -> None:
        assert len(scene.rows("outboxevent")) == 2
        scene.service.python(_ENDED)

    def act(self, scene: Scene, *, crash: bool) -> None:
        scene.command("events_relay", "--until-empty", crash=crash)


# -- handling --------------------------------------------------------------------------------------


class Handle(Path):
    """A worker runs both handlers of its events, by plans of one step per attempt."""

    pool: ClassVar[str] = "solo"
    plans: ClassVar[Sequence[Sequence[str]]]

    def prepare(self, scene: Scene) -> None:
        self.plans_of = _publish(scene, *self.plans)

    def act(self, scene: Scene, *, crash: bool) -> None:
        scene.worker(self.pool, lambda: self.is_done(scene), crash=crash)

    def is_done(self, scene: Scene) -> bool:
        ended = {(line["event"], line["handler"]) for line in scene.service.ledger(what="end")}
        handled = sum(plan[-1] == "ok" for plan in self.plans_of.values()) * len(HANDLERS)
        archived = len(self.plans_of) * len(HANDLERS) - handled
        return (
            len(ended) == handled
            and scene.eyes.ready(scene.archive) >= archived
            and not scene.ready()
        )

    def is_over(self, scene: Scene) -> bool:
        # The worker has stopped, so no message is unacknowledged.
        return self.is_done(scene)

    def check(self, scene: Scene) -> None:
        archived: dict[tuple[str, str], list[int]] = {}
        for message in scene.eyes.take(scene.archive):
            entry = json.loads(message.headers[headers.EVENT_ARCHIVE])
            unit = entry["event_id"], entry["handler"].rpartition(".")[2]
            archived.setdefault(unit, []).append(entry["attempt"])
        effects = scene.database.effects
        inbox = [event_id for (event_id,) in scene.rows("inboxentry", "event_id")]
        for event_id, plan in self.plans_of.items():
            fine = plan[-1] == "ok"
            assert effects.count(event_id) == inbox.count(event_id) == fine, (effects, inbox)
            for name in HANDLERS:
                runs = [
                    line["attempt"]
                    for line in scene.service.runs(event_id, handler=f"testproject.{name}")
                ]
                attempts = range(1, len(plan) + 1)
                assert {*runs} == {*attempts}, runs
                copies = archived.pop((event_id, name), [])
                assert bool(copies) is not fine, copies
                assert {*copies} <= {len(plan)}, copies
                # A process dies once.
                assert all(runs.count(attempt) <= 1 + scene.died for attempt in attempts), runs
                assert len(copies) <= 1 + scene.died, copies
        assert not archived, archived


class HandleSuccess(Handle):
    name = "handle, success"
    # Acks of quick runs are written together.
    varies = True
    plans = (["ok"], ["ok"])


class HandleRetry(Handle):
    name = "handle, retry"
    varies = True
    plans = (["fail", "ok"],)


class HandleFailure(Handle):
    name = "handle, archive"
    plans = (["never"], ["never"])


class Chunks(Handle):
    """The main process of a prefork worker, which settles chunks of deliveries."""

    name = "handle, prefork, main process"
    varies = True
    pool = "prefork"
    kinds = ("publish", "ack", "reject")
    plans = (["ok"], ["ok"], ["ok"], ["fail", "ok"], ["never"], ["ok"], ["ok"], ["ok"])


class Child(Handle):
    """A process of a prefork worker's pool, which the worker replaces."""

    name = "handle, prefork, pool process"
    pool = "prefork"
    child = True
    plans = (["ok"], ["fail", "ok"], ["never"])


class Reaper(Handle):
    """A reaper runs events alone that were delivered too often, and their retries."""

    name = "isolate, reaper"
    plans = (["fail", "ok"], ["never"])

    def prepare(self, scene: Scene) -> None:
        super().prepare(scene)
        for queue in scene.handlers:
            for _ in range(LOSSES):
                _lose(scene.eyes, queue, len(self.plans))
        graveyard, number = f"{scene.service.name}:graveyard", len(self.plans) * len(HANDLERS)
        until(lambda: scene.eyes.ready(graveyard) == number, 20, "they are in the graveyard")

    def act(self, scene: Scene, *, crash: bool) -> None:
        scene.serve(lambda: self.is_done(scene), "events_reaper", crash=crash)


def _lose(eyes: Eyes, queue: str, number: int) -> None:
    """Take deliveries and go without an answer."""
    channel = eyes.channel()
    channel.auto_decode = False
    for _ in range(number):
        until(lambda: channel.basic_get(queue), 10, "a delivery")
    channel.close()


# -- the archive -----------------------------------------------------------------------------------


class Archive(Path):
    """Paths that begin with four archived events: one that is fixed, and one that is not."""

    messages: Sequence[Message] = ()

    def make(self, scene: Scene) -> None:
        scene.begin()
        never, _ = self.ids = [*_publish(scene, ["never"], ["unless:fixed"])]
        scene.worker("solo", lambda: scene.eyes.ready(scene.archive) == 4)
        self.never = never
        self.messages = self.taken(scene)
        self.begin(scene)
        scene.keep()

    def taken(self, scene: Scene) -> list[Message]:
        """Take the messages off the archive queue, to be published as often as wanted."""
        return [
            Message(
                exchange="",
                routing_key=scene.archive,
                body=message.body,
                headers=message.headers,
                properties={
                    name: value
                    for name, value in message.properties.items()
                    if name != "application_headers"
                },
                event_id=str(message.properties.get("message_id")),
                name=EVENT,
            )
            for message in scene.eyes.take(scene.archive)
        ]

    def begin(self, scene: Scene) -> None:
        """Bring the database to where the path begins."""

    def mirror(self, scene: Scene, *, crash: bool = False) -> None:
        scene.command("events_mirror", "--until-empty", "--batch-size", "2", crash=crash)

    def states(self, scene: Scene) -> dict[str, str]:
        """Return the states of the events by event and handler."""
        rows = scene.rows("archivedevent", "event_id, handler, state")
        found = {f"{pk} {name.rpartition('.')[2]}": state for pk, name, state in rows}
        assert len(found) == len(rows), rows
        return found

    def units(self) -> set[str]:
        return {f"{pk} {name}" for pk in self.ids for name in HANDLERS}


class Mirror(Archive):
    name = "mirror, archived events"
    varies = True

    def prepare(self, scene: Scene) -> None:
        scene.eyes.send(*self.messages)

    def act(self, scene: Scene, *, crash: bool) -> None:
        self.mirror(scene, crash=crash)

    def is_over(self, scene: Scene) -> bool:
        return len(scene.rows("archivedevent")) == 4 and not scene.eyes.ready(scene.archive)

    def check(self, scene: Scene) -> None:
        assert self.states(scene) == dict.fromkeys(self.units(), "archived")
        assert len(scene.rows("archivedfailure")) == 4


class Mirrored(Archive):
    """Paths that begin with the four events in the database."""

    def begin(self, scene: Scene) -> None:
        scene.eyes.send(*self.messages)
        self.mirror(scene)
        assert len(self.states(scene)) == 4


class Outcomes(Mirrored):
    name = "mirror, outcomes of replays"
    varies = True

    def begin(self, scene: Scene) -> None:
        super().begin(scene)
        scene.command("events_replay", "--all")
        (scene.service.where / "fixed").touch()
        scene.worker("solo", lambda: scene.eyes.ready(scene.archive) == 4)
        self.messages = self.taken(scene)

    def prepare(self, scene: Scene) -> None:
        scene.eyes.send(*self.messages)

    def act(self, scene: Scene, *, crash: bool) -> None:
        self.mirror(scene, crash=crash)

    def is_over(self, scene: Scene) -> bool:
        going = "replaying" in self.states(scene).values()
        return not going and not scene.eyes.ready(scene.archive)

    def check(self, scene: Scene) -> None:
        expected = {
            unit: "archived" if unit.startswith(self.never) else "succeeded"
            for unit in self.units()
        }
        assert self.states(scene) == expected
        assert len(scene.rows("archivedfailure")) == 6
        replays = sorted(state for (state,) in scene.rows("replay", "state"))
        assert replays == ["failed", "failed", "succeeded", "succeeded"]


class Replay(Mirrored):
    """Events are replayed; after a crash the mirror publishes those that were claimed."""

    name = "replay"
    kinds = ("sql", "commit", "publish")

    def act(self, scene: Scene, *, crash: bool) -> None:
        scene.command("events_replay", "--all", crash=crash)

    def finish(self, scene: Scene) -> None:
        if "queued" in self.states(scene).values():
            scene.service.python(
                "from django_amqp_events.archive import replay\nreplay.resume(lease=0)"
            )

    def is_over(self, scene: Scene) -> bool:
        return {*self.states(scene).values()} == {"replaying"}

    def check(self, scene: Scene) -> None:
        self.compare_replays(scene, self.states(scene))

    def compare_replays(self, scene: Scene, states: Mapping[str, str]) -> None:
        """Each event has one replay, and its message has that id and is in its handler's queue."""
        assert len(states) == 4
        replays = {
            str(pk).replace("-", ""): f"{event_id} {handler.rpartition('.')[2]}"
            for pk, event_id, handler in scene.database.query(
                "SELECT r.id, e.event_id, e.handler FROM django_amqp_events_replay r "
                "JOIN django_amqp_events_archivedevent e ON e.id = r.event_id "
                "WHERE r.state = 'published'"
            )
        }
        replayed = {unit for unit, state in states.items() if state == "replaying"}
        assert sorted(replays.values()) == sorted(replayed)
        copies = scene.copies()
        assert copies.keys() == replayed
        for unit, messages in copies.items():
            ids = {
                message.headers[headers.EVENT_REPLAY_ID].replace("-", "") for message in messages
            }
            assert [replays[pk] for pk in ids] == [unit]
            assert len(messages) <= 1 + scene.died
            self.compare_bodies(messages)

    def compare_bodies(self, messages: Sequence[Any]) -> None:
        pass


class Edit(Replay):
    name = "replay, edited"
    settings: ClassVar[Mapping[str, Any]] = {"EDITING": True}

    def prepare(self, scene: Scene) -> None:
        (self.edited,) = [
            str(pk)
            for pk, event_id, handler in scene.rows("archivedevent", "id, event_id, handler")
            if event_id == self.never and handler.endswith("effect")
        ]

    def act(self, scene: Scene, *, crash: bool) -> None:
        if crash or "queued" not in (states := self.states(scene).values()):
            if not crash and "replaying" in states:
                return
            scene.command(
                "shell", "-c",
                "from django_amqp_events.archive import replay\n"
                "from django_amqp_events.models import ArchivedEvent\n"
                f"row = ArchivedEvent.objects.get(pk={self.edited!r})\n"
                "replay.edit(row.pk, row.version, {'plan': ['ok']}, by='x', reason='x')",
                crash=crash,
            )  # fmt: skip

    def is_over(self, scene: Scene) -> bool:
        return sorted(self.states(scene).values()) == [*["archived"] * 3, "replaying"]

    def compare_bodies(self, messages: Sequence[Any]) -> None:
        assert all(b'"ok"' in message.body for message in messages)

    def check(self, scene: Scene) -> None:
        super().check(scene)
        assert len(scene.rows("revision")) == 1


class Discard(Mirrored):
    name = "discard"
    kinds = ("sql", "commit")

    def act(self, scene: Scene, *, crash: bool) -> None:
        scene.command("events_replay", "--all", "--discard", "--comment", "x", crash=crash)

    def check(self, scene: Scene) -> None:
        assert self.states(scene) == dict.fromkeys(self.units(), "discarded")
        assert [*scene.rows("archiveaction", "action")] == [("discard",)] * 4


class Batch(Replay):
    """A runner publishes a batch; after a crash another one continues, and the mirror."""

    name = "batch runner"
    environ: ClassVar[Mapping[str, str]] = {
        "TESTPROJECT_LEASE": "1",
        "TESTPROJECT_CONSTANTS": json.dumps({"archive.batches.runner.CHUNK": 2}),
    }

    def begin(self, scene: Scene) -> None:
        super().begin(scene)
        scene.command("events_replay", "--all", "--background", "--comment", "x")

    def act(self, scene: Scene, *, crash: bool) -> None:
        scene.serve(
            lambda: "archived" not in self.states(scene).values(), "events_batches", crash=crash
        )

    def check(self, scene: Scene) -> None:
        super().check(scene)
        assert [*scene.rows("replaybatch", "state")] == [("running",)]
        assert len(scene.rows("replay", "id", "batch_id IS NOT NULL")) == 4


class Prune(Discard):
    name = "prune"
    settings: ClassVar[Mapping[str, Any]] = {"RETENTION": {"DISCARDED": 0.001}}

    def begin(self, scene: Scene) -> None:
        super().begin(scene)
        super().act(scene, crash=False)

    def act(self, scene: Scene, *, crash: bool) -> None:
        scene.command("events_prune", crash=crash)

    def check(self, scene: Scene) -> None:
        for table in ("archivedevent", "archivedfailure", "archiveaction", "searchvalue"):
            assert not scene.rows(table), table


class Recover(Archive):
    """The messages of a queue become rows of the archive."""

    name = "recover"
    varies = True
    kinds = ("publish", "ack", "reject")

    def make(self, scene: Scene) -> None:
        pass

    def prepare(self, scene: Scene) -> None:
        self.ids = [*_publish(scene, ["ok"], ["ok"], ["ok"])]

    def act(self, scene: Scene, *, crash: bool) -> None:
        for queue in scene.handlers[: 1 if crash else 2]:
            scene.command("events_recover", queue, crash=crash)

    def finish(self, scene: Scene) -> None:
        if scene.ready():
            self.act(scene, crash=False)
        self.mirror(scene)

    def is_over(self, scene: Scene) -> bool:
        return not scene.ready() and len(scene.rows("archivedevent")) == 6

    def check(self, scene: Scene) -> None:
        assert self.states(scene) == dict.fromkeys(self.units(), "archived")


# -- the topology ----------------------------------------------------------------------------------


class Declare(Path):
    """A topology that is declared in part is completed."""

    name = "declare"
    kinds = ("declare", "bind", "delete")

    def prepare(self, scene: Scene) -> None:
        for kind in ("queues", "exchanges"):
            for found in scene.eyes.http("GET", f"/api/{kind}/{{vhost}}"):
                if found["name"] and not found["name"].startswith("amq."):
                    scene.eyes.http("DELETE", f"/api/{kind}/{{vhost}}/{found['name']}")

    def act(self, scene: Scene, *, crash: bool) -> None:
        scene.command("events_declare", crash=crash)

    def check(self, scene: Scene) -> None:
        scene.command("events_declare", "--check")


PATHS: tuple[Path, ...] = (
    Declare(), Immediate(), Outbox(), OnCommit(), Relay(), HandleSuccess(), HandleRetry(),
    HandleFailure(), Chunks(), Child(), Reaper(), Mirror(), Outcomes(), Replay(), Edit(), Discard(),
    Batch(), Prune(), Recover(),
)  # fmt: skip
