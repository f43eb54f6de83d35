"""Measure training on several GPUs of one host: speed, losses, checkpoints, a death.

    python -m mamba3lite.scaling --json docs/benchmarks/NAME.json

Every run is the trainer's own, started with torchrun. Each GPU has the same work
however many there are (weak scaling): micro_batch_size rows, and as many micro-batches
in a step as GPUs. What this machine cannot run is listed as not run. On a CPU processes
joined by gloo stand for GPUs, which checks the program and measures nothing.
"""

import json
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from mamba3lite.bench import FORMAT, this_machine, versions
from mamba3lite.commands import Command, check_new_file
from mamba3lite.data.corpora import require_source
from mamba3lite.data.prepare import prepare
from mamba3lite.files import write_whole
from mamba3lite.training.config import ConfigError, load_config
from mamba3lite.training.metrics import read_metrics
from mamba3lite.training.timed import RESULT, Job
from mamba3lite.verify import verify_folder

PROFILED = 2  # steps in the profiler's window, after those that are timed
WARM_UP = 10  # steps without a place in the median
# Of the configuration's learning rate, reached in the last step: at all of it the first
# steps of a model are chaos, in which another order of summation is another loss.
GENTLE = 0.1
LIMITS = {"fp32": 1e-5, "bf16": 1e-3}  # of the relative difference of two losses
SMALL_ROWS = 4  # rows of a micro-batch of the small configuration
PATIENCE_S = 15  # training.dist_timeout_s of the run in which a rank is killed
KINDS = ("ddp", "fsdp2")
NEVER = 10**6
MOST_OF_ALL = 0.5  # of the time for all measurements, for one launch
EXCHANGES_MB = {"cuda": [25, 1024], "cpu": [1]}
# The same sums in the same order, wherever float32 leaves a choice.
EXACT = ["model.ssd_dispatch=pytorch", "training.precision=fp32", "training.tf32=false"]


class Failed(Exception):
    """A part that could not be measured: one line."""


@dataclass(frozen=True)
class Plan:
    """What is measured: two configurations, rows a micro-batch, steps, GPUs, seconds.

    config: whose speed is measured. small: of the float32 losses, the resumed run and
    the killed one. gpus: wanted; those above ``here`` are listed as not run. only:
    words of the names of the parts to run; none for all.
    """

    config: str
    small: str
    source: str
    rows: int
    steps: int
    gpus: tuple[int, ...]
    here: int
    seconds: float
    only: tuple[str, ...] = ()

    @property
    def several(self) -> list[int]:
        """The numbers of GPUs above 1 that can be run here."""
        return [n for n in self.gpus if 1 < n <= self.here]


# --------------------------------------------------------------------------------------
# Starting runs


class Bench:
    """Starts the runs of a plan in one working folder, and reads what they leave."""

    def __init__(self, plan: Plan, work: Path, say: Callable[[str], None]):
        self.plan, self.work, self.say = plan, work, say
        self.end = time.monotonic() + plan.seconds
        self.launches = 0
        self.exchanges: list[dict] = []
        self.profiles: dict[str, dict | None] = {}

    def left(self) -> float:
        """Seconds until the plan's time is over."""
        return self.end - time.monotonic()

    def data(self, config: str) -> Path:
        """The prepared folder of a configuration, made by the first call."""
        tokenizer = load_config(config).data.tokenizer
        folder = self.work / f"tokens-{tokenizer}"
        if not folder.exists():
            source = self.plan.source
            prepare(source, tokenizer, folder, val_fraction=0.05, progress=_quiet)
        return folder

    def settings(self, name: str, config: str, rows: int, micro: int, **training):
        """Overrides of a run: `micro` micro-batches of `rows` rows in a step."""
        fixed = {
            "micro_batch_size": rows,
            "gradient_accumulation_steps": micro,
            "total_steps": self.plan.steps + PROFILED,
            "lr": GENTLE * load_config(config).training.lr,
            "warmup_steps": self.plan.steps,
            "log_interval": 1,
            "eval_interval": NEVER,
            "sample_interval": NEVER,
            "save_interval": NEVER,
            "dist_timeout_s": 120,
            "save_dir": self.work / name,
        }
        overrides = [f"training.{k}={v}" for k, v in (fixed | training).items()]
        return [*overrides, f"data.train_data_path={self.data(config)}"]

    def speed_job(self, name: str, micro: int, parallel: str = "ddp", **changed) -> Job:
        """A run of the measured configuration, its last steps in the profiler."""
        plan = self.plan
        window = {"profile_start": plan.steps + 1, "profile_steps": PROFILED}
        overrides = self.settings(
            name, plan.config, plan.rows, micro, parallel=parallel, **window
        )
        return Job(plan.config, overrides, **changed)

    def loss_job(self, name: str, micro: int) -> Job:
        """A run of the measured configuration on one GPU, for its losses alone."""
        plan = self.plan
        overrides = self.settings(name, plan.config, plan.rows, micro)
        return Job(plan.config, overrides)

    def small_job(self, name: str, micro: int, parallel: str = "ddp", **changed) -> Job:
        """A run of the small configuration in float32."""
        small = self.plan.small
        overrides = self.settings(name, small, SMALL_ROWS, micro, parallel=parallel)
        return Job(small, [*overrides, *EXACT], **changed)

    def launch(self, gpus: int, jobs: list[Job], exchanges: Iterable[int] = ()) -> None:
        """Do jobs with as many processes as GPUs.

        Raises: Failed with the last words of the first that ends badly.
        """
        self.launches += 1
        file = self.work / f"jobs{self.launches}.json"
        asked = {"jobs": [asdict(job) for job in jobs], "exchanges_mb": [*exchanges]}
        file.write_text(json.dumps(asked), encoding="utf-8")
        log = file.with_suffix(".log")
        begin = time.monotonic()
        process = start(gpus, ["mamba3lite.training.timed", str(file)], log)
        # One that hangs must leave time for the others.
        most = min(self.left(), MOST_OF_ALL * self.plan.seconds)
        try:
            code = process.wait(timeout=max(1.0, most))
        except subprocess.TimeoutExpired:
            end_all(process)
            raise Failed(f"it had not ended after {most:.0f} s") from None
        self.say(f"{gpus} GPUs, {len(jobs)} runs: {time.monotonic() - begin:.0f} s")
        if (rows := file.with_suffix(".exchanges")).exists():
            found = json.loads(rows.read_text(encoding="utf-8"))
            self.exchanges += [{"gpus": gpus} | row for row in found]
        if code:
            self.say(log.read_text(errors="replace")[-3000:])
            raise Failed(f"exit code {code}: {last_words(log)}")

    # ----------------------------------------------------------------------------------
    # What a run left

    def facts(self, name: str) -> dict | None:
        """The ``timed.json`` of a run; None when it did not get there."""
        file = self.work / name / RESULT
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def steps(self, name: str) -> list[dict]:
        """The lines of the steps of a run that has come to its end."""
        if self.facts(name) is None:
            return []
        rows = read_metrics(self.work / name / "metrics.jsonl")
        return [row for row in rows if "loss" in row][: self.plan.steps]

    def collectives(self, name: str) -> dict | None:
        """What the profiler saw of a run on GPUs, a step; None elsewhere."""
        file = self.work / name / "profile" / "trace.json"
        if name not in self.profiles and file.exists():
            trace = json.loads(file.read_text(encoding="utf-8"))
            found = collectives_of(trace["traceEvents"], PROFILED)
            self.profiles[name] = found
        return self.profiles.get(name)


def _quiet(*progress: object) -> None:
    """No line a file."""


def start(gpus: int, module: list[str], log: Path) -> subprocess.Popen:
    """Start a module of the package in as many processes as GPUs."""
    command = [sys.executable]
    if gpus > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(gpus)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    threads = max(1, (os.cpu_count() or 1) // gpus)
    given = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("a", encoding="utf-8") as file:
        return subprocess.Popen(
            [*command, "-m", *module],
            stdout=file,
            stderr=file,
            env=given | os.environ,
        )


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def children_of(pid: int) -> list[int]:
    """Processes that a process has started and that still are there."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def ranks_of(torchrun: int) -> dict[int, int]:
    """Process ids of the ranks that a torchrun has started, by rank."""
    found = {}
    for pid in children_of(torchrun):
        with suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            for entry in entries:
                if entry.startswith(b"RANK="):
                    found[int(entry[5:])] = pid
    return found


def end_all(process: subprocess.Popen) -> None:
    """Kill a torchrun and its ranks, which have process groups of their own."""
    for pid in [*children_of(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def last_words(log: Path) -> str:
    """Why a run ended: the line that a rank wrote itself, or its exception."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    told = [
        line
        for line in lines
        if re.search(r": rank \d|^(\[rank\d]: )?[\w.]+Error", line)
    ]
    return (told or lines[-1:] or ["nothing was written"])[0][:300]


# --------------------------------------------------------------------------------------
# Reading a profile

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same points of time as spans in order that do not touch."""
    merged: list[list[float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end) for begin, end in merged]


def length(spans: Iterable[Span]) -> float:
    """Time covered by spans."""
    return sum(end - begin for begin, end in union(spans))


def collectives_of(events: list[dict], steps: int) -> dict[str, Any] | None:
    """Milliseconds a step of collective operations in a trace of rank 0's GPU.

    span: from the first kernel to the last. busy: some kernel runs. collective: one of
    NCCL runs, waiting for other ranks included. exposed: one of NCCL runs and none that
    computes. by_name: sums, kernel by kernel. None for a trace without GPU kernels.
    """
    places = ("kernel", "gpu_memcpy", "gpu_memset")
    on_gpu = [e for e in events if e.get("cat") in places and "dur" in e]
    if not on_gpu:
        return None
    nccl, computing, by_name = [], [], {}
    for event in on_gpu:
        span = (event["ts"], event["ts"] + event["dur"])
        if "nccl" not in event["name"].lower():
            computing.append(span)
            continue
        nccl.append(span)
        name = event["name"].partition("(")[0]
        by_name[name] = by_name.get(name, 0.0) + event["dur"] / 1e3 / steps
    every = nccl + computing
    whole = max(end for _, end in every) - min(begin for begin, _ in every)
    a_step = {
        "span_ms": whole,
        "busy_ms": length(every),
        "collective_ms": length(nccl),
        "exposed_ms": length(every) - length(computing),
    }
    return {key: us / 1e3 / steps for key, us in a_step.items()} | {"by_name": by_name}


# --------------------------------------------------------------------------------------
# The parts, the most important one first


def one_gpu(bench: Bench) -> None:
    """Speed on one GPU, and the losses that several are held against."""
    jobs = [bench.loss_job(f"alone-for-{n}", n) for n in bench.plan.several]
    bench.launch(1, [bench.speed_job("speed-1-alone", 1), *jobs])


def several_gpus(bench: Bench, gpus: int, kind: str) -> None:
    """Speed on several GPUs; with FSDP2 a checkpoint too."""
    saving = {"saves": True, "reload": True} if kind == "fsdp2" else {}
    job = bench.speed_job(f"speed-{gpus}-{kind}", gpus, kind, **saving)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bench.launch(gpus, [job], EXCHANGES_MB[device] if kind == "ddp" else ())


def small_alone(bench: Bench) -> None:
    """The float32 losses of one GPU with the global batch of several."""
    several = bench.plan.several
    bench.launch(1, [bench.small_job(f"small-1-for-{n}", n) for n in several])


def small_together(bench: Bench, gpus: int) -> None:
    """The float32 losses of several GPUs, and the first third of a resumed run."""
    jobs = [bench.small_job(f"small-{gpus}-{kind}", gpus, kind) for kind in KINDS]
    if gpus == max(bench.plan.several):
        jobs.append(resumed(bench, gpus, bench.plan.steps // 3))
    bench.launch(gpus, jobs)


def resumed(bench: Bench, gpus: int, stop_at: int | None) -> Job:
    """A piece of the run that changes its number of GPUs twice."""
    return bench.small_job(
        "resumed", gpus, "fsdp2", resume="auto", saves=True, stop_at=stop_at
    )


def resume_elsewhere(bench: Bench) -> None:
    """Go on with fewer GPUs, and to the end with all of them again."""
    most = max(bench.plan.several)
    if bench.facts("resumed") is None:
        raise Failed(f"its first third belongs to the part float32, {most} GPUs")
    bench.launch(fewer(most), [resumed(bench, most, 2 * bench.plan.steps // 3)])
    bench.launch(most, [resumed(bench, most, None)])


def fewer(gpus: int) -> int:
    """The number of GPUs in the middle of the resumed run: 8 goes to 2, 2 to 1."""
    return max(1, gpus // 4)


def dead_rank(bench: Bench) -> dict[str, Any]:
    """Kill the last rank of a run in a step; what the others do.

    Returns: seconds until they were gone, the exit code of torchrun, the reason they
    gave, the checkpoints that are there and the faults that `verify` finds in them.
    """
    gpus, run_dir = max(bench.plan.several), bench.work / "killed"
    shape = {"total_steps": NEVER, "save_interval": 10, "dist_timeout_s": PATIENCE_S}
    overrides = bench.settings("killed", bench.plan.small, SMALL_ROWS, gpus, **shape)
    command = ["mamba3lite.training.pretrain", "--config", bench.plan.small]
    command += [w for item in [*overrides, *EXACT] for w in ("--set", item)]
    log = bench.work / "killed.log"
    torchrun = start(gpus, command, log)
    try:
        wait_for_step(torchrun, run_dir / "metrics.jsonl", 12, bench.left(), log)
        ranks = ranks_of(torchrun.pid)
        victim = gpus - 1
        os.kill(ranks[victim], signal.SIGKILL)
        begin = time.monotonic()
        rest = [pid for rank, pid in ranks.items() if rank != victim]
        while set(rest) & set(children_of(torchrun.pid)):
            if time.monotonic() - begin > PATIENCE_S + 60:
                raise Failed("the other ranks did not end")
            time.sleep(0.05)
        gone = time.monotonic() - begin
        code = torchrun.wait(timeout=90)
    finally:
        end_all(torchrun)
    sound: list[str] = []
    faults = verify_folder(run_dir, sound.append)
    return {
        "gpus": gpus,
        "killed_rank": victim,
        "dist_timeout_s": PATIENCE_S,
        "others_gone_s": gone,
        "torchrun_exit_code": code,
        "said": last_words(log),
        "sound_checkpoints": len(sound),
        "faults": faults,
    }


def wait_for_step(
    process: subprocess.Popen, metrics: Path, step: int, seconds: float, log: Path
) -> None:
    """Until a run has come to a step. Raises: Failed when it ends or takes too long."""
    end = time.monotonic() + seconds
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        if process.poll() is not None:
            raise Failed(f"exit code {process.returncode}: {last_words(log)}")
        if time.monotonic() > end:
            raise Failed("the time for all measurements was over")
        time.sleep(0.02)


# --------------------------------------------------------------------------------------
# The report


def speed_row(bench: Bench, gpus: int, kind: str) -> dict[str, Any] | None:
    """The numbers of one run: medians over its steps after the warm-up."""
    name = f"speed-{gpus}-{kind}"
    facts, steps = bench.facts(name), bench.steps(name)
    if facts is None:
        return None
    timed = steps[min(WARM_UP, len(steps) // 2) :]
    rates = [row["tokens_per_s"] for row in timed]
    mfus = [row["mfu"] for row in timed if row["mfu"] is not None]
    rate = statistics.median(rates)
    tokens = steps[0]["tokens"]
    tenths = statistics.quantiles([tokens / r * 1e3 for r in rates], n=10)
    return {
        "gpus": gpus,
        "parallel": kind,
        "tokens_per_step": tokens,
        "tokens_per_s": rate,
        "mfu": statistics.median(mfus) if mfus else None,
        "step_ms": tokens / rate * 1e3,
        "step_ms_low": tenths[0],
        "step_ms_high": tenths[-1],
        "timed_steps": len(rates),
        "peak_gb": max(facts["peak_bytes"]) / 1e9,
        "dispatch": facts["dispatch"],
        "collectives": bench.collectives(name),
    }


def speed_rows(bench: Bench) -> list[dict[str, Any]]:
    """Every run that was timed, with its efficiency against one GPU."""
    pairs = [(1, "alone"), *((n, kind) for n in bench.plan.several for kind in KINDS)]
    rows = [row for pair in pairs if (row := speed_row(bench, *pair))]
    if rows and rows[0]["gpus"] == 1:
        for row in rows:
            ideal = row["gpus"] * rows[0]["tokens_per_s"]
            row["efficiency"] = row["tokens_per_s"] / ideal
    return rows


def same_loss(bench: Bench) -> list[dict[str, Any]]:
    """Losses of several GPUs against those of one, with the same global batch."""
    rows = []
    for n in bench.plan.several:
        for kind in KINDS:
            pairs = [(f"speed-{n}-{kind}", f"alone-for-{n}", bench.plan.config)]
            pairs += [(f"small-{n}-{kind}", f"small-1-for-{n}", bench.plan.small)]
            for name, alone, config in pairs:
                named = {"gpus": n, "parallel": kind, "config": config}
                if found := compared(bench, name, alone):
                    rows.append(named | found)
    return rows


def compared(bench: Bench, name: str, other: str) -> dict[str, Any] | None:
    """The largest relative difference between the losses of two runs; None without."""
    left, right = bench.steps(name), bench.steps(other)
    if not left or not right:
        return None
    losses = [row["loss"] for row in left], [row["loss"] for row in right]
    apart = [abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)]
    precision = bench.facts(name)["precision"]
    return {
        "precision": precision,
        "steps": len(apart),
        "largest": max(apart),
        "at_step": 1 + apart.index(max(apart)),
        "limit": LIMITS[precision],
        "losses": losses[0],
        "losses_alone": losses[1],
    }


def resume_row(bench: Bench) -> dict[str, Any] | None:
    """The run that changed its number of GPUs against the one that did not."""
    if not bench.plan.several:
        return None
    most = max(bench.plan.several)
    facts = bench.facts("resumed")
    if facts is None or facts["last_step"] < bench.plan.steps:
        return None
    found = compared(bench, "resumed", f"small-{most}-fsdp2")
    third = bench.plan.steps // 3
    return found and {
        "gpus": [most, fewer(most), most],
        "stopped_at": [third, 2 * bench.plan.steps // 3],
        "parallel": "fsdp2",
        "config": bench.plan.small,
        **found,
    }


def checkpoint_rows(bench: Bench) -> list[dict[str, Any]]:
    """Seconds to save and to resume with FSDP2."""
    keys = ("checkpoint_bytes", "save_s", "find_s", "load_s")
    rows = []
    for n in bench.plan.several:
        facts = bench.facts(f"speed-{n}-fsdp2") or {}
        if "load_s" in facts:
            rows.append({"gpus": n, "parallel": "fsdp2"} | {k: facts[k] for k in keys})
    return rows


def not_here(plan: Plan) -> list[dict[str, Any]]:
    """The numbers of GPUs that were asked for and are not here."""
    return [
        {"part": f"{n} GPUs", "reason": f"this machine has {plan.here}"}
        for n in plan.gpus
        if n > plan.here
    ]


def parts_of(bench: Bench) -> list[tuple[str, Callable[[], dict | None]]]:
    """What is run, by name, in the order in which it is wanted."""
    several = bench.plan.several
    parts: list[tuple[str, Callable[[], dict | None]]] = [
        ("1 GPU", lambda: one_gpu(bench))
    ]
    for kind in KINDS:
        for n in several:
            run = lambda n=n, kind=kind: several_gpus(bench, n, kind)  # noqa: E731
            parts.append((f"{n} GPUs, {kind}", run))
    if several:
        parts.append(("a rank is killed", lambda: dead_rank(bench)))
        parts.append(("float32, 1 GPU", lambda: small_alone(bench)))
        for n in reversed(several):
            run = lambda n=n: small_together(bench, n)  # noqa: E731
            parts.append((f"float32, {n} GPUs", run))
        parts.append(("resume with another number", lambda: resume_elsewhere(bench)))
    return parts


def check_only(plan: Plan) -> None:
    """Refuse a word that is in the name of no part."""
    names = [name for name, _ in parts_of(Bench(plan, Path(), print))]
    for word in plan.only:
        if not any(word in name for name in names):
            there = "; ".join(names)
            raise typer.BadParameter(f"--only {word!r}: the parts here are {there}")


def measure(
    plan: Plan,
    work: Path,
    say: Callable[[str], None] = print,
    save: Callable[[dict], None] = lambda report: None,
) -> dict[str, Any]:
    """Run every part of a plan; returns what `--json` writes.

    Args: save: called with what is there after each part.
    """
    bench = Bench(plan, work, say)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = head_of(plan, device)
    for name, run in parts_of(bench):
        say(f"{name} ({bench.left():.0f} s left)")
        try:
            if plan.only and not any(word in name for word in plan.only):
                raise Failed("left out by --only")
            if bench.left() <= 0:
                raise Failed("the time for all measurements was over")
            report["dead_rank"] = run() or report["dead_rank"]
        except Failed as error:
            report["not_run"].append({"part": name, "reason": str(error)})
            say(f"{name}: not measured: {error}")
        # A part that breaks for a reason of its own takes no other with it.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            report["not_run"].append({"part": name, "reason": reason[:300]})
            say(traceback.format_exc(limit=-4))
        report |= found_by(bench)
        save(report)
    return report


def head_of(plan: Plan, device: torch.device) -> dict[str, Any]:
    """What the numbers belong to, and what cannot be run."""
    names = ("NCCL_", "ENABLE_TRITON_KERNELS", "OMP_NUM_THREADS")
    found = versions()
    if device.type == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "format": FORMAT,
        "kind": "scaling",
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", "mamba3lite.scaling", *sys.argv[1:]]),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(names)
        },
        "device": this_machine(device) | {"gpus": plan.here},
        "versions": found,
        "plan": asdict(plan) | {"small_rows": SMALL_ROWS, "warm_up": WARM_UP},
        "not_run": not_here(plan),
        "dead_rank": None,
    }


def found_by(bench: Bench) -> dict[str, Any]:
    """All that the runs so far have to say."""
    facts = bench.facts("speed-1-alone") or {}
    sizes = ("parameters", "gradient_bytes", "matrix_parameters", "flops_per_token")
    return {
        "model": {key: facts[key] for key in sizes if key in facts},
        "rows": speed_rows(bench),
        "exchanges": bench.exchanges,
        "checkpoints": checkpoint_rows(bench),
        "same_loss": same_loss(bench),
        "resumed": resume_row(bench),
    }


def lines_of(report: dict[str, Any]) -> list[str]:
    """The report as the reader sees it last."""
    lines = []
    for row in report["rows"]:
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        efficiency = row.get("efficiency")
        share = "-" if efficiency is None else f"{efficiency:.1%}"
        lines.append(
            f"{row['gpus']} {row['parallel']}: {row['tokens_per_s']:,.0f} tokens/s, "
            f"{row['step_ms']:.1f} ms a step, MFU {mfu}, {row['peak_gb']:.1f} GB, "
            f"efficiency {share}, {row['collectives']}"
        )
    kept = ("losses", "losses_alone")
    for section in ("exchanges", "checkpoints", "same_loss", "not_run"):
        for row in report[section]:
            shown = {key: value for key, value in row.items() if key not in kept}
            lines.append(f"{section}: {shown}")
    resumed_run = report["resumed"] or {}
    shown = {key: value for key, value in resumed_run.items() if key not in kept}
    return [*lines, f"resumed: {shown}", f"dead rank: {report['dead_rank']}"]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=Command)
def main(
    config: Annotated[
        str, typer.Option(help="The configuration whose speed is measured.")
    ] = "pretrain_434m",
    small: Annotated[
        str,
        typer.Option(help="That of the float32 losses, the resumed and killed runs."),
    ] = "small_gpu",
    source: Annotated[
        str, typer.Option(help="The text to train on, as for prepare.")
    ] = "stdlib",
    rows: Annotated[int, typer.Option(help="Rows of a micro-batch.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Steps of a run.", min=6)] = 50,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "1,2,4,8",
    seconds: Annotated[
        float,
        typer.Option(help="For everything; what does not fit is not run.", min=1),
    ] = 3600,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only parts whose name has this in it, and may be given again: "
            "'1 GPU', ddp, fsdp2, killed, float32, resume."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all numbers to this file.")
    ] = None,
) -> None:
    """Measure training on the GPUs of this host, and check that it stays the same."""
    here = torch.cuda.device_count() or os.cpu_count() or 1
    try:
        words = gpus.split(",")
        if not all(word.isdecimal() and int(word) for word in words):
            raise ValueError(f"--gpus {gpus}: wants numbers from 1 on, as 1,2,4,8")
        wanted = tuple(sorted({int(word) for word in words} | {1}))
        for name in (config, small):
            load_config(name)
        require_source(source)
    except (ValueError, ConfigError) as error:  # a DataError is the former
        raise typer.BadParameter(str(error)) from None
    if json_file:
        check_new_file(json_file, "--json")

    sizes = (rows, steps, wanted, here, seconds)
    plan = Plan(config, small, source, *sizes, tuple(only or ()))
    check_only(plan)

    def save(report: dict) -> None:
        if json_file:
            text = json.dumps(report, indent=1) + "\n"
            write_whole(json_file, text)

    with tempfile.TemporaryDirectory() as work:
        report = measure(plan, Path(work), lambda line: print(line, flush=True), save)
    print("\n".join(lines_of(report)))
    found = ("rows", "same_loss", "resumed", "dead_rank")
    if not any(report[section] for section in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
