"""How much of its speed a run keeps beside busy processes, by how its threads wait.

    python tools/threads.py DATA [--json docs/benchmarks/runs/cpu-threads.json]

DATA is a folder that `mamba3lite prepare --source stdlib` made. The loop of the shipped
configuration `tiny` runs for some seconds in a process of its own, for each setting and
beside 0, 1 and 2 processes that do nothing but compute; all settings take turns, so
that a slow minute of the machine slows all of them. The median of the rounds counts.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from mamba3lite.files import write_whole
from mamba3lite.threads import SETTINGS, SPINS

# What OpenMP does by itself, and what the package sets.
CHOICES = {
    "default": {},
    "brief": {"GOMP_SPINCOUNT": SPINS},
}
BUSY = (0, 1, 2)
SECONDS, ROUNDS, WARM_UP = 2.0, 5, 3


def steps(data: Path, seconds: float) -> float:
    """Tokens per second of the training loop in this process."""
    from mamba3lite.training.config import load_config
    from mamba3lite.training.metrics import Display
    from mamba3lite.training.run import Pretrainer

    config = load_config("tiny", ["training.save_dir=not-written"])
    run = Pretrainer(config, data, Display(config.total_steps, quiet=True))
    for _ in range(WARM_UP):
        run.next_step()
    begin, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < seconds:
        run.next_step()
        count += 1
    return count * config.tokens_per_step / spent


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute without end."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(data: Path, choice: dict[str, str], seconds: float) -> float:
    """Tokens per second of a process in which threads wait by this choice."""
    kept = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    command = [sys.executable, __file__, str(data), "--loop", str(seconds)]
    done = subprocess.run(
        command, env=kept | choice, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout)


def measure_all(data: Path) -> list[dict]:
    """A row for each number of busy processes and choice."""
    found: dict[tuple, list[float]] = {}
    for number in range(1, ROUNDS + 1):
        for count in BUSY:
            with busy(count):
                for name, choice in CHOICES.items():
                    speed = measure(data, choice, SECONDS)
                    found.setdefault((count, name), []).append(speed)
                    print(f"round {number}, {count} busy, {name}: {speed:,.0f}")
    return [
        {
            "busy": count,
            "choice": name,
            "settings": CHOICES[name],
            "tokens_per_s": statistics.median(speeds),
            "all": speeds,
        }
        for (count, name), speeds in found.items()
    ]


def report(rows: list[dict]) -> dict:
    """The rows with the machine, the versions and the command they come from."""
    import torch

    import mamba3lite

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "device": {
            "name": "CPU",
            "processor": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mamba3lite": mamba3lite.__version__,
        },
        "seconds": SECONDS,
        "rounds": ROUNDS,
        "rows": rows,
    }


def main() -> None:
    """Measure, print the medians, and write the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="a prepared folder")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--loop", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop is not None:
        print(steps(options.data, options.loop))
        return
    rows = measure_all(options.data)
    print("busy  " + "  ".join(f"{name:>8}" for name in CHOICES))
    for count in BUSY:
        speeds = [row["tokens_per_s"] for row in rows if row["busy"] == count]
        print(f"{count:4}  " + "  ".join(f"{speed:8,.0f}" for speed in speeds))
    if options.json is not None:
        write_whole(options.json, json.dumps(report(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
