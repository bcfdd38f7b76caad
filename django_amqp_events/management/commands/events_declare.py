"""``manage.py events_declare``: declare this service's exchanges, queues and bindings."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError

from django_amqp_events import conf
from django_amqp_events.broker import connection, topology
from django_amqp_events.broker.provisioning import drift, inspection
from django_amqp_events.broker.provisioning.changes import Applied, apply
from django_amqp_events.broker.topology import Binding
from django_amqp_events.declare import registry
from django_amqp_events.declare.registry import Handler, Registry
from django_amqp_events.declare.retry_policy import RetryPolicy
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.base import BrokerCommand

#: Version of what ``--format json`` prints.
FORMAT = 1

_EPILOG = """
exit codes:
  0  the topology is as declared (with --check: identical, everything seen)
  1  drift: something is missing, different or stale (--check), or was refused
  2  it could not be told: broker or management API away, wrong settings; with
     --check also what plain AMQP cannot see (set MANAGEMENT_URL)

examples:
  manage.py events_declare --dry-run          what would be done
  manage.py events_declare                    do it
  manage.py events_declare --check            for a deployment: is anything missing?
  manage.py events_declare --recreate-empty --wait 120
                                              after QUEUE_TYPE or ARCHIVE changed
"""


class Command(BrokerCommand):
    """A shell on :mod:`django_amqp_events.broker.provisioning.inspection`."""

    help = (
        "Plan and declare the exchanges, queues and bindings of this service on RabbitMQ. Nothing "
        "is changed where RabbitMQ would refuse a part of it."
    )
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--dry-run", action="store_true", help="Print the plan, change nothing.")
        what.add_argument(
            "--check",
            action="store_true",
            help="Compare only: exit 0 if identical, 1 if not, 2 if it cannot be told.",
        )
        parser.add_argument(
            "--delete-stale",
            action="store_true",
            help="Delete what this service does not declare any more, where the management API "
            "shows that it is empty and unused.",
        )
        parser.add_argument(
            "--recreate-empty",
            action="store_true",
            help="Delete and declare again queues whose arguments changed, where the management "
            "API shows that they are empty and unused. Events that come meanwhile are kept.",
        )
        parser.add_argument(
            "--wait",
            type=float,
            default=0.0,
            metavar="SECONDS",
            help="Time for a queue that is to be deleted or recreated to be emptied by its "
            "workers, and for these to be stopped (default: 0).",
        )
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Default: text."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.verbosity: int = options["verbosity"]
        self.as_json: bool = options["format"] == "json"
        try:
            code = self._run(options)
        except AmqpEventsError as exc:
            raise CommandError(str(exc), returncode=2) from exc
        if code:
            sys.exit(code)

    def _run(self, options: dict[str, Any]) -> int:
        settings = conf.get_settings()
        declared = registry.get_registry()
        wanted = topology.build(settings, declared)
        app = connection.celery_app(settings)
        api = inspection.management(app, settings)
        report = inspection.inspect(app, settings, wanted, api=api)
        plan = drift.plan(
            report,
            delete_stale=options["delete_stale"],
            recreate_empty=options["recreate_empty"],
        )
        changes = bool(plan.steps) and not (options["check"] or options["dry_run"] or plan.refusals)
        if not self.as_json:
            self._print_tree(report, declared, before=changes)
        if options["check"]:
            code = {"identical": 0, "drift": 1, "unknown": 2}[report.result]
            self._finish(plan, code, report.result)
            return code
        if plan.refusals:
            self._finish(plan, 1, "refused")
            return 1
        if options["dry_run"]:
            self._finish(plan, 0, "planned")
            return 0
        applied = apply(
            app,
            settings,
            plan,
            api=api,
            progress=self._progress,
            notice=self._notice,
            wait=options["wait"],
        )
        # Policies that this user could not read show once the queues are there. A binding that
        # plain AMQP could not see before cannot be seen after either.
        changed = any(step.item.state != "unknown" for step in applied.done)
        after = inspection.inspect(app, settings, wanted, api=api) if changed else report
        troubles = after.errors
        code = 1 if applied.refused or troubles else 0
        self._finish(plan, code, "refused" if code else "declared", applied, after)
        return code

    # -- text

    def _progress(self, step: drift.Step, number: int, total: int) -> None:
        if self.as_json or self.verbosity < 1:
            return
        if self.verbosity > 1 or step.action not in ("declare", "bind"):
            self.stdout.write(f"  [{number}/{total}] {step}")
        elif number % 200 == 0:
            self.stdout.write(f"  {number} of {total} steps done")
            self.stdout.flush()

    def _notice(self, text: str) -> None:
        if not self.as_json and self.verbosity > 0:
            self.stdout.write(f"  {text} …")
            self.stdout.flush()

    def _print_tree(self, report: drift.Report, declared: Registry, *, before: bool) -> None:
        if self.verbosity < 1:
            return
        settings = conf.get_settings()
        names = report.topology.names
        seen = "management API: exact" if report.exact else "plain AMQP: bindings cannot be seen"
        self.stdout.write(
            self.style.MIGRATE_HEADING(f"{names.prefix}{names.service}")
            + f" on RabbitMQ {report.version}, vhost {report.vhost!r} ({seen})"
            + (", before the changes:" if before else "")
        )
        handlers = declared.by_queue()
        groups: list[tuple[str, list[str]]] = []
        belonging: dict[str, list[drift.Item]] = {queue: [] for queue in handlers}
        for item in report.items:
            if item.state != "stale" and (home := _home(item)) in belonging:
                belonging[home].append(item)
        for queue, of_queue in handlers.items():
            items = belonging[queue]
            lines = [*self._handler_lines(of_queue), *self._noteworthy(items)]
            groups.append((f"{queue}  {self._states(items)}", lines))
        if not handlers:
            groups.append(("no handlers: this service only publishes", []))
        groups += self._infrastructure(report)
        stale = report.having("stale")
        if stale:
            groups.append((self.style.WARNING("stale"), [self._line(item) for item in stale]))
        for index, (head, lines) in enumerate(groups):
            last = index == len(groups) - 1
            self.stdout.write(f"{'└──' if last else '├──'} {head}")
            for number, line in enumerate(lines):
                branch = "└──" if number == len(lines) - 1 else "├──"
                self.stdout.write(f"{'   ' if last else '│  '} {branch} {line}")
        self._explain_stale(stale, settings, declared)
        if settings.queue_type == "classic":
            self.stdout.write(
                self.style.WARNING(
                    "QUEUE_TYPE is classic: dead letters are moved at most once, and can be lost"
                )
            )

    def _explain_stale(
        self, stale: Sequence[drift.Item], settings: conf.Settings, declared: Registry
    ) -> None:
        """Explain what to do about queues without a handler."""
        queues = [item for item in stale if item.kind == "queue" and item.role == "handler"]
        if not queues:
            return
        from django_amqp_events.checks import project
        from django_amqp_events.checks.settings import check_discovery

        for problem in check_discovery(project.Project(settings=settings, registry=declared)):
            self.stdout.write(self.style.WARNING(f"{problem.message} {problem.hint}"))
        self.stdout.write(
            self.style.WARNING(
                "A stale queue still gets its events, and nobody handles them. If its handler was "
                "renamed, name it in RENAMED_HANDLERS, stop its old workers, and run `manage.py "
                "events_recover QUEUE`: what is in it can be replayed then. --delete-stale deletes "
                "what is empty and unused."
            )
        )

    def _handler_lines(self, handlers: tuple[Handler, ...]) -> list[str]:
        lines = []
        for handler in handlers:
            name = f"{handler.name}: " if len(handlers) > 1 else ""
            lines.append(f"{name}events   {', '.join(handler.patterns)}")
            lines.append(f"{name}retries  {describe_schedule(handler.policy)}")
        return lines

    def _infrastructure(self, report: drift.Report) -> list[tuple[str, list[str]]]:
        names = report.topology.names
        groups = []
        for title, roles in (
            (names.events, {"events"}),
            (f"{names.return_}, {names.replay}", {"return", "replay"}),
            (f"{names.infrastructure('delay')}.*", {"delay"}),
            (names.archive, {"archive"}),
            (f"{names.graveyard} → dead → abyss", {"graveyard", "dead", "abyss"}),
        ):
            own = {item.name for item in report.items if item.role in roles}
            # A handler's bindings stand with the handler.
            items = [item for item in report.items if item.state != "stale" and _home(item) in own]
            detail = ""
            if roles == {"delay"}:
                delays = report.topology.delays
                detail = f"{len(delays)} delays, {_seconds(delays[0])} to {_seconds(delays[-1])}  "
            groups.append((f"{title}  {detail}{self._states(items)}", self._noteworthy(items)))
        return groups

    def _noteworthy(self, items: list[drift.Item]) -> list[str]:
        """Describe what is not as it should be, unless nothing is there at all."""
        if self.verbosity < 2 and all(item.state == "missing" for item in items):
            return []
        return [
            self._line(item)
            for item in items
            if self.verbosity > 1
            or item.state in ("missing", "different")
            or (item.state == "unknown" and item.kind != "binding")
        ]

    def _line(self, item: drift.Item) -> str:
        details = "; ".join([*map(str, item.differences), *([item.note] if item.note else [])])
        return f"{item.kind} {item.name}  {self._state(item.state)}" + (
            f"  {details}" if details else ""
        )

    def _states(self, items: list[drift.Item]) -> str:
        """Summarise: one word where all are alike, else how many are what."""
        order = ("different", "missing", "unknown", "ok")
        counts = {state: sum(item.state == state for item in items) for state in order}
        present = [state for state in order if counts[state]]
        if len(present) == 1:
            return self._state(present[0])
        parts = []
        for state in present:
            kinds = {item.kind for item in items if item.state == state}
            what = f" {next(iter(kinds))}{'s' * (counts[state] > 1)}" if len(kinds) == 1 else ""
            parts.append(f"{counts[state]}{what} {self._state(state)}")
        return ", ".join(parts)

    def _state(self, state: str) -> str:
        style = {
            "ok": self.style.SUCCESS,
            "missing": self.style.WARNING,
            "different": self.style.ERROR,
            "stale": self.style.WARNING,
            "unknown": self.style.NOTICE,
        }[state]
        return style(state)

    # -- the end

    def _finish(
        self,
        plan: drift.Plan,
        code: int,
        result: str,
        applied: Applied | None = None,
        after: drift.Report | None = None,
    ) -> None:
        report = after or plan.report
        if self.as_json:
            self.stdout.write(json.dumps(_as_json(plan, code, result, applied, report), indent=2))
            return
        for trouble in report.troubles:
            style = self.style.ERROR if trouble.severity == "error" else self.style.WARNING
            self.stderr.write(style(str(trouble)))
        if result in ("refused", "drift") and applied is None:
            errors = {str(trouble) for trouble in report.errors}
            refusals = [line for line in plan.refusals if line not in errors]
            for line in refusals:
                self.stderr.write(self.style.ERROR(line))
        for step, reason in applied.refused if applied else ():
            self.stderr.write(self.style.ERROR(f"did not {step}: {reason}"))
        if self.verbosity < 1:
            return
        self.stdout.write(self._conclusion(plan, result, applied))

    def _conclusion(self, plan: drift.Plan, result: str, applied: Applied | None) -> str:
        report = plan.report
        if result == "identical":
            return self.style.SUCCESS("identical")
        if result == "drift":
            counts = ", ".join(
                f"{len(report.having(state))} {state}"
                for state in ("missing", "different", "stale")
                if report.having(state)
            )
            return self.style.ERROR(f"drift: {counts or 'see above'}")
        if result == "unknown":
            return self.style.WARNING(
                "unknown: what can be seen is identical"
                + ("" if report.exact else "; bindings cannot be seen without MANAGEMENT_URL")
            )
        if result == "refused" and applied is None:
            return self.style.ERROR("refused: nothing was changed")
        sure = [step for step in plan.steps if step.item.state != "unknown"]
        unsure = len(plan.steps) - len(sure)
        if result == "planned":
            for step in sure:
                self.stdout.write(f"  would {step}")
            if unsure:
                self.stdout.write(
                    f"  would bind {unsure} bindings that cannot be seen (nothing happens where "
                    f"they are there)"
                )
            return f"dry run: {len(sure)} changes planned, nothing was changed"
        if applied is not None and applied.refused:
            return self.style.ERROR(
                f"{len(applied.done)} steps done, {len(applied.refused)} refused"
            )
        if result == "refused":
            return self.style.ERROR("declared, but see above")
        if not plan.steps:
            return self.style.SUCCESS("nothing to do: identical")
        changes = "1 change" if len(sure) == 1 else f"{len(sure)} changes"
        text = f"{changes} made" if sure else "nothing was missing"
        return self.style.SUCCESS(text + (f", {unsure} bindings made sure of" if unsure else ""))


def _home(item: drift.Item) -> str:
    """Return the name that lists an item: its own, or that of its queue."""
    return item.entity.queue if isinstance(item.entity, Binding) else item.name


def describe_schedule(policy: RetryPolicy) -> str:
    """Write a policy's schedule: ``1 s, 2 s, 4 s … 512 s, total 17 min 3 s; max 10 retries``."""
    if policy.max_retries == 0:
        return "none: the first failure is archived"
    delays = [round(delay) for delay in policy.schedule()]
    if len(delays) > 4:
        shown = ", ".join(_seconds(delay) for delay in delays[:3])
        if len(set(delays)) == 1:
            shown = f"{_seconds(delays[0])} each"
        elif policy.max_retries is None:
            shown += f" … {_seconds(max(delays))} each from then on"
        else:
            shown += f" … {_seconds(delays[-1])}"
    else:
        shown = ", ".join(_seconds(delay) for delay in delays)
    if policy.max_retries is None:
        limit = "without end"
    else:
        plural = "retry" if policy.max_retries == 1 else "retries"
        limit = f"max {policy.max_retries} {plural}"
        if len(delays) == policy.max_retries:
            shown += f", total {_duration(sum(delays))}"
    jitter = "; jitter: a random part of each" if policy.retry_jitter else ""
    return f"{shown}; {limit}{jitter}"


def _seconds(seconds: int) -> str:
    return f"{seconds} s"


def _duration(seconds: int) -> str:
    parts = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, seconds = divmod(seconds, size)
        if number:
            parts.append(f"{number} {name}")
    return " ".join(parts[:3]) or "0 s"


def _ends(item: drift.Item) -> dict[str, str]:
    """Return what a binding joins."""
    if not isinstance(item.entity, Binding):
        return {}
    return {
        "exchange": item.entity.exchange,
        "queue": item.entity.queue,
        "routing_key": item.entity.routing_key,
    }


def _as_json(
    plan: drift.Plan,
    code: int,
    result: str,
    applied: Applied | None,
    report: drift.Report,
) -> dict[str, Any]:
    names = report.topology.names

    def of_step(step: drift.Step) -> dict[str, str]:
        return {"action": step.action, "kind": step.item.kind, "name": step.item.name}

    return {
        "version": FORMAT,
        "service": names.service,
        "prefix": names.prefix,
        "vhost": report.vhost,
        "broker": report.version,
        "source": "management" if report.exact else "amqp",
        "result": result,
        "exit_code": code,
        "items": [
            {
                "kind": item.kind,
                "name": item.name,
                **_ends(item),
                "role": item.role,
                "state": item.state,
                "differences": [
                    {
                        "argument": difference.argument,
                        "declared": difference.declared,
                        "found": difference.found,
                    }
                    for difference in item.differences
                ],
                "note": item.note,
            }
            for item in report.items
        ],
        "troubles": [
            {"severity": trouble.severity, "message": trouble.message, "remedy": trouble.remedy}
            for trouble in report.troubles
        ],
        "refusals": list(plan.refusals),
        "plan": [of_step(step) for step in plan.steps],
        "done": [of_step(step) for step in applied.done] if applied else [],
        "refused": [{**of_step(step), "reason": reason} for step, reason in applied.refused]
        if applied
        else [],
    }
