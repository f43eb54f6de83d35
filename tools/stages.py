"""Run the stages of `make check` or `make test`, and say how long each one took.

    python tools/stages.py check     the inner loop
    python tools/stages.py test      everything that continuous integration runs

A failing stage does not stop the ones after it; the exit status is 1 if any failed.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from mamba3lite.threads import spin_briefly

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
spin_briefly()
# The kernels that nbval starts see what tools/notebooks.py ran the notebooks with; and
# the site's build is quiet unless something is wrong.
ENVIRONMENT = os.environ | {"PYTHONHASHSEED": "0", "NO_MKDOCS_2_WARNING": "1"}

# Tests have one thread each (tests/conftest.py), so several run side by side. Notebooks
# use all threads there are, and run one after the other.
PYTEST = "pytest -q -n auto --maxprocesses 4 --dist worksteal"
CHECK = {
    "ruff": "ruff check .",
    "export": "python tools/export.py --check",
    "pairs": "python tools/notebooks.py --check",
    "fast tests": f"{PYTEST} -m 'not slow'",
}
TEST = CHECK | {
    "outputs": "python tools/notebooks.py --check-outputs",
    "slow tests": f"{PYTEST} -m slow",
    "processors": "python tools/processors.py",
    "notebooks": "pytest -q --nbval --nbval-current-env --nbval-cell-timeout 120 "
    "--nbval-sanitize-with notebooks/nbval.cfg --timeout 600 notebooks",
    "site": "mkdocs build --strict",
}


def run(stages: dict[str, str]) -> int:
    """Run the commands in order; returns 1 if any failed, else 0."""
    rows = []
    for name, command in stages.items():
        print(f"== {name}: {command}", flush=True)
        start = time.perf_counter()
        program, *arguments = shlex.split(command)
        status = subprocess.run(
            [BIN / program, *arguments], cwd=ROOT, env=ENVIRONMENT
        ).returncode
        rows.append((name, time.perf_counter() - start, status))
    print("\nstage            seconds")
    for name, seconds, status in rows:
        print(f"{name:<16} {seconds:7.1f}  {'ok' if status == 0 else 'FAILED'}")
    print(f"{'all':<16} {sum(seconds for _, seconds, _ in rows):7.1f}", flush=True)
    return int(any(status for _, _, status in rows))


if __name__ == "__main__":
    stages = {"check": CHECK, "test": TEST}
    if len(sys.argv) != 2 or sys.argv[1] not in stages:
        sys.exit("tools/stages.py: one argument, check or test")
    sys.exit(run(stages[sys.argv[1]]))
