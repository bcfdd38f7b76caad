"""Alerts: one notification when a problem starts, and one when it ends.

Each trouble that lasts is one row (:class:`~django_amqp_events.models.Alert`), which a unique
constraint allows once while it is open: of any number of processes that see it, the one whose row
it is sends the signal, and the e-mail where ``AMQP_EVENTS["ALERTS"]["MAIL"]`` asks for it. Should
that process die in between, the row says what nobody was told.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.mail import mail_admins
from django.db import IntegrityError, router, transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _
from django.utils.translation import override

from .. import signals
from ..archive.selection import parse_uuid
from ..conf import Settings, get_settings
from ..models import (
    LENGTH,
    Alert,
    FailureGroup,
    Snapshot,
    clean,
    visible,
)

logger = logging.getLogger(__name__)

#: What each kind is called, in e-mails and on pages.
KINDS: Final[Mapping[str, Any]] = {
    "growth": _("Many events archived"),
    "mirror_lag": _("Archive mirror behind"),
    "outbox_lag": _("Outbox behind"),
    "abyss": _("Messages in the abyss"),
    "broker_away": _("RabbitMQ unreachable"),
    "broker_alarm": _("RabbitMQ blocks publishers"),
    "stale": _("Dashboard statistics are not being collected"),
    "group_new": _("New failure"),
    "group_back": _("Failure reopened"),
}
#: Of which the key is a group's id, and the text begins with the group's name and a colon.
OF_GROUPS: Final = ("group_new", "group_back")
#: For how long a group of failures is news to somebody who has not been told yet, and how many are
#: told at a time: a release may break everything at once.
NEWS: Final = timedelta(hours=1)
GROUPS: Final = 10
#: Which trouble: its kind, and which one of that kind.
Which = tuple[str, str]


def database() -> str:
    """Return the alias of the alerts' table."""
    return router.db_for_write(Alert)


def open_alerts(service: str) -> QuerySet[Alert]:
    """Return what lasts, the newest first."""
    return Alert.objects.using(database()).filter(service=service, ended__isnull=True)


def update_alert(
    kind: str,
    key: str = "",
    text: str = "",
    *,
    now: datetime,
    troubled: bool = True,
    settings: Settings | None = None,
) -> bool:
    """Open or close an alert; return True if its state changed.

    Call it as often as you look: what is known already is told to nobody again.

    Args:
        kind: one of :data:`KINDS`, or a word of your own.
        key: which one of its kind.
        text: what it is and what to do, for a person.
        troubled: ``False`` ends the alert, where there is one.
        settings: of the service; this process's unless given.

    Raises:
        DatabaseError: the database is away; nobody was told.
    """
    settings = settings or get_settings()
    key = clean(key, LENGTH)
    same = open_alerts(settings.service).filter(kind=kind, key=key)
    if not troubled:
        found = same.first()
        # Whoever's UPDATE it is tells it.
        if found is None or not same.filter(pk=found.pk).update(ended=now):
            return False
        found.ended = now
        _notify(found, settings)
        return True
    text = clean(text)
    if same.update(last=now, text=text):
        return False
    alert = Alert(service=settings.service, kind=kind, key=key, since=now, last=now, text=text)
    try:
        with transaction.atomic(using=database()):
            alert.save(using=database(), force_insert=True)
    except IntegrityError:
        # Another process was faster, and has told it.
        return False
    _notify(alert, settings)
    return True


def update_alerts(
    judged: Mapping[Which, str | None], *, now: datetime, settings: Settings | None = None
) -> int:
    """Tell what is new of what :func:`judge` found; returns how much that was.

    One query while there is no trouble and was none.

    Args:
        judged: the text of each trouble, ``None`` where there is none. What is not in it is not
            known now, and stays as it is.
    """
    settings = settings or get_settings()
    known = set(open_alerts(settings.service).values_list("kind", "key"))
    news = 0
    for (kind, key), text in judged.items():
        if text is not None or (kind, clean(key, LENGTH)) in known:
            news += update_alert(
                kind, key, text or "", now=now, troubled=text is not None, settings=settings
            )
    return news


def evaluate(document: Mapping[str, Any], settings: Settings) -> dict[Which, str | None]:
    """Return the problems in a snapshot's document. Pure.

    Returns:
        as :func:`settle` takes it. Where the broker was away nothing is said of its queues.
    """
    limits = settings.alerts
    broker, archive = document["broker"], document["archive"]
    found: dict[Which, str | None] = {("stale", ""): None}
    if limits.away is not None and _above(broker.get("away"), limits.away):
        found["broker_away", ""] = f"{broker['error']}. Events wait in the outbox."
    elif limits.away is None or not broker.get("error"):
        found["broker_away", ""] = None
    if broker.get("alarms") is not None:
        found["broker_alarm", ""] = (
            f"{', '.join(broker['alarms'])}: RabbitMQ accepts no events. Free memory or disk, or "
            f"let consumers empty the queues."
            if broker["alarms"]
            else None
        )
    new = archive.get("new_hour")
    found["growth", ""] = (
        f"More than {limits.growth} events were archived within an hour."
        if _above(new, limits.growth)
        else None
    )
    lag = document["mirror"].get("lag")
    if lag is not None or limits.mirror_lag is None:
        found["mirror_lag", ""] = (
            f"The oldest message in the archive queue is {_seconds(lag)} old. Check the log of "
            f"events_mirror, or start another one."
            if _above(lag, limits.mirror_lag)
            else None
        )
    for each in document["outbox"]:
        lag = each.get("lag")
        if lag is not None or limits.outbox_lag is None:
            found["outbox_lag", each["database"]] = (
                f"The oldest event in the outbox of database {each['database']!r} is "
                f"{_seconds(lag)} old: {each['meaning']}"
                if _above(lag, limits.outbox_lag)
                else None
            )
    for name, queue in document["queues"].items():
        if queue.get("role") == "abyss" and queue.get("ready") is not None:
            found["abyss", name] = queue.get("meaning") if queue["severity"] == "error" else None
    return found


def evaluate_groups(settings: Settings, now: datetime) -> dict[Which, str | None]:
    """Return the groups to alert about: new ones, and resolved ones that reopened.

    Told as long as it is not older than :data:`NEWS`. An alert of either kind lasts until nothing
    of its group is open or on its way any more, and its text follows the group. One of a new group
    that was put right and came back meanwhile, between two looks, is over, and another begins.

    Returns:
        as :func:`settle` takes it, :data:`GROUPS` news at most: the others are told by the next
        looks. Three queries.

    Raises:
        DatabaseError: the database is away.
    """
    told = open_alerts(settings.service).filter(kind__in=OF_GROUPS)
    known = list(told.values_list("kind", "key", "since", "text"))
    ids = [pk for _, key, *_ in known if (pk := parse_uuid(key)) is not None]
    groups = FailureGroup.objects.using(router.db_for_write(FailureGroup)).filter(
        service=settings.service
    )
    # As they were added up last, which the mirror does every few seconds.
    unsettled = groups.filter(Q(open__gt=0) | Q(going__gt=0), pk__in=ids)
    lasting = {str(group.pk): group for group in unsettled} if settings.alerts.groups else {}
    found: dict[Which, str | None] = {}
    back = 0
    for kind, key, since, text in known:
        group = lasting.get(key)
        if group is None:
            found[kind, key] = None
        elif (
            kind == "group_new"
            and back < GROUPS
            and group.reopened_at
            and group.reopened_at > max(since, now - NEWS)
        ):
            found |= {(kind, key): None, ("group_back", key): _of_group(group)}
            back += 1
        elif clean(_of_group(group)) != text:
            found[kind, key] = _of_group(group)
    if not settings.alerts.groups:
        return found
    news = groups.filter(
        Q(reopened_at__gt=now - NEWS) | Q(resolved_at=None, first_seen__gt=now - NEWS),
        open__gt=0,
    ).exclude(pk__in=ids)
    for group in news.order_by("first_seen", "pk")[: GROUPS - back]:
        kind = "group_new" if group.reopened_at is None else "group_back"
        found[kind, str(group.pk)] = _of_group(group)
    return found


def _of_group(group: FailureGroup) -> str:
    return (
        f"{group} ({group.open} open): {group.exception or group.reason} in "
        f"{group.frame or 'an unknown function'}"
    )


def check_snapshots(settings: Settings, now: datetime) -> bool:
    """Alert about missing snapshots, from a process that does not take them.

    Returns:
        whether it is so. That it is over is told by whoever takes figures again.
    """
    if settings.alerts.stale is None:
        return False
    newest = (
        Snapshot.objects.using(router.db_for_write(Snapshot))
        .filter(service=settings.service)
        .order_by("-at")
        .values_list("at", flat=True)
        .first()
    )
    if newest is not None and now - newest <= timedelta(seconds=settings.alerts.stale):
        return False
    last = "never" if newest is None else f"{newest:%Y-%m-%d %H:%M} UTC"
    text = f"Last collected: {last}. Start events_mirror or events_worker."
    update_alert("stale", "", text, now=now, settings=settings)
    return True


def title(alert: Alert) -> str:
    """Name an alert in a line."""
    what = str(KINDS.get(alert.kind, alert.kind))
    # Nobody knows a group by its id.
    which = alert.text.partition(": ")[0] if alert.kind in OF_GROUPS else alert.key
    return visible(f"{what}: {which}" if which else what)


def alert_text(alert: Alert) -> str:
    """Return the text of an alert without what its title says, all characters visible."""
    text = alert.text.partition(": ")[2] if alert.kind in OF_GROUPS else alert.text
    return visible(text, 2_000)


def _notify(alert: Alert, settings: Settings) -> None:
    """Send the signal and e-mail of an alert; errors are only logged."""
    over = alert.ended is not None
    # Who gets it speaks no known language, and its text is English.
    with override(None):
        name = title(alert)
    logger.log(
        logging.INFO if over else logging.WARNING,
        "alert %s: %s: %s",
        "over" if over else "raised",
        name,
        visible(alert.text, 300),
    )
    signal = signals.alert_ended if over else signals.alert_raised
    # Django logs what a receiver raises.
    signal.send_robust(
        settings.service, kind=alert.kind, key=alert.key, text=alert.text, since=alert.since
    )
    if not settings.alerts.mail:
        return
    # A header is one line.
    subject = " ".join(f"{settings.service}: {'over: ' if over else ''}{name}".split())
    lines = [alert_text(alert), "", f"Since {alert.since:%Y-%m-%d %H:%M:%S} UTC."]
    if alert.ended is not None:
        lines.append(f"Over since {alert.ended:%Y-%m-%d %H:%M:%S} UTC.")
    try:
        mail_admins(subject, "\n".join(lines))
    except Exception:
        logger.exception("the e-mail about an alert could not be sent")


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
