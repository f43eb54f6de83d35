"""The measurement of several GPUs: what it runs, how it reads it, what it derives."""

import json
import runpy
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from fault_cases import in_child, on_cpu
from rank_cases import in_ranks
from trainer_cases import MODEL, write_corpus
from typer.testing import CliRunner

from mamba3lite import communication, scaling
from mamba3lite.scaling import Bench, Plan
from mamba3lite.training import timed

# --------------------------------------------------------------------------------------
# Spans and traces, by hand


def test_spans_by_hand():
    spans = [(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (6.0, 6.5)]
    assert scaling.union(spans) == [(0.0, 3.0), (5.0, 7.0)]
    assert scaling.length(spans) == 5.0
    assert scaling.union([]) == [] and scaling.length([]) == 0


def event(name: str, begin: float, duration: float, where: str = "kernel") -> dict:
    return {"name": name, "ts": begin, "dur": duration, "cat": where}


def test_collectives_of_a_trace_by_hand():
    events = [
        event("gemm", 0, 4000),
        event("gemm", 6000, 2000),
        event("Memcpy DtoH", 9000, 1000, "gpu_memcpy"),
        # 2 ms beside the first product, 2 ms alone; then 1 ms within the second.
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 2000, 4000),
        event("ncclDevKernel_AllGather_RING_LL(args)", 6500, 1000),
        event("aten::mm", 0, 90000, "cpu_op"),
        {"name": "a marker", "ts": 3, "cat": "kernel"},
    ]
    found = scaling.collectives_of(events, steps=2)
    assert found.pop("by_name") == {
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": 2.0,
        "ncclDevKernel_AllGather_RING_LL": 0.5,
    }
    assert found == {
        "span_ms": 5.0,
        "busy_ms": 4.5,
        "collective_ms": 2.5,
        "exposed_ms": 1.0,
    }
    assert scaling.collectives_of([event("aten::mm", 0, 1, "cpu_op")], 1) is None


# --------------------------------------------------------------------------------------
# Communication against compute, by hand

SIZES = {"gradient_bytes": 1_700_000_000, "matrix_parameters": 420_000_000}


def test_bytes_sent_by_hand():
    assert communication.sent_bytes("ddp", 8, SIZES) == (0.0, 2 * 7 / 8 * 1.7e9)
    # 0.42e9 matrices, 2 bytes gathered twice and 4 scattered; 20 MB of the rest.
    forward, backward = communication.sent_bytes("fsdp2", 8, SIZES)
    assert forward == pytest.approx(7 / 8 * 0.84e9)
    assert backward == pytest.approx(7 / 8 * (0.84e9 + 1.68e9 + 2 * 20e6))


def test_a_line_of_the_table_by_hand():
    link = communication.Link("a link", 17.5)
    row = communication.row_of("ddp", 8, link, 100.0, SIZES)
    assert row.exchange_ms == pytest.approx(170), "2.975e9 bytes at 17.5e9 a second"
    assert row.sent_gb == pytest.approx(2.975)
    assert row.ratio == pytest.approx(1.7)
    assert row.one_by_one == pytest.approx(100 / 270)
    # Two thirds of the step are backward: 66.7 of the 170 ms are hidden.
    assert row.overlapped == pytest.approx(100 / (100 + 170 - 200 / 3))
    fast = communication.row_of("ddp", 8, communication.NVLINK, 100.0, SIZES)
    assert fast.overlapped == 1.0 and fast.one_by_one == pytest.approx(1 / 1.0661, 1e-4)


def test_the_table_has_each_network_and_needs_one_gpu():
    report = {"rows": [{"gpus": 1, "step_ms": 150.0}], "model": SIZES}
    rows = communication.table_of(report)
    assert [row.gpus for row in rows] == [8, 8, *[64] * 4, *[512] * 4]
    assert {row.link for row in rows if row.gpus == 8} == {communication.NVLINK.name}
    slow = [row for row in rows if row.link == communication.NETWORKS[1].name]
    assert all(row.overlapped < 0.9 for row in slow), "one slow card a host holds back"
    assert communication.table_of({"rows": [{"gpus": 2}], "model": SIZES}) == []


def test_the_script_prints_the_table(tmp_path, capsys):
    file = tmp_path / "a.json"
    report = {"rows": [{"gpus": 1, "step_ms": 150.0}], "model": SIZES}
    file.write_text(json.dumps(report))
    communication.main(file)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and lines[1].split()[:2] == ["8", "ddp"]
    assert lines[1].split()[-4:] == ["6.6", "4.4%", "95.8%", "100.0%"]


@pytest.mark.parametrize(
    "text",
    ["5", "[]", '{"rows": 1}', '{"rows": [{"gpus": 1, "step_ms": 0}], "model": {}}',
     '{"rows": [{"gpus": 1, "step_ms": "x"}], "model": {}}', "[" * 100_000, "\0",
     json.dumps({"rows": [{"gpus": 1, "step_ms": 0}], "model": SIZES})],
)  # fmt: skip
def test_a_file_of_something_else_is_one_line(tmp_path, monkeypatch, text):
    file = tmp_path / "\x1b[31m.json"
    file.write_text(text)
    monkeypatch.setattr("sys.argv", ["communication", str(file)])
    monkeypatch.delitem(sys.modules, "mamba3lite.communication")
    with pytest.raises(SystemExit) as end:
        runpy.run_module("mamba3lite.communication", run_name="__main__")
    said = r"\x1b[31m.json: is not what `python -m mamba3lite.scaling` writes"
    assert end.value.code == f"{tmp_path}/{said}"


# --------------------------------------------------------------------------------------
# The plan, and what is said of what cannot be run


def plan_of(config: str, source: str, **changed) -> Plan:
    fixed = {"rows": 2, "steps": 50, "gpus": (1, 2, 4), "here": 2, "seconds": 300.0}
    return Plan(config, config, source, **fixed | changed)


def test_what_is_not_here_is_listed_and_never_run():
    plan = plan_of("a.yaml", "text", gpus=(1, 2, 4, 8))
    assert plan.several == [2]
    assert [row["part"] for row in scaling.not_here(plan)] == ["4 GPUs", "8 GPUs"]
    assert scaling.not_here(plan)[0]["reason"] == "this machine has 2"
    assert [scaling.fewer(n) for n in (8, 4, 2)] == [2, 1, 1]


def test_without_time_every_part_is_listed_as_not_run(tmp_path):
    saved = []
    plan = plan_of("tiny", "stdlib", seconds=0.0)
    report = scaling.measure(plan, tmp_path, lambda line: None, saved.append)
    reasons = {row["part"]: row["reason"] for row in report["not_run"]}
    assert reasons["4 GPUs"] == "this machine has 2"
    assert reasons["1 GPU"] == "the time for all measurements was over"
    assert len(reasons) == len(saved) + 1, "saved after every part"
    assert report["rows"] == [] and report["same_loss"] == []


def test_only_the_parts_that_were_asked_for_are_run(tmp_path, monkeypatch):
    launched = []
    monkeypatch.setattr(Bench, "launch", lambda self, gpus, *_: launched.append(gpus))
    plan = plan_of("tiny", str(write_corpus(tmp_path / "text")))
    for only, runs in ((("float32",), [1, 2]), (("resume", "word"), []), ((), [1, 2])):
        launched.clear()
        monkeypatch.setattr(scaling, "dead_rank", lambda bench: {"gpus": 2})
        report = scaling.measure(
            replace(plan, only=only), tmp_path, lambda line: None, lambda part: None
        )
        left = {r["part"] for r in report["not_run"] if r["reason"].startswith("left")}
        assert sorted({*launched}) == runs, only
        assert ("1 GPU" in left) == bool(only)
        assert (report["dead_rank"] is None) == bool(only)
    resumed = [r["reason"] for r in report["not_run"] if "resume" in r["part"]]
    assert resumed == ["its first third belongs to the part float32, 2 GPUs"]


def test_a_part_that_breaks_takes_no_other_with_it(tmp_path, monkeypatch):
    def broken(self, gpus, jobs, exchanges=()):
        raise KeyError(gpus)

    monkeypatch.setattr(Bench, "launch", broken)
    monkeypatch.setattr(scaling, "dead_rank", lambda bench: {"gpus": 2})
    text = str(write_corpus(tmp_path / "text"))
    said = []
    report = scaling.measure(plan_of("tiny", text), tmp_path, said.append)
    assert report["dead_rank"] == {"gpus": 2}
    assert {"part": "1 GPU", "reason": "KeyError: 1"} in report["not_run"]
    assert any("Traceback" in line for line in said)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--gpus", "1,two"], "two"),
        (["--config", "gone.yaml"], "gone.yaml"),
        (["--source", "stdlib+gone"], "source: got 'gone', wanted stdlib, "),
        (["--json", "there.json"], "there.json exists"),
        (
            ["--only", "1 GPU", "--only", "xyz"],
            "--only 'xyz': the parts here are 1 GPU",
        ),
    ],
)
def test_a_mistake_is_named_before_anything_runs(
    tmp_path, monkeypatch, arguments, complaint
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scaling, "measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "there.json").write_text("{}")
    result = CliRunner().invoke(scaling.app, arguments)
    assert result.exit_code == 2 and complaint in " ".join(result.output.split())


def test_why_a_run_ended_is_found_in_its_log(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("step 1\nx: rank 0: another rank died\nTraceback\nValueError: b\n")
    assert scaling.last_words(log) == "x: rank 0: another rank died"
    log.write_text("step 1\n[rank1]: ValueError: b\nmore\n")
    assert scaling.last_words(log) == "[rank1]: ValueError: b"
    log.write_text("")
    assert scaling.last_words(log) == "nothing was written"


def test_the_median_leaves_out_the_warm_up(tmp_path):
    bench = Bench(plan_of("tiny", "stdlib"), tmp_path, print)
    folder = tmp_path / "speed-1-alone"
    folder.mkdir()
    facts = {"peak_bytes": [3e9, 5e9], "dispatch": "fused"}
    (folder / timed.RESULT).write_text(json.dumps(facts))
    rates = [1.0] * 10 + [float(n) for n in range(100, 140)] + [7.0, 7.0]
    rows = [
        {"step": n, "tokens": 64 * n, "loss": 2.0, "tokens_per_s": rate, "mfu": rate}
        for n, rate in enumerate(rates, 1)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    row = scaling.speed_row(bench, 1, "alone")
    middle = statistics.median(range(100, 140))
    assert (row["tokens_per_s"], row["mfu"]) == (middle, middle)
    assert (row["timed_steps"], row["tokens_per_step"]) == (40, 64)
    assert row["step_ms"] == pytest.approx(64 / middle * 1e3)
    assert row["peak_gb"] == 5.0, "of the rank that needs most"


def test_the_processes_of_a_torchrun_are_found_and_ended():
    script = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', "
    script += "'import time; time.sleep(60)'], env={'RANK': '1'}); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", script])
    end = time.monotonic() + 20
    while not (found := scaling.ranks_of(parent.pid)):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert [*found] == [1]
    scaling.end_all(parent)
    assert parent.returncode == -signal.SIGKILL
    while Path(f"/proc/{found[1]}/stat").exists():
        if ") Z " in Path(f"/proc/{found[1]}/stat").read_text():
            break
        assert time.monotonic() < end
        time.sleep(0.02)


# --------------------------------------------------------------------------------------
# From end to end, with gloo


def forked(self: Bench, gpus: int, jobs: list, exchanges=()) -> None:
    """`Bench.launch` without the seconds that torchrun and its imports take."""
    self.launches += 1
    file = self.work / f"jobs{self.launches}.json"
    asked = {"jobs": [asdict(job) for job in jobs], "exchanges_mb": [*exchanges]}
    file.write_text(json.dumps(asked))

    def action(rank: int) -> int:
        timed.main(file)
        return 0

    if gpus == 1:
        ended = in_child(lambda: action(0))
        assert ended.code == 0, ended
    else:
        ended = in_ranks(action, gpus)
        assert [end.code for end in ended] == [0] * gpus, ended
    if (rows := file.with_suffix(".exchanges")).exists():
        self.exchanges += [{"gpus": gpus} | r for r in json.loads(rows.read_text())]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What is measured of a small model with two processes of this CPU."""
    base = tmp_path_factory.mktemp("scaling")
    raw = {"model": MODEL, "training": {"total_steps": 1, "lr": 1e-2}, "data": {}}
    raw["data"] = {"source": "stdlib", "tokenizer": "byte"}
    (base / "a.yaml").write_text(yaml.safe_dump(raw))
    text = write_corpus(base / "text", documents=60, words=200)
    (base / "work").mkdir()
    plan = plan_of(str(base / "a.yaml"), str(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "launch", forked)
        patch.setenv("OMP_NUM_THREADS", "1")
        return scaling.measure(plan, base / "work", print)


@on_cpu
@pytest.mark.slow
def test_two_ranks_measured_from_end_to_end(report):
    assert [row["part"] for row in report["not_run"]] == ["4 GPUs"], report["not_run"]
    names = [(row["gpus"], row["parallel"]) for row in report["rows"]]
    assert names == [(1, "alone"), (2, "ddp"), (2, "fsdp2")]
    # Weak scaling: the same rows for each, and so twice the tokens in a step of two.
    assert [row["tokens_per_step"] for row in report["rows"]] == [64, 128, 128]
    assert len(report["same_loss"]) == 4
    for row in report["same_loss"]:
        assert row["steps"] == 50 and row["precision"] == "fp32"
        assert row["largest"] <= row["limit"] == 1e-5, row
        assert row["losses"][-1] < row["losses"][0] - 0.1, "something was learned"


@on_cpu
@pytest.mark.slow
def test_two_ranks_then_one_then_two_end_with_the_same_losses(report):
    found = report["resumed"]
    assert found["gpus"] == [2, 1, 2] and found["stopped_at"] == [16, 33]
    assert found["steps"] == 50 and found["largest"] <= 1e-5


@on_cpu
@pytest.mark.slow
def test_a_killed_rank_ends_a_torchrun_and_leaves_sound_checkpoints(report):
    dead = report["dead_rank"]
    assert dead["others_gone_s"] < dead["dist_timeout_s"]
    assert dead["torchrun_exit_code"] == 1 and "another rank died" in dead["said"]
    assert dead["sound_checkpoints"] >= 2 and dead["faults"] == []


@on_cpu
@pytest.mark.slow
def test_sizes_and_checkpoints_of_the_measured_model(report):
    sizes = report["model"]
    # A, complex, has a real and an imaginary part for each head and layer.
    complex_numbers = MODEL["n_heads"] * MODEL["n_layers"]
    numbers = sizes["parameters"] + complex_numbers
    assert sizes["gradient_bytes"] == 4 * numbers
    assert 0.9 * sizes["parameters"] < sizes["matrix_parameters"] < sizes["parameters"]
    (saved,) = report["checkpoints"]
    assert saved["checkpoint_bytes"] > 12 * sizes["parameters"]
    assert min(saved[key] for key in ("save_s", "find_s", "load_s")) > 0
    (exchange,) = report["exchanges"]
    assert exchange["bus_gb_s"] == pytest.approx(2**20 / exchange["ms"] / 1e6)
