"""Alerts: one notification when a problem starts, and one when it ends.

Each current problem is one row of :class:`~django_amqp_events.models.Alert`, by a unique
constraint. The process that inserts or closes the row sends the signal, and the e-mail if
``AMQP_EVENTS["ALERTS"]["MAIL"]`` is set. If it dies in between, only the row records the problem.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.mail import mail_admins
from django.db import IntegrityError, connections, router, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils.translation import gettext_lazy as _
from django.utils.translation import override

from .. import databases, signals
from ..archive.groups import failure_groups, group_counts
from ..archive.selection import parse_uuid
from ..conf import Settings, get_settings
from ..logs import get_logger
from ..models import (
    LENGTH,
    Alert,
    ArchivedEvent,
    OutboxEvent,
    clean,
    visible,
)
from ..publish import outbox_rows
from ..reasons import Reason, translated

logger = get_logger(__name__)

#: Titles of the kinds, in e-mails and on pages.
KINDS: Final[Mapping[str, Any]] = {
    "growth": _("Many events archived"),
    "mirror_lag": _("Archive mirror behind"),
    "outbox_lag": _("Outbox behind"),
    "abyss": _("Messages in the abyss"),
    "broker_away": _("RabbitMQ unreachable"),
    "broker_alarm": _("RabbitMQ blocks publishers"),
    "group_new": _("New failure"),
    "group_back": _("Failure reopened"),
}
#: Has a section for each kind: meaning, next step and end.
RUNBOOKS: Final = (
    "https://github.com/django-amqp-events/django-amqp-events/blob/main/docs/runbooks.md"
)
#: Kinds whose key is a group's id; users know a group by its name, which is a parameter.
OF_GROUPS: Final = ("group_new", "group_back")
#: Time during which a group is new, and new groups in one evaluation, at most: a faulty release may
#: cause many.
NEW_AGE: Final = timedelta(hours=1)
GROUPS: Final = 10
#: Seconds to wait for the e-mail backend; Django's own has no time limit by default.
MAIL_SECONDS: Final = 10.0
#: A problem: its kind and key.
Which = tuple[str, str]


def database() -> str:
    """Return the alias of the database with the alerts."""
    return router.db_for_write(Alert)


def open_alerts(service: str) -> QuerySet[Alert]:
    """Return the alerts that have not ended, newest first."""
    return Alert.objects.using(database()).filter(service=service, ended__isnull=True)


def update_alert(
    kind: str,
    key: str = "",
    text: Reason | str = "",
    *,
    now: datetime,
    troubled: bool = True,
    settings: Settings | None = None,
) -> bool:
    """Open or close an alert; return True if its state changed.

    Call it at each check; only changes are notified.

    Args:
        kind: one of :data:`KINDS`, or your own.
        key: identifies the problem among those of its kind.
        text: the problem and its remedy.
        troubled: False closes the alert.
    """
    settings = settings or get_settings()
    key = clean(key, LENGTH)
    same = open_alerts(settings.service).filter(kind=kind, key=key)
    if not troubled:
        earlier = same.first()
        # Of several processes, the one whose UPDATE succeeds notifies.
        if earlier is None or not same.filter(pk=earlier.pk).update(ended=now, open=None):
            return False
        earlier.ended, earlier.open = now, None
        _notify(earlier, settings)
        return True
    details = Reason.of(text)
    if same.update(last=now, details=details):
        return False
    alert = Alert(
        service=settings.service, kind=kind, key=key, since=now, last=now, details=details
    )
    try:
        with transaction.atomic(using=database()):
            alert.save(using=database(), force_insert=True)
    except IntegrityError:
        # Another process has inserted it.
        return False
    _notify(alert, settings)
    return True


def update_alerts(
    conditions: Mapping[Which, Reason | str | None], *, now: datetime, settings: Settings
) -> None:
    """Update alerts from :func:`evaluate`.

    Makes one query while there is no problem.

    Args:
        conditions: what is wrong per problem, ``None`` if it has ended. The state of others
            is unknown.
    """
    known = set(open_alerts(settings.service).values_list("kind", "key"))
    for (kind, key), text in conditions.items():
        if text is not None or (kind, clean(key, LENGTH)) in known:
            troubled = text is not None
            update_alert(kind, key, text or "", now=now, troubled=troubled, settings=settings)


def evaluate(document: Mapping[str, Any], settings: Settings) -> dict[Which, Reason | None]:
    """Return the problems in a snapshot's document, for :func:`update_alerts`. Pure."""
    limits, broker = settings.alerts, document["broker"]
    conditions: dict[Which, Reason | None] = {}

    def limit(which: Which, value: float | None, most: float | None, text: Reason) -> None:
        """Compare a value with its limit; an unknown value changes nothing."""
        if most is None or value is not None:
            conditions[which] = text if above(value, most) else None

    if limits.away is not None and above(broker.get("away"), limits.away):
        stored = settings.publish == "outbox"
        conditions["broker_away", ""] = Reason(
            "alert-broker-away" if stored else "alert-broker-away-direct",
            error=Reason.from_json(broker["error"]),
        )
    elif limits.away is None or not broker.get("error"):
        conditions["broker_away", ""] = None
    if (alarms := broker.get("alarms")) is not None:
        conditions["broker_alarm", ""] = (
            Reason("alert-broker-alarm", alarms=", ".join(alarms)) if alarms else None
        )
    elif not (broker.get("error") or settings.management_url):
        conditions["broker_alarm", ""] = None  # it is not watched any more
    limit(
        ("growth", ""),
        document["archive"].get("new_hour") or 0,
        limits.growth,
        Reason("alert-growth", most=limits.growth),
    )
    lag = document["mirror"].get("lag")
    limit(
        ("mirror_lag", ""),
        lag,
        limits.mirror_lag,
        Reason("alert-mirror-lag", age=_seconds(lag)),
    )
    for outbox in document["outbox"]:
        database, lag = outbox["database"], outbox.get("lag")
        limit(
            ("outbox_lag", database),
            lag,
            limits.outbox_lag,
            Reason(
                "alert-outbox-lag",
                database=database,
                age=_seconds(lag),
                meaning=Reason.from_json(outbox["meaning"]),
            ),
        )
    for name, queue in document["queues"].items():
        if queue.get("role") == "abyss" and queue.get("ready") is not None:
            poisoned = queue["severity"] == "error"
            conditions["abyss", name] = (
                Reason.from_json(queue.get("meaning", "")) if poisoned else None
            )
    return conditions


def gone(document: Mapping[str, Any], settings: Settings) -> dict[Which, Reason | None]:
    """Return the open alerts about databases and queues that the service no longer has, as ended.

    Makes one query, and one for each open alert about an outbox.
    """
    # Empty while RabbitMQ is unreachable.
    queues = document["queues"]
    conditions: dict[Which, Reason | None] = {}
    for kind, key in open_alerts(settings.service).values_list("kind", "key"):
        if (kind == "outbox_lag" and not _may_be_outbox(key, settings)) or (
            kind == "abyss" and queues and key not in queues
        ):
            conditions[kind, key] = None
    return conditions


def _may_be_outbox(alias: str, settings: Settings) -> bool:
    """Return True if a database has an outbox, or is one of the service's and unreachable."""
    if settings.backend != "amqp" or alias not in outbox_rows.aliases(settings):
        return False
    try:
        return databases.has_table(alias, OutboxEvent)
    except Exception:  # noqa: BLE001 - drivers raise errors of their own
        return True


def evaluate_groups(settings: Settings, now: datetime) -> dict[Which, Reason | None]:
    """Return the groups to alert about, for :func:`update_alerts`: new and reopened ones.

    An alert lasts until its group has neither open nor replayed events, which it counts.
    If the group of a ``group_new`` alert was resolved and has reopened, a ``group_back`` alert
    replaces it. At most :data:`GROUPS` are new in one call. Makes three queries.
    """
    open_now = open_alerts(settings.service).filter(kind__in=OF_GROUPS)
    known = list(open_now.values_list("kind", "key", "since", "details"))
    ids = [pk for _, key, *_ in known if (pk := parse_uuid(key)) is not None]
    groups = group_counts.with_counts(failure_groups.groups().filter(service=settings.service))
    lasting: dict[str, Any] = {}
    if settings.alerts.groups:
        alerted = groups.filter(pk__in=ids)
        lasting = {str(group.pk): group for group in alerted if group.open or group.in_progress}
    conditions: dict[Which, Reason | None] = {}
    back = 0
    for kind, key, since, details in known:
        group = lasting.get(key)
        if group is None:
            conditions[kind, key] = None
        elif (
            kind == "group_new"
            and back < GROUPS
            and group.reopened_at
            and group.reopened_at > max(since, now - NEW_AGE)
        ):
            conditions |= {(kind, key): None, ("group_back", key): _of_group(group)}
            back += 1
        elif _of_group(group) != details:
            conditions[kind, key] = _of_group(group)
    if not settings.alerts.groups:
        return conditions
    begin = now - NEW_AGE
    events = ArchivedEvent.objects.using(groups.db).filter(group=OuterRef("pk"))
    # first_seen may be old: the mirror was down, a worker's clock is wrong, or events_prune deleted
    # the earlier events of a group with a note.
    new = Q(first_seen__gt=begin) | ~Exists(events.filter(mirrored_at__lte=begin))
    news = groups.filter(group_counts.has_open(), Q(reopened_at__gt=begin) | new)
    news = news.exclude(pk__in=ids)
    for group in news.order_by("first_seen", "pk")[: GROUPS - back]:
        kind = "group_new" if group.reopened_at is None else "group_back"
        conditions[kind, str(group.pk)] = _of_group(group)
    return conditions


def _of_group(group: Any) -> Reason:
    params = {"group": group.title, "open": group.open, "what": group.exception or group.reason}
    if not group.frame:
        return Reason("alert-group-unknown-frame", **params)
    return Reason("alert-group", frame=group.frame, **params)


def title(alert: Alert) -> str:
    """Return the title of an alert."""
    what, which = str(KINDS.get(alert.kind, alert.kind)), alert.key
    params = Reason.of(alert.details or "").params
    if "group" in params:
        which = _("%(group)s (%(open)s open)") % {
            "group": translated(params["group"]),
            "open": params["open"],
        }
    return visible(f"{what}: {which}" if which else what)


def runbook(alert: Alert) -> str:
    """Return the URL of an alert's runbook; ``""`` for a kind of your own."""
    return f"{RUNBOOKS}#{alert.kind}" if alert.kind in KINDS else ""


def alert_text(alert: Alert) -> str:
    """Return the text of an alert in the active language, all characters visible."""
    return visible(translated(alert.details or ""), 2_000)


_sender: threading.Thread | None = None


def _notify(alert: Alert, settings: Settings) -> None:
    """Send the signal and e-mail of an alert; errors are only logged."""
    over = alert.ended is not None
    # The language of the recipients is unknown.
    with override(None):
        name, text = title(alert), alert_text(alert)
    logger.log(
        logging.INFO if over else logging.WARNING,
        "alert %s: %s: %s",
        "over" if over else "raised",
        name,
        text[:300],
    )
    signal = signals.alert_ended if over else signals.alert_raised
    # Django logs the errors of receivers.
    signal.send_robust(
        settings.service,
        kind=alert.kind,
        key=alert.key,
        title=name,
        text=text,
        since=alert.since,
        runbook=runbook(alert),
    )
    if not settings.alerts.mail:
        return
    subject = " ".join(f"{settings.service}: {'over: ' if over else ''}{name}".split())
    lines = [text, runbook(alert), "", f"Since {alert.since:%Y-%m-%d %H:%M:%S} UTC."]
    if alert.ended is not None:
        lines.append(f"Over since {alert.ended:%Y-%m-%d %H:%M:%S} UTC.")
    global _sender  # noqa: PLW0603 - of this process
    late = _sender is not None and _sender.is_alive()
    _sender = threading.Thread(
        target=_mail,
        args=(_sender, subject, "\n".join(lines)),
        name="amqp-events-alert-mail",
        daemon=True,
    )
    _sender.start()
    if not late:
        _sender.join(MAIL_SECONDS)
    if _sender.is_alive():
        logger.warning(
            "the mail server has not answered within %g s; the alert's e-mail is sent when it does",
            MAIL_SECONDS,
        )


def _mail(before: threading.Thread | None, subject: str, text: str) -> None:
    if before is not None:
        before.join()
    try:
        mail_admins(subject, text)
    except Exception:
        logger.exception("cannot send the e-mail about an alert")
    finally:
        # A backend may write to a database.
        connections.close_all()


def above(value: float | None, limit: float | None) -> bool:
    """Return True if a value is known, and above a limit that is set."""
    return value is not None and limit is not None and value > limit


def _seconds(seconds: float | None) -> str:
    seconds = seconds or 0.0
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
