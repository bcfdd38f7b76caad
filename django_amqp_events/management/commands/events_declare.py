"""Compare the exchanges, queues and bindings of this service with RabbitMQ, and declare them.

If RabbitMQ would refuse a part, nothing is changed.

exit codes:
  0  the topology is as declared (--check: identical, and all of it was visible)
  1  drift: something is missing, different or stale (--check), or was refused
  2  unknown: RabbitMQ or the management API is unreachable, wrong settings;
     --check: plain AMQP does not show everything (set MANAGEMENT_URL)

examples:
  manage.py events_declare --dry-run          print the plan
  manage.py events_declare                    declare
  manage.py events_declare --check            in a deployment: is anything missing?
  manage.py events_declare --recreate-empty   after ARCHIVE changed
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any, Final

from django_amqp_events import conf
from django_amqp_events.broker import connection, topology
from django_amqp_events.broker.provisioning import drift, inspection
from django_amqp_events.broker.provisioning.changes import Applied, apply
from django_amqp_events.broker.topology import Binding
from django_amqp_events.declare import registry
from django_amqp_events.declare.registry import Registry
from django_amqp_events.declare.retry_policy import RetryPolicy
from django_amqp_events.management.base import ReportCommand, columns, stop_signals
from django_amqp_events.message.text import counted
from django_amqp_events.templatetags.amqp_events import duration

#: States, in the order in which they are counted.
STATES: Final[tuple[drift.State, ...]] = ("ok", "missing", "different", "stale", "unknown")


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument("--dry-run", action="store_true", help="Print the plan, change nothing.")
        mode.add_argument("--check", action="store_true", help="Compare only; see the exit codes.")
        parser.add_argument(
            "--delete-stale",
            action="store_true",
            help="Delete what this service no longer declares, if the management API shows that "
            "it is empty and unused.",
        )
        parser.add_argument(
            "--recreate-empty",
            action="store_true",
            help="Delete and declare again queues of the infrastructure whose arguments changed, "
            "if the management API shows that they are empty and unused.",
        )
        super().add_arguments(parser)

    def run(self, options: dict[str, Any]) -> int:
        settings, declared = conf.get_settings(), registry.get_registry()
        wanted = topology.build(settings, declared)
        app = connection.broker_app(settings)
        api = inspection.management(app, settings)
        report = after = inspection.inspect(app, settings, wanted, api=api)
        plan = drift.plan(
            report,
            delete_stale=options["delete_stale"],
            recreate_empty=options["recreate_empty"],
        )
        applied = Applied()
        if options["check"]:
            result: str = report.result
            code = {"identical": 0, "drift": 1, "unknown": 2}[result]
        elif plan.refusals:
            result, code = "refused", 1
        elif options["dry_run"]:
            result, code = "planned", 0
        else:
            with stop_signals(_interrupt):
                applied = apply(app, settings, plan, api=api, progress=self.progress)
            # Policies that this user could not read are visible once the queues exist. A binding
            # that plain AMQP did not show before is not visible now either.
            if any(step.item.state != "unknown" for step in applied.done):
                after = inspection.inspect(app, settings, wanted, api=api)
            code = 1 if applied.refused or after.errors else 0
            result = "refused" if code else "declared"

        def show() -> None:
            if self.verbosity:
                self._show_topology(after, declared, result)
            self._show_result(plan, result, applied, after)

        return self.finish(code, _document(plan, result, applied, after), show)

    # -- the topology

    def _show_topology(self, report: drift.Report, declared: Registry, result: str) -> None:
        """Print the handlers with their schedules, then the parts that are not as declared."""
        names, delays = report.topology.names, report.topology.delays
        source = "management API: exact" if report.exact else "plain AMQP: bindings cannot be seen"
        self.stdout.write(
            f"{names.prefix}{names.service} on RabbitMQ {report.version}, vhost {report.vhost!r} "
            f"({source})",
            self.style.MIGRATE_HEADING,
        )
        for handler in declared.handlers.values():
            older = [f"{upcast.source} (upcast to {upcast.target})" for upcast in handler.upcasts]
            self.stdout.write(f"  {handler.name} in queue {handler.queue}")
            self.stdout.write(f"    events   {', '.join([*handler.patterns, *older])}")
            self.stdout.write(f"    retries  {describe_schedule(handler.policy)}")
        if not declared.handlers:
            self.stdout.write("  no handlers: this service only publishes")
        counts = [f"{len(items)} {state}" for state in STATES if (items := report.having(state))]
        self.stdout.write(
            f"  {', '.join(counts)} ({len(delays)} delays from {delays[0]} s to {delays[-1]} s)"
        )
        for item in report.items:
            if self.verbosity > 1 or _needs_attention(item, result):
                details = "; ".join(filter(None, [*map(str, item.differences), item.note]))
                line = f"  {item.kind} {item.name}  {item.state}  {details}"
                self.stdout.write(line.rstrip(), self.style_of(item.state))
        if any(item.role == "handler" for item in report.having("stale")):
            self.stdout.write(
                "A stale queue still receives events, which no handler processes. If its handler "
                "was renamed, add it to RENAMED_HANDLERS, stop its old workers and run `manage.py "
                "events_recover QUEUE`, then replay the events. --delete-stale deletes stale "
                "queues that are empty and unused.",
                self.style.WARNING,
            )

    # -- the result

    def _show_result(
        self, plan: drift.Plan, result: str, applied: Applied, after: drift.Report
    ) -> None:
        for problem in after.problems:
            style = self.style.ERROR if problem.severity == "error" else self.style.WARNING
            self.stderr.write(str(problem), style)
        if result in ("refused", "drift"):
            errors = {str(problem) for problem in after.errors}
            for line in plan.refusals:
                if line not in errors:
                    self.stderr.write(line, self.style.ERROR)
        for step, reason in applied.refused:
            self.stderr.write(f"did not {step}: {reason}", self.style.ERROR)
        if self.verbosity:
            self.stdout.write(*self._conclusion(plan, result, applied))

    def _conclusion(self, plan: drift.Plan, result: str, applied: Applied) -> tuple[str, Any]:
        report, good, bad = plan.report, self.style.SUCCESS, self.style.ERROR
        visible = [step for step in plan.steps if step.item.state != "unknown"]
        invisible = len(plan.steps) - len(visible)
        if result == "identical":
            return "identical", good
        if result == "drift":
            counts = ", ".join(
                f"{len(items)} {state}"
                for state in ("missing", "different", "stale")
                if (items := report.having(state))
            )
            return f"drift: {counts or 'see above'}", bad
        if result == "unknown":
            unseen = "bindings and policies cannot be seen without MANAGEMENT_URL"
            hint = "" if report.exact else f"; {unseen}"
            return f"unknown: the visible part is identical{hint}", self.style.WARNING
        if result == "planned":
            for step in visible:
                self.stdout.write(f"  would {step}")
            if invisible:
                self.stdout.write(
                    f"  would bind {invisible} bindings that cannot be seen (no effect on those "
                    f"that exist)"
                )
            planned = counted(len(visible), "change")
            return f"dry run: {planned} planned, nothing was changed", None
        for step in applied.done:
            if step.item.state != "unknown":
                self.stdout.write(f"  {step}")
        if plan.refusals:
            return "refused: nothing was changed", bad
        if applied.refused:
            return f"{len(applied.done)} steps done, {len(applied.refused)} refused", bad
        if result == "refused":
            return "declared, with the errors above", bad
        if not plan.steps:
            return "nothing to do: identical", good
        changes = f"{counted(len(visible), 'change')} made" if visible else "nothing was missing"
        return changes + (f", {invisible} bindings declared again" if invisible else ""), good


def _interrupt() -> None:
    raise KeyboardInterrupt


def _needs_attention(item: drift.Item, result: str) -> bool:
    if item.state == "missing":
        return result == "drift"  # otherwise, the steps of the plan name it
    if item.state == "unknown":
        return item.kind != "binding"  # of which plain AMQP sees none
    return item.state != "ok" or bool(item.note)


def describe_schedule(policy: RetryPolicy) -> str:
    """Write a policy's schedule: ``1 s, 2 s, 4 s … 512 s, total 17 min 3 s; max 10 retries``."""
    if policy.max_retries == 0:
        return "none: the first failure is archived"
    delays = [round(delay) for delay in policy.schedule()]
    shown = ", ".join(f"{delay} s" for delay in (delays if len(delays) <= 4 else delays[:3]))
    if len(delays) > 4:
        shown += f" … {delays[-1]} s"
    limit = "unlimited retries"
    if policy.max_retries is not None:
        shown += f", total {duration(round(policy.total()))}"
        limit = f"max {policy.max_retries} {'retry' if policy.max_retries == 1 else 'retries'}"
    jitter = "; jitter: a random part of each" if policy.retry_jitter else ""
    return f"{shown}; {limit}{jitter}"


def _document(
    plan: drift.Plan, result: str, applied: Applied, report: drift.Report
) -> dict[str, Any]:
    names = report.topology.names
    return {
        "service": names.service,
        "prefix": names.prefix,
        "vhost": report.vhost,
        "broker": report.version,
        "source": "management" if report.exact else "amqp",
        "result": result,
        "items": [_item(item) for item in report.items],
        "problems": [asdict(problem) for problem in report.problems],
        "refusals": list(plan.refusals),
        "plan": [_step(step) for step in plan.steps],
        "done": [_step(step) for step in applied.done],
        "refused": [{**_step(step), "reason": reason} for step, reason in applied.refused],
    }


def _item(item: drift.Item) -> dict[str, Any]:
    ends = ("exchange", "queue", "routing_key") if isinstance(item.entity, Binding) else ()
    return {
        **columns(item, "kind", "name", "role", "state", "note"),
        **columns(item.entity, *ends),
        "differences": [asdict(difference) for difference in item.differences],
    }


def _step(step: drift.PlanStep) -> dict[str, str]:
    return {"action": step.action, "kind": step.item.kind, "name": step.item.name}
