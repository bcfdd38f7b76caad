"""django-celery-results as result backend: what it has of a run, of a replay, of two handlers."""

from __future__ import annotations

import pytest

from ..conftest import POOLS, Make
from ..harness import Eyes, Service, until
from ..replaying import (
    fix,
    mirrored,
    replay,
)

# Many processes, one after the other.
pytestmark = pytest.mark.timeout(300)

SHARED = "replays.shared"
FAILING, KEPT = "testproject.failing", "testproject.kept"
BACKEND = {"result_backend": "django-db", "result_extended": True}


def results(service: Service) -> dict[str, tuple[str, str, str]]:
    """Status, name and result of each TaskResult by its id."""
    found = service.value(
        "list(TaskResult.objects.values_list('task_id', 'status', 'task_name', 'result'))",
        "from django_celery_results.models import TaskResult",
    )
    assert len({each[0] for each in found}) == len(found)
    return {each[0]: tuple(each[1:]) for each in found}


def stored(service: Service, number: int) -> dict[str, tuple[str, str, str]]:
    """Wait until there are so many results."""

    def enough() -> dict[str, tuple[str, str, str]]:
        found = results(service)
        return found if len(found) >= number else {}

    found = until(enough, 30, f"{number} results")
    assert len(found) == number, found
    return found


@pytest.mark.parametrize("pool", POOLS[:2])
def test_one_result_per_event_handler_and_replay(
    fresh_eyes: Eyes, service: Make, pool: str
) -> None:
    """Failures all, successes where the handler asks for it; never one for two handlers."""
    replays = service(fresh_eyes, "replays", handlers="replays", celery=BACKEND).declare()
    replays.migrate()
    replays.worker(pool, 2)
    fresh_eyes.event(SHARED, {"plan": ["unless:fixed"]})
    first = {each["handler"]: each for each in mirrored(replays, 2, state="archived")}
    found = stored(replays, 2)
    assert set(found) == {first[FAILING]["task_id"], first[KEPT]["task_id"]}
    for handler in (FAILING, KEPT):
        status, name, result = found[first[handler]["task_id"]]
        assert (status, name) == ("FAILURE", handler)
        assert "fixed is not there" in result

    report = replay(replays)
    assert report["published"] == 2
    again = {each["handler"]: each for each in mirrored(replays, 2, state="archived", failures=2)}
    found = stored(replays, 4)
    for handler in (FAILING, KEPT):
        (failed,) = again[handler]["replay_set"]
        assert failed["task_id"] != again[handler]["task_id"] == first[handler]["task_id"]
        assert found[failed["task_id"]][:2] == ("FAILURE", handler)

    before = found
    fix(replays)
    replay(replays)
    done = {each["handler"]: each for each in mirrored(replays, 2, state="succeeded")}
    found = stored(replays, 5)
    asked, unasked = (done[handler]["replay_set"][1]["task_id"] for handler in (KEPT, FAILING))
    assert found[asked][:2] == ("SUCCESS", KEPT)
    assert "did unless:fixed" in found[asked][2]
    assert unasked not in found
    assert {key: value for key, value in found.items() if key != asked} == before
