"""Check that private names of a library exist and have the expected parameters.

``broker/amqp_internals.py`` and ``worker/celery_internals.py`` list the names.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter

from ..exceptions import ConfigurationError


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private or undocumented name of a library.

    Attributes:
        path: module and attribute, such as ``celery.worker.request:Request._context``.
        purpose: what it is needed for: "needed to …".
        parameters: the names of its parameters; ``None`` if it is not called.
        overridden: whether the library calls our version, so that a new parameter is a change even
            with a default.
    """

    path: str
    purpose: str
    parameters: tuple[str, ...] | None = None
    overridden: bool = False

    def problem(self) -> str:
        """Return what is wrong with the installed version, ``""`` if nothing is."""
        module, _, attribute = self.path.partition(":")
        owner, _, last = attribute.rpartition(".")
        try:
            value: object = import_module(module)
            if owner:
                value = attrgetter(owner)(value)
            if self.parameters is None and last in _set_by_init(value):
                return ""
            value = getattr(value, last)
        except (ImportError, AttributeError):
            return f"{self.path} does not exist"
        if self.parameters is None:
            return ""
        if not callable(value):
            return f"{self.path} cannot be called"
        signature = inspect.signature(value)
        names, expected = tuple(signature.parameters), self.parameters
        if names == expected:
            return ""
        if not self.overridden:
            # Others may have defaults; a wrapper, such as Sentry's around build_tracer, passes on
            # what it does not name.
            with suppress(TypeError):
                bound = signature.bind(*expected).arguments
                if all(name == value or isinstance(value, tuple) for name, value in bound.items()):
                    return ""
        return f"{self.path} takes ({', '.join(names)}), not ({', '.join(expected)})"


def _set_by_init(owner: object) -> set[str]:
    """Return the names in ``__init__`` of a class, among them the attributes that it sets."""
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    codes = (getattr(vars(cls).get("__init__"), "__code__", None) for cls in classes)
    return {name for code in codes if code is not None for name in code.co_names}


def require(library: str, names: Sequence[PrivateName]) -> None:
    """Check the names on which correctness depends.

    Args:
        library: name of the distribution, such as ``celery``.

    Raises:
        ConfigurationError: a name is missing or takes other parameters.
    """
    for name in names:
        if problem := name.problem():
            raise ConfigurationError(
                f"{library} {version(library)} is not supported: {problem}, which is needed to "
                f"{name.purpose}. Install another version of {library} or upgrade "
                f"django_amqp_events."
            )
