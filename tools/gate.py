"""Run the tests marked `gpu` on this machine's GPU, and record what came of it.

    python3 tools/gate.py            those that carry a figure or a bit, marked `gate`
    python3 tools/gate.py --all      every one
    python3 tools/gate.py --all 1/2  every one, the first of two parts

The Python that runs this file needs torch, triton and pytest. A module of tests that
needs more than it has is listed as skipped. A few processes share the tests out, since
most of the time goes into compiling kernels.

docs/benchmarks/NAME-gate.json, NAME being that of the GPU, keeps the last run of each
command; it is written whatever came of the tests. Without git, set COMMIT to the commit
that is tested.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package need not be installed

from mamba3lite.files import write_whole  # noqa: E402

GPU_TESTS = re.compile(r"\bmark\.gpu\b|\bneeds_triton\b")
CORES_A_PROCESS, MOST_PROCESSES = 4, 4
FORMAT = 1
ENDED_WELL = (0, 1, 5)  # of pytest: all passed, some failed, nothing to run
SECONDS_BETWEEN_LINES = 20


@dataclass
class Share:
    """A process that runs some of the tests, and where it records what came of them."""

    name: str
    record: Path
    process: subprocess.Popen | None = None

    @property
    def log(self) -> Path:
        return self.record.with_suffix(".log")

    def lines(self) -> list[dict]:
        """What the process has recorded."""
        text = self.record.read_text() if self.record.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def gpu_modules() -> list[str]:
    """The files that have tests for a GPU."""
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    return [
        str(path.relative_to(ROOT))
        for path in paths
        if GPU_TESTS.search(path.read_text(encoding="utf-8"))
    ]


def commit() -> str | None:
    """The commit, `+changes` after it if files differ; COMMIT says it without git."""
    if named := os.environ.get("COMMIT"):
        return named
    try:
        asked = [
            subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        ]
    except FileNotFoundError:
        return None
    if any(answer.returncode for answer in asked):
        return None
    return asked[0].stdout.strip() + "+changes" * bool(asked[1].stdout)


def machine() -> tuple[dict, dict]:
    """Device and versions as in benchmark files; exits where there is no GPU."""
    import torch

    from mamba3lite.bench import this_machine, versions

    if not torch.cuda.is_available():
        sys.exit("tools/gate.py: PyTorch finds no GPU here")
    return this_machine(torch.device("cuda")), versions()


def start(marks: str, part: str, seconds: dict, folder: Path) -> list[Share]:
    """Start a process for each share of a part of the tests; they write to `folder`."""
    (folder / "seconds").write_text(json.dumps(seconds))
    count = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // CORES_A_PROCESS))
    ours = [str(Path(__file__).parent), str(ROOT)]  # before what the caller carries
    path = os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    shares = []
    for number in range(1, count + 1):
        share = Share(f"{number}/{count}", folder / f"{number}.jsonl")
        command = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml"]
        command += ["-m", marks, "-p", "gate_plugin", "-p", "no:cacheprovider"]
        command += [f"--seconds={folder / 'seconds'}", f"--record={share.record}"]
        command += [f"--share={part}", f"--share={share.name}"]
        command += gpu_modules()
        with share.log.open("w") as log:
            share.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        shares.append(share)
    return shares


def wait_for(shares: list[Share]) -> bool:
    """Say how far the shares are until they end; False if told to stop before."""
    started = said = time.monotonic()
    try:
        while any(share.process.poll() is None for share in shares):
            time.sleep(0.2)
            if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                ended = sum(len(share.lines()) for share in shares)
                print(f"{said - started:.0f} s: {ended} lines of results", flush=True)
    except (KeyboardInterrupt, SystemExit):
        return False
    finally:
        for share in shares:
            share.process.kill()
            share.process.wait()
            print(f"== share {share.name}\n{share.log.read_text()}", flush=True)
    return True


def results_of(shares: list[Share]) -> dict:
    """Counts, what failed or was skipped and why, what did not run, seconds of each."""
    outcomes: dict[str, dict[str, str]] = {"failed": {}, "skipped": {}, "passed": {}}
    collected, tests = [], {}
    for share in shares:
        for line in share.lines():
            collected += line.get("collected", [])
            if "seconds" in line:
                tests[line["test"]] = line["seconds"]
            if "outcome" in line:
                outcomes[line["outcome"]][line["test"]] = line.get("why", "")
        if share.process.returncode not in ENDED_WELL:
            why = f"the process ended with status {share.process.returncode}"
            outcomes["failed"][f"share {share.name}"] = why
    bad = outcomes["failed"] | outcomes["skipped"]
    passed = outcomes["passed"].keys() - bad.keys()
    not_run = sorted(set(collected) - outcomes["passed"].keys() - bad.keys())
    listed = {
        kind: [{"test": test, "why": why} for test, why in sorted(whys.items())]
        for kind, whys in outcomes.items()
        if kind != "passed"
    }
    counts = {kind: len(listed[kind]) for kind in listed}
    counts = {"passed": len(passed)} | counts | {"not_run": len(not_run)}
    return {"counts": counts, **listed, "not_run": not_run, "tests": tests}


def times_of(runs: dict[str, dict], before: dict[str, float]) -> dict[str, float]:
    """The seconds by which tests are shared out: those of the last whole set of parts.

    A part that was run does not change how the ones that remain are cut.
    """
    for command, run in runs.items():
        if command.startswith("make gpu-all PART=1/"):
            count = int(command.rpartition("/")[2])
            parts = [
                runs.get(f"make gpu-all PART={number}/{count}", {})
                for number in range(1, count + 1)
            ]
            if all(part.get("commit", 0) == run["commit"] for part in parts):
                return {t: s for part in parts for t, s in part["tests"].items()}
    return before


def part(text: str) -> str:
    """K/N with 1 <= K <= N; raises ValueError."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return f"{number}/{count}"


def run_tests(marks: str, part: str, times: dict[str, float]) -> dict:
    """Run a part of the tests with these marks; returns all there is to say of it."""
    device, versions = machine()
    run = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "device": device,
        "versions": versions,
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shares = start(marks, part, times, Path(folder))
        run |= {"finished": wait_for(shares), "processes": len(shares)}
        run |= {"seconds": round(time.monotonic() - started, 1)} | results_of(shares)
    return run


def result_file(device: str) -> Path:
    """Where the results of a GPU of this name are kept."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia "))
    return ROOT / "docs" / "benchmarks" / f"{name}-gate.json"


def main(arguments: list[str] | None = None) -> int:
    """Run and record; 0 if every test passed or was skipped for a reason."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--all", nargs="?", const="1/1", type=part, metavar="K/N", help="every test"
    )
    options = parser.parse_args(arguments)
    target = result_file(machine()[0]["name"])
    content = {"format": FORMAT, "kind": "gate", "runs": {}, "times": {}}
    if target.exists():
        content = json.loads(target.read_text(encoding="utf-8"))
    command = f"make gpu-all PART={options.all}" if options.all else "make gpu"
    marks = "gpu" if options.all else "gpu and gate"
    run = run_tests(marks, options.all or "1/1", content["times"])
    content["runs"][command] = run
    content["times"] = times_of(content["runs"], content["times"])
    write_whole(target, json.dumps(content, indent=1) + "\n")
    for kind in ("failed", "skipped"):
        for line in run[kind]:
            print(f"{kind}: {line['test']}: {line['why']}")
    counts = ", ".join(f"{count} {kind}" for kind, count in run["counts"].items())
    print(f"{command}: {counts}, {run['seconds']} s; wrote {target.relative_to(ROOT)}")
    bad = run["counts"]["failed"] + run["counts"]["not_run"]
    return int(bad > 0 or not run["finished"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    sys.exit(main())
