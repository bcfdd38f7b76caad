"""The text of each reason's code. :mod:`.reasons` says when texts are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

#: The text of each code, with a named placeholder for each parameter; what only commands
#: show is not translated.
TEXTS: Final[Mapping[str, Any]] = {
    # What a person wrote, or the broker, the database or a library said, in their own words.
    "text": "%(text)s",
    "interrupted": "interrupted",
    "filtered": "it does not match the filters",
    "overdue": "its replay is overdue; --force replays it again, and it may be handled twice",
    "list-changed": _(
        "More events match the filters now than when the list was shown; nothing was changed. "
        "Reload the list and select the events again."
    ),
    # -- replay
    "backend": _(
        "a replay needs AMQP_EVENTS['BACKEND'] to be 'amqp', but it is %(backend)s; nothing was "
        "published"
    ),
    "body-too-large": _(
        "the body has %(size)s bytes and MAX_BODY is %(most)s; raise MAX_BODY here "
        "and in the workers"
    ),
    "body-too-large-for-page": _(
        "the body has %(size)s bytes, too many for a page; use `replay.edit()` in `manage.py shell`"
    ),
    "body-unreadable": _(
        "the body is not a valid payload, so a replay would fail again; discard the event"
    ),
    "body-unreadable-editable": _(
        "the body is not a valid payload, so a replay would fail again; edit the payload and "
        "replay it"
    ),
    "changed": _("another user or tab changed it first; its state is now %(state)s"),
    "database-locked": _(
        "another process has locked the database (%(error)s); the mirror publishes queued replays "
        "again under the same replay id"
    ),
    "database-unreachable": _(
        "the database is unreachable (%(error)s); check its server; once it is back, the mirror "
        "publishes queued replays again under the same replay id"
    ),
    "deleted": _("the event no longer exists"),
    "forbidden": _("you have no permission for this event; ask an administrator for it"),
    "in-transaction": _(
        "a replay must commit its claim before it publishes, but a transaction is open "
        "on the database %(database)s (ATOMIC_REQUESTS, transaction.atomic or "
        "AUTOCOMMIT off). Decorate the view with "
        "django.db.transaction.non_atomic_requests, or replay after the transaction; "
        "nothing was published"
    ),
    "not-overdue": _(
        "its replay is not overdue and may still be waiting for a retry; wait for its outcome"
    ),
    "other-service": _(
        "it belongs to the service %(service)s; replay it in a process of that service"
    ),
    "state": _("its state is %(state)s"),
    "state-archived": _("archived"),
    "state-discarded": _("discarded"),
    "state-queued": _("queued"),
    "state-replaying": _("replaying"),
    "state-succeeded": _("succeeded"),
    "unconfirmed": _(
        "RabbitMQ has not confirmed its last replay, which may still run; replay it unedited first"
    ),
    "unknown-event": _(
        "no handler matches event %(name)s on queue %(queue)s; declare one, or discard the event"
    ),
    "unknown-handler": _(
        'there is no handler %(name)s; if it was renamed, add {"%(old)s": "new '
        'name"} to AMQP_EVENTS["RENAMED_HANDLERS"]; if only workers import its '
        "module, add the module to AUTODISCOVER"
    ),
    # -- editing
    "contract": _("The event's contract rejects it: %(error)s."),
    "contract-own": _(
        "%(refused)s It rejects the original payload too, perhaps because it expects Python types "
        "(Decimal, date) instead of text."
    ),
    "editing-off": _("editing needs AMQP_EVENTS['EDITING'] to be True; nothing was published"),
    "json": _("This is not valid JSON: %(error)s, in line %(line)s, column %(column)s."),
    "json-constant": _("%(text)s is not valid JSON. Write a number, or null."),
    "json-no-object": _("The payload must be a JSON object with the arguments by name."),
    "json-twice": _("The name %(name)s appears twice. Remove one of them."),
    "json-unreadable": _("This is not valid JSON: %(error)s."),
    "not-taken": _("The handler %(handler)s does not take %(names)s, which will be left out."),
    "payload-too-large": _("The payload has %(size)s bytes, more than MAX_BODY (%(most)s)."),
    "redaction-failed": _(
        "the redaction hook %(hook)s failed with %(error)s; the payload is hidden; fix the hook "
        "to see it"
    ),
    "redaction-no-json": _("The redacted payload is not valid JSON (%(error)s)."),
    # -- publishing
    "broker-blocks": _(
        "RabbitMQ blocks publishers (%(blocked)s); free memory or disk on the broker"
    ),
    "channel-refused": _("RabbitMQ opened no channel: %(error)s; check its log"),
    "confirm-late": _(
        "no confirm came in time; check the broker, and repeat it only with the same event id, "
        "since it may be stored"
    ),
    "confirm-late-blocked": _(
        "no confirm came in time, since RabbitMQ blocks publishers (%(blocked)s); free memory or "
        "disk on the broker, and repeat it only with the same event id, since it may be stored"
    ),
    "connection-broke": _(
        "the connection broke (%(error)s); check the broker, and repeat it only with the same "
        "event id, since it may be stored"
    ),
    "connection-broke-before": _(
        "the connection failed on a message before it: %(error)s; repeat it"
    ),
    "connection-lost": _("the connection to RabbitMQ is lost (%(error)s); %(remedy)s"),
    "queue-silent": "RabbitMQ does not deliver the messages of the queue %(queue)s; try again",
    "consumer-cancelled": _(
        "RabbitMQ cancelled the consumer of %(queue)s: was it deleted? Then run `manage.py "
        "events_declare`"
    ),
    "exchange-missing": _(
        "%(reply)s; run `manage.py events_declare`, or publish it again if EXCHANGE has changed"
    ),
    "handler-missing": _(
        "there is no handler %(name)s in this version of the project; deploy the one that has "
        "it, then replay the event again"
    ),
    "message-too-large": _("%(reply)s; publish a reference to the data"),
    "message-unbuildable": _(
        "its message cannot be built: %(error)s; check the log for the traceback"
    ),
    "message-unwritable": _(
        "it cannot be written as an AMQP message: %(error)s; check its headers"
    ),
    "nacked": _(
        "RabbitMQ refused it: a queue is full or unavailable; check the queues bound for it, and "
        "repeat it only with the same event id, since other queues may hold it already"
    ),
    "no-connection": _("no connection to RabbitMQ at %(url)s: %(error)s; %(remedy)s"),
    "over-max-body": _(
        "it has %(size)s bytes, and MAX_BODY is %(most)s; publish a reference to the data"
    ),
    "process-ends": _("this process ends"),
    "publish-refused": _(
        "RabbitMQ refused it (%(reply)s); check the user's permissions and the broker's log"
    ),
    "row-invalid": _(
        "the outbox row is not a valid message (%(error)s); correct its columns or discard it"
    ),
    "unroutable": _(
        "no queue is bound (exchange %(exchange)s, routing key %(routing_key)s); declare a handler "
        "for the event, or run `manage.py events_declare` in the service that has one"
    ),
    # What to do about a refused connection.
    "remedy-broker": _("check that the broker runs and that the broker URL is right"),
    "remedy-login": _(
        "RabbitMQ refuses the login; check user and password in the broker URL, and that the user "
        "may log in from this machine (guest may only connect from localhost)"
    ),
    "remedy-retry": _("check the broker, then try again"),
    "remedy-vhost": _(
        "RabbitMQ refuses this user; check the name of the vhost, the user's permissions on it "
        "(rabbitmqctl set_permissions), and the limits of both (rabbitmqctl list_vhost_limits, "
        "list_user_limits)"
    ),
    # -- batches
    "batch-backfill": _("Past events for %(handler)s: %(filters)s"),
    "batch-past": _("all"),
    "published-since": _("published since %(value)s"),
    "published-until": _("published before %(value)s"),
    "left-received": _("the handler's queue has received it"),
    "left-handled": _("the handler has handled it (inbox)"),
    "left-archived": _("it is in the archive for this handler; replay or restore it there"),
    "left-twice": _("the history has it more than once; the batch gives it once"),
    "left-unreadable": _(
        "its identity cannot be read, its body is larger than MAX_BODY, or it has no id and its "
        "handler uses ONCE"
    ),
    "left-expired": _("RabbitMQ has deleted it (HISTORY); events of all handlers count"),
    "batch-filtered": _("All with %(filters)s"),
    "batch-open": _("All open events"),
    "batch-selected": ngettext_lazy(
        "%(count)s selected event", "%(count)s selected events", "count"
    ),
    "filter-event": _("event %(value)s"),
    "filter-exception": _("exception %(value)s"),
    "filter-group": _("group %(value)s"),
    "filter-handler": _("handler %(value)s"),
    "filter-reason": _("archive reason %(value)s"),
    "filter-since": _("last failure since %(value)s"),
    "filter-until": _("last failure before %(value)s"),
    "filter-value": _("a value of %(value)s"),
    "group": _("%(what)s in %(handler)s"),
    "group-unknown": _("no handler"),
    "canary-failed": _(
        "%(bad)s of the first %(taken)s events did not succeed (%(failed)s failed again, "
        "%(unconfirmed)s not confirmed)"
    ),
    "canary-silent": ngettext_lazy(
        "%(count)s event of the canary did not report back",
        "%(count)s events of the canary did not report back",
        "count",
    ),
    "failures": _("%(failed)s of the last %(of)s outcomes are failures"),
    "nothing-published": _("nothing could be published: %(why)s"),
    "outcomes-missing": ngettext_lazy(
        "%(count)s event did not report back", "%(count)s events did not report back", "count"
    ),
    "waiting-for-canary": _("waiting for the outcomes of the canary"),
    "waiting-for-mirror": _("waiting for queued replays, which the mirror publishes"),
    "waiting-to-retry": _("waiting to retry: %(why)s"),
    # -- alerts
    "alert-broker-alarm": _(
        "%(alarms)s: RabbitMQ accepts no events. Free memory or disk on the broker."
    ),
    "alert-broker-away": _("%(error)s. Check the broker. Events wait in the outbox."),
    "alert-broker-away-direct": _(
        "%(error)s. Check the broker. No event can be published meanwhile."
    ),
    "alert-group": _("%(what)s in %(frame)s. Fix the cause, then replay the group."),
    "alert-group-unknown-frame": _(
        "%(what)s in an unknown function. Fix the cause, then replay the group."
    ),
    "alert-growth": _(
        "More than %(most)s events were archived within an hour. Run `manage.py events_groups`, "
        "and fix the cause of the largest group."
    ),
    "alert-mirror-lag": _(
        "The oldest message in the archive queue is %(age)s old. Start another `manage.py "
        "events_mirror`."
    ),
    "alert-outbox-lag": _(
        "The oldest event in the outbox of database %(database)s is %(age)s old: %(meaning)s. Run "
        "`manage.py events_status` to see what it waits for."
    ),
    # -- what queues and outboxes contain
    "both": "%(first)s; %(then)s",
    "empty": _("empty"),
    "queue-active-archive": ngettext_lazy(
        "%(count)s message being mirrored", "%(count)s messages being mirrored", "count"
    ),
    "queue-active-graveyard": ngettext_lazy(
        "%(count)s isolated event being run alone",
        "%(count)s isolated events being run alone",
        "count",
    ),
    "queue-active-handler": ngettext_lazy(
        "%(count)s event being handled", "%(count)s events being handled", "count"
    ),
    "queue-consumed": _("%(what)s, consumed"),
    "queue-dead-letters": _(
        "%(what)s, in transfer to %(exchange)s: if that lasts more than 3 minutes, run manage.py "
        "events_declare --check, and if it reports no difference, restart the RabbitMQ node that "
        "leads the queue"
    ),
    "queue-dead-letters-kept": _(
        "%(what)s, but %(exchange)s is missing: run manage.py events_declare"
    ),
    "queue-history": _("%(number)s messages are kept"),
    "queue-delayed": _("%(number)s delayed, the next returns within %(seconds)s s"),
    "queue-missing": _("missing: run manage.py events_declare"),
    "queue-no-leader": _(
        "it has no leader, so it takes and delivers nothing: start all nodes of RabbitMQ; their "
        "logs say why a queue does not start"
    ),
    "queue-past-due": ngettext_lazy(
        "%(count)s event past due", "%(count)s events past due", "count"
    ),
    "queue-paused": ngettext_lazy(
        "%(count)s event waits for %(name)s until a worker has a free process, or its rate limit "
        "allows",
        "%(count)s events wait for %(name)s until a worker has a free process, or its rate limit "
        "allows",
        "count",
    ),
    "queue-poison-abyss": ngettext_lazy(
        "poison: %(count)s event that killed every consumer; check the logs of workers and "
        "reaper, then run `manage.py events_recover`",
        "poison: %(count)s events that killed every consumer; check the logs of workers and "
        "reaper, then run `manage.py events_recover`",
        "count",
    ),
    "queue-poison-consumed": ngettext_lazy(
        "poison: %(count)s event that ended the reaper, being archived; check its log",
        "poison: %(count)s events that ended the reaper, being archived; check its log",
        "count",
    ),
    "queue-poison-unconsumed": ngettext_lazy(
        "poison: %(count)s event that ended the reaper, no consumer: run `manage.py events_reaper`",
        "poison: %(count)s events that ended the reaper, no consumer: run `manage.py "
        "events_reaper`",
        "count",
    ),
    "queue-rejected": ngettext_lazy(
        "%(count)s event rejected", "%(count)s events rejected", "count"
    ),
    "queue-remedy-archive": _("run `manage.py events_companion` or events_worker"),
    "queue-remedy-graveyard": _("run `manage.py events_reaper` or events_worker"),
    "queue-remedy-handler": _("start a worker"),
    "queue-stale": _("no longer declared: run manage.py events_declare --delete-stale"),
    "queue-stale-delayed": _(
        "no longer declared; when its %(number)s delayed events have returned, run manage.py "
        "events_declare --delete-stale"
    ),
    "queue-stale-events": ngettext_lazy(
        "no longer declared, with %(count)s event: declare its handler again and start a worker; "
        "or run `manage.py events_recover %(name)s` and replay them",
        "no longer declared, with %(count)s events: declare its handler again and start a worker; "
        "or run `manage.py events_recover %(name)s` and replay them",
        "count",
    ),
    "queue-unconsumed": _("%(what)s, no consumer: %(remedy)s"),
    "queue-unreadable": _(
        "unreadable: %(reply)s; check the permissions of the user in the broker URL"
    ),
    "queue-waiting-archive": ngettext_lazy(
        "%(count)s message waits to be mirrored",
        "%(count)s messages wait to be mirrored",
        "count",
    ),
    "queue-waiting-graveyard": ngettext_lazy(
        "%(count)s isolated event waits to be run alone",
        "%(count)s isolated events wait to be run alone",
        "count",
    ),
    "queue-waiting-handler": ngettext_lazy(
        "%(count)s event waits for %(name)s", "%(count)s events wait for %(name)s", "count"
    ),
    "rows-attempts": ngettext_lazy(
        "%(count)s failed attempt", "%(count)s failed attempts", "count"
    ),
    "rows-due": _("due, for a relay"),
    "rows-failing": ngettext_lazy(
        "%(count)s event is retried after up to %(attempts)s: %(error)s; fix the cause, then run "
        "`manage.py events_relay --now`",
        "%(count)s events are retried after up to %(attempts)s: %(error)s; fix the cause, then run "
        "`manage.py events_relay --now`",
        "count",
    ),
    "rows-held": ngettext_lazy(
        "%(count)s event is awaiting confirmation; if the publisher has died, a relay takes over "
        "within %(seconds)s s",
        "%(count)s events are awaiting confirmation; if the publisher has died, a relay takes over "
        "within %(seconds)s s",
        "count",
    ),
    "rows-overdue": ngettext_lazy(
        "%(count)s event is due and no relay publishes it: run events_relay",
        "%(count)s events are due and no relay publishes them: run events_relay",
        "count",
    ),
    "rows-stray": ngettext_lazy(
        "%(count)s event is due in service '%(service)s' and no relay publishes it: run its "
        "events_relay, or if this service had that name, events_relay --service %(service)s",
        "%(count)s events are due in service '%(service)s' and no relay publishes them: run its "
        "events_relay, or if this service had that name, events_relay --service %(service)s",
        "count",
    ),
    "rows-stuck": _(
        "%(number)s of these for more than %(minutes)s minutes: check whether RabbitMQ blocks "
        "publishers (memory or disk alarm)"
    ),
    "rows-unreadable": _("cannot be read: %(error)s; check the database"),
    "rows-unreadable-migrate": _("cannot be read: %(error)s; run `manage.py migrate`"),
    # -- outbox
    "outbox-changed": _("it changed meanwhile; check it again"),
    "outbox-discarded": _("it is discarded; restore it first"),
    "outbox-due": _("it is due, and the next relay publishes it"),
    "outbox-failed": _("publishing failed, and a relay tries again"),
    "outbox-held": _("RabbitMQ has not confirmed it yet; try again in a minute"),
    "outbox-overdue": _("it is due, but no relay publishes it; run events_relay"),
    "outbox-published": _("it has been published and has left the outbox"),
}
