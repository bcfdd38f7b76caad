#!/usr/bin/env python3
"""Change one operator, number or keyword of a module at a time, and see which tests notice.

    make mutants                                    # 300 mutants, seed 1
    make mutants ARGS="--count 60 --seed 7 --module worker/verdict"
    make mutants ARGS="--tree ../older --out older.jsonl"
    make mutants ARGS="--again first.jsonl --out again.jsonl"

The tests are those of `make test`. The sample is the same for the same seed and source. A mutant is
*killed* by the first test that fails or does not end; one that no test notices *survives*. Cosmic
Ray makes the mutants, in an environment of its own (requirements/mutants.txt).
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from broker import Node
from machine import exit_with

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".run" / "mutants"
PACKAGE = "django_amqp_events"
#: Seconds for one module of tests; what is slower counts as killed.
TIMEOUT = 300
#: Reads the names of tests, and writes the exit code of each run.
FORKING = """
import importlib, os, runpy, signal, sys, time
from contextlib import suppress
for name in runpy.run_path(sys.argv[2])["MODULES"].split():
    with suppress(ImportError):
        importlib.import_module(name)
sys.path.insert(0, os.getcwd())
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.setsid()
        file = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file, 1)
        os.dup2(file, 2)
        import pytest
        code = pytest.main(["-x", "-q", "-n0", "-p", "no:randomly", "-p", "no:cacheprovider",
            "--reruns", "0", "--timeout", "120", *sys.argv[3:], line.strip()])
        sys.stdout.flush()
        os._exit(code)
    until = time.monotonic() + float(sys.argv[1])
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended[0]:
        os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "time-out", flush=True)
"""
#: Modules, and the tests that import or drive each: those that are quick first.
TESTS = {
    "worker/verdict": "unit/worker/test_task.py acceptance/worker/test_core.py",
    "declare/retry_policy": "unit/declare/test_retry_policy.py unit/worker/test_task.py "
    "contract/test_contract.py",
    "archive/states": "unit/archive/test_states.py unit/archive/test_replay.py "
    "unit/archive/test_batches.py unit/archive/test_editing.py "
    "unit/archive/test_failure_groups.py integration/archive/test_archive_machine.py",
    "publish/outbox_rows": "unit/publish/test_outbox.py unit/admin/test_outbox.py "
    "integration/publish/test_outbox.py integration/publish/test_outbox_machine.py",
    "worker/pool_job": "unit/memory/test_memory.py acceptance/worker/test_core.py "
    "acceptance/worker/test_reconnect.py acceptance/worker/test_celery_options.py",
    "worker/jobs": "unit/worker/test_jobs.py acceptance/worker/test_core.py "
    "acceptance/worker/test_reconnect.py acceptance/worker/test_celery_options.py",
    "archive/row_writer": "unit/archive/test_mirror.py unit/archive/test_failure_groups.py "
    "unit/archive/test_states.py integration/archive/test_mirror.py "
    "integration/management/test_events_recover.py "
    "integration/archive/test_archive_machine.py",
    "broker/confirms": "integration/broker/test_confirms.py "
    "integration/broker/test_confirms_model.py",
    "worker/inbox": "unit/worker/test_once.py integration/worker/test_once.py",
    "archive/eligibility": "unit/archive/test_replay.py unit/archive/test_batches.py "
    "unit/archive/test_editing.py unit/admin/test_admin.py unit/admin/test_editing.py",
    "archive/redaction": "unit/archive/test_search.py unit/archive/test_export.py "
    "unit/admin/test_editing.py unit/admin/test_admin.py",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    module: str
    operator: str
    line: int
    occurrence: int

    @property
    def name(self) -> tuple[object, ...]:
        """What tells it from the others of one source."""
        return self.module, self.operator, self.occurrence

    def code(self, source: str) -> str | None:
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        mutated: str | None = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        return mutated


def mutants_of(module: str, source: str) -> Iterator[list[Mutant]]:
    """Yield the mutants of each place: those that put something else there."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    tree = get_ast(source)
    hidden = _unevaluated(source)
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for name in sorted(operator_names()):
        if "Variable" in name:  # these want arguments
            continue
        operator = get_operator(name)()
        family = re.split(r"[_]", name)[0]
        occurrence = 0
        for node in ast_nodes(tree):
            for start, _ in operator.mutation_positions(node):
                mutant = Mutant(module, name, start[0], occurrence)
                occurrence += 1
                if not any(first <= start <= last for first, last in hidden):
                    places.setdefault((family, *start), []).append(mutant)
    yield from (places[place] for place in sorted(places))


def _unevaluated(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where annotations are: nothing reads a changed one."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            found.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(node.returns)
    return [
        ((at.lineno, at.col_offset), (at.end_lineno or 0, at.end_col_offset or 0))
        for at in found
        if at is not None
    ]


def judge(mutant: Mutant, tree: Path, tester: Tester) -> dict[str, object]:
    """Run a mutant's tests in a copy of the tree; return what became of it."""
    path = tester.place / PACKAGE / f"{mutant.module}.py"
    source = (tree / PACKAGE / f"{mutant.module}.py").read_text()
    code = mutant.code(source)
    killer = ""
    try:
        path.write_text(code or source)
        for tests in TESTS[mutant.module].split() if code else ():
            if killer := tester.failing(tests):
                break
    finally:
        path.write_text(source)
    lines = difflib.unified_diff(
        source.splitlines(), (code or source).splitlines(), n=0, lineterm=""
    )
    diff = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return {**asdict(mutant), "killer": killer, "diff": diff}


class Tester:
    """A process that has imported the libraries, and forks one for each run of tests."""

    def __init__(self, place: Path, env: dict[str, str], options: list[str]) -> None:
        self.place = place
        server = ROOT / "tests" / "fork_server.py"
        python = ROOT / ".venv/bin/python"
        command = [str(python), "-c", FORKING, f"{TIMEOUT}", str(server), *options]
        self._process = subprocess.Popen(
            command, cwd=place, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def failing(self, tests: str) -> str:
        """Return the first test that fails or what else ended the run; ``""`` if all pass."""
        asked, answers = self._process.stdin, self._process.stdout
        if asked is None or answers is None:
            raise TypeError("both are pipes")
        print(f"tests/{tests}", file=asked, flush=True)
        code = answers.readline().strip()
        if code in ("0", "5"):
            return ""
        told = (self.place / "output").read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
        return failed[1] if failed else f"exit code {code}"

    def end(self) -> None:
        self._process.communicate()


def copies(tree: Path, number: int) -> list[Path]:
    """Return folders with a package of their own beside the tree's other files."""
    made = []
    for n in range(number):
        place = WORK / str(n)
        shutil.rmtree(place, ignore_errors=True)
        ignored = shutil.ignore_patterns(".*", "__pycache__", "dist", "benchmarks", "deploy")
        shutil.copytree(tree, place, ignore=ignored, symlinks=True)
        made.append(place)
    return made


def judged_in(file: Path) -> dict[tuple[object, ...], dict[str, object]]:
    """Return the rows of an earlier run by the names of their mutants."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {(row["module"], row["operator"], row["occurrence"]): row for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to test")
    parser.add_argument("--module", action="append", choices=TESTS, default=[])
    parser.add_argument("--out", type=Path, default=WORK / "mutants.jsonl", help="a line for each")
    parser.add_argument(
        "--again",
        type=Path,
        help="only those that survived there, with the tests of `make test-all`",
    )
    parser.add_argument("--resume", action="store_true", help="keep what --out says, and go on")
    options = parser.parse_args()
    tree: Path = options.tree.resolve()
    places = [
        place
        for module in options.module or TESTS
        for place in mutants_of(module, (tree / PACKAGE / f"{module}.py").read_text())
    ]
    chance = random.Random(options.seed)
    chosen = [chance.choice(place) for place in places]
    chosen = chance.sample(chosen, min(options.count, len(chosen)))
    if options.again:
        left = {name for name, row in judged_in(options.again).items() if not row["killer"]}
        chosen = [mutant for mutant in chosen if mutant.name in left]
    old = judged_in(options.out) if options.resume else {}
    chosen = [mutant for mutant in chosen if mutant.name not in old]
    WORK.mkdir(parents=True, exist_ok=True)
    node = Node.start(tempfile.mkdtemp(prefix="mutants-"))
    env = {key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"}
    env |= {"AMQP_URL": node.amqp_url(), "AMQP_MANAGEMENT_URL": node.management_url}
    # An older tree may have no selection of tests.
    has_quick = "--quick" in (tree / "Makefile").read_text()
    quick = ["--quick"] if has_quick and not options.again else []
    testers = [Tester(place, env, quick) for place in copies(tree, os.cpu_count() or 1)]
    free = list(testers)

    def judged(mutant: Mutant) -> dict[str, object]:
        tester = free.pop()
        try:
            return judge(mutant, tree, tester)
        finally:
            free.append(tester)

    counts = Counter((str(row["module"]), bool(row["killer"])) for row in old.values())
    with (
        ThreadPoolExecutor(len(testers)) as pool,
        options.out.open("a" if old else "w") as out,
    ):
        for done in as_completed([pool.submit(judged, mutant) for mutant in chosen]):
            row = done.result()
            counts[str(row["module"]), bool(row["killer"])] += 1
            out.write(json.dumps(row) + "\n")
            out.flush()
    for tester in testers:
        tester.end()
    node.end()
    for module in sorted({module for module, _ in counts}):
        print(f"{module:24} {counts[module, True]:4} killed {counts[module, False]:4} survive")
    killed = sum(count for (_, dead), count in counts.items() if dead)
    print(f"{'all':24} {killed:4} killed {counts.total() - killed:4} survive")
    return 0


if __name__ == "__main__":
    exit_with(main)
