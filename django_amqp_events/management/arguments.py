"""Types of command line arguments, and the filters on archived events."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.core.management.base import CommandError
from django.utils import timezone

from django_amqp_events import conf
from django_amqp_events.archive import search_values, tables
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.archive.selection import SearchTerm
from django_amqp_events.declare.patterns import pattern_problem
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.message.text import YEARS, valid_moment
from django_amqp_events.models import clean
from django_amqp_events.options import parse_age, suggestion

_AGE_MAX: Final = timedelta(days=36_500).total_seconds()
#: Filters that :class:`~django_amqp_events.archive.selection.Selection` calls by the plural.
_FILTERS: Final = {
    "handler": "Handler that failed.",
    "event": "Full name of the event; patterns are refused.",
    "exception": "Exception: the dotted name, or its last word; patterns are refused.",
    "reason": "Reason for archiving, such as exhausted.",
}


def add_batch_size(parser: ArgumentParser, default: int, what: str, most: int = 10_000) -> None:
    parser.add_argument(
        "--batch-size",
        type=integer(1, most),
        default=default,
        metavar="N",
        help=f"Maximum {what} (default: %(default)s).",
    )


def add_limit(parser: ArgumentParser, what: str, default: int | None = None) -> None:
    parser.add_argument(
        "--limit",
        type=integer(1),
        default=default,
        metavar="N",
        help=f"Maximum number of {what}" + (" (default: %(default)s)." if default else "."),
    )


def add_service(parser: ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--service",
        type=service,
        metavar="NAME",
        help=f"{what} another service name, after this service was renamed.",
    )


def add_filters(parser: ArgumentParser) -> Any:
    """Add the options that :func:`filters` reads; return their group."""
    group = parser.add_argument_group("filters")
    for name, text in _FILTERS.items():
        group.add_argument(
            f"--{name}",
            action="append",
            default=[],
            type=whole_name if name in ("event", "exception") else clean,
            metavar=name.upper(),
            help=text,
        )
    group.add_argument(
        "--match",
        action="append",
        default=[],
        type=search_term,
        metavar="PATH=VALUE",
        help="Value at a path of SEARCH: order_id=17, or email=ann@* for its start.",
    )
    group.add_argument("--since", type=moment, metavar="TIME", help="Last failed then or later.")
    group.add_argument("--until", type=moment, metavar="TIME", help="Last failed before then.")
    return group


def filters(options: dict[str, Any]) -> dict[str, Any]:
    """Return the filters that are set, as fields of a selection.

    Raises:
        ConfigurationError: no event declares the path of a search.
    """
    since, until = options["since"], options["until"]
    if since and until and since >= until:
        raise CommandError("--since is not before --until", returncode=2)
    check_handlers(options["handler"])
    search_values.check_paths(SearchTerm.parse(text).path for text in options["match"])
    given = {f"{name}s": options[name] for name in _FILTERS} | {"search": options["match"]}
    given |= {"since": since, "until": until}
    return {name: value for name, value in given.items() if value}


def check_handlers(names: Iterable[str]) -> None:
    """Refuse a handler that does not exist and has no archived event."""
    handlers = {*get_registry().handlers, *conf.get_settings().renamed_handlers}
    for name in names:
        if name not in handlers and not tables.rows().filter(handler=name).exists():
            hint = suggestion(name, handlers) or "; see `manage.py events_declare`"
            raise CommandError(
                f"there is no handler {name!r} and no event of it{hint}", returncode=2
            )


def add_batch_options(parser: ArgumentParser) -> None:
    """Add the options that :func:`batch_options` reads, beside ``--comment``."""
    parser.add_argument("--rate", type=positive, metavar="N", help="Maximum events per second.")
    parser.add_argument(
        "--canary",
        type=int,
        metavar="N",
        help="Replay N events first, the rest after these have succeeded.",
    )
    parser.add_argument(
        "--pause-at",
        type=int,
        metavar="PERCENT",
        help="Failure threshold, the percentage of failures among the last "
        f"{batch_states.WINDOW} outcomes that pauses the batch (default: "
        f"{batch_states.THRESHOLD}; 0: never).",
    )


def batch_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with which a batch is started."""
    percent = options["pause_at"]
    return {
        "reason": options["comment"],
        "rate": options["rate"],
        "canary": options["canary"],
        "threshold": batch_states.THRESHOLD if percent is None else percent or None,
    }


def add_past_filters(parser: ArgumentParser) -> None:
    """Add the options that :func:`past_filters` reads."""
    for name, kind, text in (
        ("event", pattern, "Name of the event, or a pattern such as shop.order.*."),
        ("match", search_term, "Value in the payload: order_id=17, or email=ann@* for its start."),
    ):
        metavar = "PATH=VALUE" if name == "match" else "EVENT"
        parser.add_argument(
            f"--{name}", action="append", default=[], type=kind, metavar=metavar, help=text
        )
    parser.add_argument("--since", type=past, metavar="TIME", help="Published then or later.")
    parser.add_argument("--until", type=moment, metavar="TIME", help="Published before then.")


def past_filters(options: dict[str, Any]) -> dict[str, Any]:
    """Return the filters on past events, as fields of a filter."""
    given = {"events": tuple(options["event"]), "search": tuple(options["match"])}
    return {**given, "since": options["since"], "until": options["until"]}


def past(text: str) -> datetime:
    """Read a time that is not in the future."""
    at = moment(text)
    if at > datetime.now(UTC):
        raise ArgumentTypeError(f"{text!r} is in the future")
    return at


def pattern(text: str) -> str:
    """Read the name of an event, or a topic pattern."""
    if (problem := pattern_problem(text)) is not None:
        raise ArgumentTypeError(f"{text!r:.80}: {problem}")
    return text


def integer(least: int, most: int = 1_000_000_000) -> Callable[[str], int]:
    """Return a type for whole numbers within limits."""

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ArgumentTypeError(f"{text} is not a number from {least} to {most}")
        return value

    parse.__name__ = "number"  # argparse writes "invalid number value: 'x'"
    return parse


def positive(text: str) -> float:
    """Read a number above 0 and at most a million."""
    value = float(text)
    if not 0 < value <= 1_000_000:
        raise ArgumentTypeError(f"{text} is not a number above 0 and at most 1000000")
    return value


def not_negative(text: str) -> float:
    """Read a number from 0 to a million."""
    value = float(text)
    if not 0 <= value <= 1_000_000:
        raise ArgumentTypeError(f"{text} is not a number from 0 to 1000000")
    return value


def age(text: str) -> float:
    """Read an age in seconds: ``90s``, ``2h``, ``1d12h``."""
    seconds = parse_age(text)
    if seconds is None or seconds > _AGE_MAX:
        raise ArgumentTypeError(f"{text!r} is not an age such as 90s, 45m, 12h, 30d, 8w or 1d12h")
    return seconds


def moment(text: str) -> datetime:
    """Read a time: ISO 8601, in the project's time zone unless it has an offset, or an age."""
    try:
        parsed = datetime.now(UTC) - timedelta(seconds=age(text))
    except ArgumentTypeError:
        try:
            parsed = datetime.fromisoformat(text.strip())
            if parsed.tzinfo is None:
                parsed = timezone.make_aware(parsed)
            # A time that does not exist in UTC cannot be compared.
            parsed = parsed.astimezone(UTC)
        except (ValueError, OverflowError) as exc:
            raise ArgumentTypeError(
                f"{text!r} is neither a time such as 2026-11-20, 2026-11-20T13:30 or "
                f"2026-11-20T13:30+01:00, nor an age such as 45m, 2h or 3d"
            ) from exc
    if valid_moment(parsed) is None:
        raise ArgumentTypeError(f"{text!r} is not from {YEARS[0]} to {YEARS[-1]}")
    return parsed


def service(text: str) -> str:
    """Read the name of a service."""
    if not conf.SERVICE.fullmatch(text):
        raise ArgumentTypeError(f"{text!r:.80}: a service's name is letters, digits, - and _")
    return text


def whole_name(text: str) -> str:
    """Read a name that is not a pattern."""
    if "*" in text or "#" in text:
        raise ArgumentTypeError(f"{text!r} is a pattern; give whole names, one option for each")
    return clean(text)


def search_term(text: str) -> str:
    """Read a search for a value at a path."""
    try:
        SearchTerm.parse(text)
    except ValueError as exc:
        raise ArgumentTypeError(str(exc)) from exc
    return text
