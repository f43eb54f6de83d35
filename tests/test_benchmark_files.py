"""Benchmark files are whole, and the page shows each of them."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trainer_cases import write_config

from mamba3lite import bench
from mamba3lite.bench_command import PARTS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/benchmarks"
FILES = sorted(  # those of tools/gate.py have their check in test_gate.py
    path for path in FOLDER.glob("*.json") if not path.name.endswith("-gate.json")
)
PASSES = ("forward", "forward_backward")

_spec = importlib.util.spec_from_file_location("site_hook", ROOT / "tools/site_hook.py")
site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site)


def numbers(value: object, path: str) -> Iterator[tuple[str, float]]:
    """Every number below a JSON value, with the way to it; true and false are none."""
    if isinstance(value, bool):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from numbers(inner, f"{path}[{index}]")
    elif isinstance(value, int | float):
        yield path, value


COMMANDS = {
    None: r"(python -m mamba3lite\.bench|mamba3lite bench)( |$)",
    "scaling": r"python -m mamba3lite\.scaling( |$)",
}


def report_faults(report: dict) -> list[str]:
    """What a benchmark file lacks, or says twice in different ways."""
    faults, kind = [], report.get("kind")
    if report.get("format") != bench.FORMAT:
        faults.append(f"format is {report.get('format')}, not {bench.FORMAT}")
    try:
        date.fromisoformat(str(report.get("date")))
    except ValueError:
        faults.append(f"date is {report.get('date')}, not an ISO date")
    required = {"device": ["name"], "versions": ["python", "torch", "mamba3lite"]}
    for section, keys in required.items():
        faults += [
            f"{section}.{key} is missing"
            for key in keys
            if not report.get(section, {}).get(key)
        ]
    command = str(report.get("command", ""))
    if not re.match(COMMANDS[kind], command):
        faults.append(f"command is {command!r}, which starts no benchmark")
    faults += [f"command names a place of one machine: {w}" for w in command.split()
               if w.startswith(("/", "~"))]  # fmt: skip
    if "decode" in report:
        return faults + decode_faults(report)
    if not report.get("rows") and (kind or not report.get("model")):
        return [*faults, "no rows"]
    if kind == "scaling":
        return faults + scaling_faults(report)
    for section in ("ceilings", "rows", "ratios", "launches", "model"):
        faults += [
            f"{path} is {value}, not a finite positive number"
            for path, value in numbers(report.get(section), section)
            if not (math.isfinite(value) and value > 0)
        ]
    faults += fused_launch_faults(report.get("fused_launches", []))
    faults += model_faults(report.get("model", []))
    return faults + time_faults(report) + ratio_faults(report)


def scaling_faults(report: dict) -> list[str]:
    """Numbers of several GPUs that are no measurement, or contradict each other."""
    named = ("model", "rows", "exchanges", "checkpoints")
    faults = [
        f"{path} is {value}, not a finite positive number"
        for section in named
        for path, value in numbers(report[section], section)
        if not (math.isfinite(value) and value >= 0)
        or (value == 0 and "collectives" not in path)
    ]
    first = report["rows"][0]
    for index, row in enumerate(report["rows"]):
        where = f"rows[{index}]"
        if row["mfu"] is not None and row["mfu"] >= 1:
            faults.append(f"{where}.mfu is {row['mfu']}, all of the device")
        tokens = row["tokens_per_s"] * row["step_ms"] / 1e3
        if not math.isclose(tokens, row["tokens_per_step"], rel_tol=1e-9):
            faults.append(f"{where}: {tokens} tokens a step by its time and speed")
        ideal = row["gpus"] * first["tokens_per_s"]
        share = row["tokens_per_s"] / ideal
        if first["gpus"] == 1 and not math.isclose(row["efficiency"], share):
            faults.append(f"{where}.efficiency is {row['efficiency']}, rows: {share}")
        if row["gpus"] > report["device"]["gpus"]:
            faults.append(f"{where}: more GPUs than the machine has")
    compared = report["same_loss"] + [report["resumed"]] * bool(report["resumed"])
    for row in compared:
        lengths = {row["steps"], len(row["losses"]), len(row["losses_alone"])}
        if len(lengths) > 1:
            faults.append(f"steps and losses are {lengths}")
        pairs = zip(row["losses"], row["losses_alone"], strict=False)
        largest = max(abs(a - b) / abs(b) for a, b in pairs)
        if row["largest"] != largest:
            faults.append(f"largest is {row['largest']}, the losses give {largest}")
    ran = {row["gpus"] for row in report["rows"]}
    said = {row["part"] for row in report["not_run"]}
    return faults + [
        f"{n} GPUs: neither a row nor a reason"
        for n in report["plan"]["gpus"]
        if n not in ran and not any(part.startswith(f"{n} GPU") for part in said)
    ]


def decode_faults(report: dict) -> list[str]:
    """Steps that no device could have had, and memory that grew."""
    faults = [
        f"{path} is {value}, not a finite positive number"
        for section in ("ceilings", "decode", "decode_memory")
        for path, value in numbers(report.get(section), section)
        if not (math.isfinite(value) and value > 0)
    ]
    sections = ("decode", "decode_memory", "decode_bits")
    if not any(report.get(section) for section in sections):
        faults.append("no rows")
    for index, row in enumerate(report["decode"]):
        where = f"decode[{index}]"
        for name in ("step_ms", "round_ms"):
            time = row[name]
            if not time["low"] <= time["median"] <= time["high"]:
                faults.append(f"{where}.{name}: the median is outside its percentiles")
        if row["step_ms"]["median"] < row["floor_ms"]:
            faults.append(f"{where}.step_ms: faster than its floor")
        rate = row["batch"] / row["step_ms"]["mean"] * 1e3
        if not math.isclose(row["tokens_per_s"], rate, rel_tol=1e-9):
            faults.append(f"{where}.tokens_per_s is not batch over mean")
    for index, row in enumerate(report.get("decode_memory", [])):
        if len(set(row["held_bytes"].values())) > 1:
            faults.append(f"decode_memory[{index}].held_bytes grows with the text")
    for index, row in enumerate(report.get("decode_bits", [])):
        where = f"decode_bits[{index}]"
        if row["exact"]["differ"] or row["alone"]["differ"]:
            faults.append(f"{where}: exact steps have other bits than a full forward")
        slower = row["launches"].get("training kernels")
        on_gpu = report["device"]["name"] != "CPU"
        if slower or (on_gpu and not row["launches"].get("chunk_scan_rows")):
            faults.append(f"{where}: exact steps without the row kernels")
    return faults


def fused_launch_faults(rows: list[dict]) -> list[str]:
    """Launches with neither a time nor the reason why they have none."""
    faults = []
    for index, row in enumerate(rows):
        where = f"fused_launches[{index}]"
        if ("ms" in row) == bool(row.get("fault")):
            faults.append(f"{where} has not one of ms and fault")
        faults += [
            f"{path} is {value}, not a finite positive number"
            for path, value in numbers(row.get("ms"), f"{where}.ms")
            if not (math.isfinite(value) and value > 0)
        ]
        if len(row["launch"]) != 5:
            faults.append(f"{where}.launch is {row['launch']}, not five numbers")
    return faults


MODEL_NUMBERS = ("step_ms", "tokens_per_s", "peak_gb", "first_loss", "last_loss")


def model_faults(rows: list[dict]) -> list[str]:
    """Rows of a model that lack a number, or use more than all of the device."""
    faults = []
    for index, row in enumerate(rows):
        missing = [name for name in MODEL_NUMBERS if row.get(name) is None]
        faults += [f"model[{index}].{name} is missing" for name in missing]
        if row.get("mfu") is not None and row["mfu"] >= 1:
            faults.append(f"model[{index}].mfu is {row['mfu']}, all of the device")
    return faults


def time_faults(report: dict) -> list[str]:
    """Percentiles out of order, and times that no device could have had."""
    faults = []
    for index, row in enumerate(report["rows"]):
        for name in PASSES:
            time, where = row[f"{name}_ms"], f"rows[{index}].{name}_ms"
            if not time["low"] <= time["median"] <= time["high"]:
                faults.append(f"{where}: the median is outside its percentiles")
            if time["median"] < row[f"{name}_floor_ms"]:
                faults.append(f"{where}: faster than its floor")
    return faults


def ratio_faults(report: dict) -> list[str]:
    """Ratios that the rows do not give, and pairs of rows that have no ratio."""
    medians = {
        (row["part"], row["precision"], row["version"], name): row[f"{name}_ms"][
            "median"
        ]
        for row in report["rows"]
        for name in PASSES
    }
    kernels = {part: bench.kernel_of(part, report["rows"]) for part in PARTS}
    wanted = {
        (part, precision, version, name): time
        / medians[part, precision, kernels[part], name]
        for (part, precision, version, name), time in medians.items()
        if version != kernels[part]
        and (part, precision, kernels[part], name) in medians
    }
    stated = {
        (r["part"], r["precision"], r["against"], name): r[name]
        for r in report.get("ratios", [])
        for name in PASSES
    }
    faults = [f"ratio {key} is missing" for key in wanted.keys() - stated.keys()]
    faults += [f"ratio {key} has no rows" for key in stated.keys() - wanted.keys()]
    return faults + [
        f"ratio {key} is {stated[key]}, the rows give {wanted[key]}"
        for key in wanted.keys() & stated.keys()
        if not math.isclose(stated[key], wanted[key], rel_tol=1e-9)
    ]


def placing_faults(page: str, names: list[str]) -> list[str]:
    """Files that the page does not show, and places of files that are not there."""
    shown = site.BENCHMARK.findall(page)
    faults = [f"{name} has no place on the page" for name in names if name not in shown]
    return faults + [f"{name} does not exist" for name in shown if name not in names]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_benchmark_file_is_whole(path):
    assert report_faults(json.loads(path.read_text(encoding="utf-8"))) == []


def test_the_page_shows_every_file():
    page = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert placing_faults(page, [path.name for path in FILES]) == []


@pytest.mark.parametrize("parts", [PARTS, ("scan",), ()], ids=len)
def test_what_the_benchmark_writes_is_whole_and_makes_tables(
    parts, monkeypatch, tmp_path
):
    monkeypatch.setattr("sys.argv", ["bench.py", "--json", "docs/benchmarks/x.json"])
    shape = bench.Shape(B=1, T=32, H=2, D=4, N=4, chunk=16)
    model = write_config(tmp_path / "c.yaml", tmp_path / "no-data", tmp_path)
    report = bench.run_bench(
        shape,
        shape,
        torch.device("cpu"),
        tune=False,
        peers=False,
        parts=parts,
        model=str(model),
        say=lambda line: None,
    )
    report = json.loads(json.dumps(report))
    assert report_faults(report) == []
    page = site.benchmark_markdown(report, "x.json")
    assert page.count("\n| `pytorch`,&nbsp;ieee |") == len({*parts} - {"block_bf16"})
    assert page.count("\n| `pytorch`,&nbsp;eager |") == 1
    assert ("errors at" in page) == bool(parts)


def test_bits_that_differ_are_a_fault():
    report = json.loads((FOLDER / "h200-decode-bits.json").read_text("utf-8"))
    assert {row["precision"] for row in report["decode_bits"]} == {"bf16", "tf32"}
    page = site.benchmark_markdown(report, "x.json")
    for cell in ("| 0 of 560 differ |", "| 0 of 210 differ |", "| 560 of 560 differ"):
        assert page.count(cell) == 6
    report["decode_bits"][1]["exact"]["differ"] = 1
    report["decode_bits"][2]["launches"]["training kernels"] = 28
    report["decode_bits"][3]["launches"] = {}
    found = [fault.partition(":")[0] for fault in report_faults(report)]
    assert found == [f"decode_bits[{i}]" for i in (1, 2, 3)]
    assert report_faults(report | {"decode_bits": []}) == ["no rows"]


def time(median: float) -> dict:
    return {"median": median, "low": 0.9 * median, "high": 1.2 * median, "runs": 50}


def row(
    part: str, version: str, forward: float, both: float, precision: str = "tf32"
) -> dict:
    return {
        "part": part,
        "version": version,
        "precision": precision,
        "forward_ms": time(forward),
        "forward_backward_ms": time(both),
        "forward_floor_ms": 0.05,
        "forward_backward_floor_ms": 0.15,
        "peak_mb": 812.4,
        "errors": {"Y_diag": 3.1e-4, "dX": 7.3e-4},
    }


def ratio(part: str, precision: str, against: str, once: float, both: float) -> dict:
    named = {"part": part, "precision": precision, "against": against}
    return named | {"forward": once, "forward_backward": both}


def model_row(dispatch: str, compiled: bool, step_ms: float, mfu: float | None) -> dict:
    return {
        "dispatch": dispatch,
        "compiled": compiled,
        "step_ms": step_ms,
        "tokens_per_s": 1e6 / step_ms,
        "mfu": mfu,
        "peak_gb": 3.25,
        "first_loss": 10.825,
        "last_loss": 7.5,
    }


def fused_launch(kernel: str, launch: list[int], ms: float) -> dict:
    named = {"kernel": kernel, "precision": "bf16", "launch": launch}
    return named | {"ms": time(ms)}


SIZES = {"B": 8, "T": 2048, "H": 16, "D": 64, "N": 64, "chunk": 64}
REPORT = {
    "format": 1,
    "date": "2026-11-29",
    "command": "python -m mamba3lite.bench --json docs/benchmarks/a.json",
    "device": {"name": "A GPU", "threads": 8, "capability": [9, 0]},
    "versions": {"python": "3.12", "torch": "2.11", "triton": None, "mamba3lite": "1"},
    "ceilings": {"copy_tb_s": 4.284, "fp32_tflop_s": 51.6},
    "shape": SIZES,
    "error_shape": SIZES | {"B": 2},
    "rows": [
        row("per_chunk", "einsum", 1.0, 3.0),
        row("per_chunk", "triton", 0.4, 2.4),
        row("block_fp32", "triton", 0.9, 3.2),
        row("block_fp32", "fused", 0.3, 0.8),
        row("block_bf16", "fused", 0.2, 0.6, "bf16"),
        row("block_bf16", "fla", 0.1, 0.9, "bf16"),
    ],
    "ratios": [
        ratio("per_chunk", "tf32", "einsum", 1.0 / 0.4, 3.0 / 2.4),
        ratio("block_fp32", "tf32", "triton", 0.9 / 0.3, 3.2 / 0.8),
        ratio("block_bf16", "bf16", "fla", 0.1 / 0.2, 0.9 / 0.6),
    ],
    "launches": [
        {"precision": p, "warps": w, "stages": 1, "forward_ms": time(ms)}
        for p, w, ms in [("ieee", 4, 0.8), ("tf32", 4, 0.4), ("ieee", 8, 0.7),
                         ("tf32", 8, 0.44)]
    ],
    "model": [
        model_row("pytorch", False, 8.0, None),
        model_row("fused", True, 0.5, 0.417),
    ],
    "fused_launches": [
        *(fused_launch("walk", [32, n, 4, 1, 0], ms)
          for n, ms in [(16, 0.9), (32, 0.5), (64, 0.8), (128, 0.6)]),
        fused_launch("backward", [0, 16, 8, 2, 168], 1.5),
        {"kernel": "backward", "precision": "bf16", "launch": [0, 64, 2, 3, 0],
         "fault": "out of resource: shared memory"},
    ],
}  # fmt: skip


def test_a_whole_report_has_no_faults():
    assert report_faults(REPORT) == []


@pytest.mark.parametrize("start", ["python -m mamba3lite.bench", "mamba3lite bench"])
def test_either_start_is_a_command(start):
    assert report_faults(REPORT | {"command": start}) == []
    assert report_faults(REPORT | {"command": f"{start} --tune"}) == []


def slower(report: dict) -> None:
    report["rows"][0]["forward_ms"] = time(2.0)


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda r: r.pop("format"), "format is None"),
        (lambda r: r.update(date="29.11.2026"), "not an ISO date"),
        (lambda r: r["device"].clear(), "device.name is missing"),
        (lambda r: r["versions"].pop("torch"), "versions.torch is missing"),
        (lambda r: r.update(command="make fast"), "starts no benchmark"),
        (lambda r: r.update(command="mamba3lite benchmark"), "starts no benchmark"),
        (lambda r: r.update(command=r["command"] + " /home/me"), "one machine: /home"),
        (lambda r: r["rows"].clear(), "no rows"),
        (lambda r: r["rows"][1]["errors"].update(dX=math.nan), "errors.dX is nan"),
        (lambda r: r["rows"][1].update(peak_mb=0), "rows[1].peak_mb is 0"),
        (lambda r: r["rows"][0]["forward_ms"].update(low=1.1), "outside its perc"),
        (lambda r: r["rows"][1].update(forward_floor_ms=0.5), "faster than its floor"),
        (slower, "the rows give 5.0"),
        (lambda r: r["ratios"].clear(), "is missing"),
        (lambda r: r["ratios"].pop(1), "'triton', 'forward') is missing"),
        (lambda r: r["ratios"][0].update(against="pytorch"), "has no rows"),
        (lambda r: r["ratios"][1].update(forward=0.9 / 0.4), "the rows give 3.0"),
        (lambda r: r["model"][1].update(last_loss=math.nan), "last_loss is nan"),
        (lambda r: r["model"][1].pop("tokens_per_s"), "[1].tokens_per_s is missing"),
        (lambda r: r["model"][1].update(mfu=1.2), "mfu is 1.2, all of the device"),
        (lambda r: r["model"][0].update(mfu=-0.1), "model[0].mfu is -0.1"),
        (lambda r: r["fused_launches"][0].pop("ms"), "[0] has not one of ms and fault"),
        (lambda r: r["fused_launches"][5].update(fault=""), "[5] has not one of"),
        (lambda r: r["fused_launches"][4].update(fault="x"), "[4] has not one of"),
        (lambda r: r["fused_launches"][4]["ms"].update(median=0), "median is 0, not"),
        (lambda r: r["fused_launches"][4]["launch"].pop(), "not five numbers"),
    ],
)
def test_a_damaged_report_is_named(damage: Callable[[dict], object], complaint: str):
    report = copy.deepcopy(REPORT)
    damage(report)
    assert any(complaint in fault for fault in report_faults(report))


def speed(gpus: int, parallel: str, step_ms: float, seen: dict | None) -> dict:
    rate = gpus * 16384 / step_ms * 1e3
    return {
        "gpus": gpus,
        "parallel": parallel,
        "tokens_per_step": gpus * 16384,
        "tokens_per_s": rate,
        "mfu": 0.415,
        "step_ms": step_ms,
        "step_ms_low": 0.99 * step_ms,
        "step_ms_high": 1.02 * step_ms,
        "timed_steps": 40,
        "peak_gb": 31.24,
        "dispatch": "fused",
        "collectives": seen,
        "efficiency": rate / (gpus * 16384 / 200 * 1e3),
    }


def compared(precision: str, losses: list[float], alone: list[float]) -> dict:
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True)]
    return {
        "gpus": 2,
        "parallel": "ddp",
        "config": "small_gpu",
        "precision": precision,
        "steps": len(losses),
        "largest": max(apart),
        "at_step": 1 + apart.index(max(apart)),
        "limit": 1e-5,
        "losses": losses,
        "losses_alone": alone,
    }


SEEN = {"collective_ms": 21.04, "exposed_ms": 8.0, "by_name": {"ncclAllReduce": 21.04}}
SCALING = {
    "format": 1,
    "kind": "scaling",
    "date": "2026-11-30",
    "command": "python -m mamba3lite.scaling --json b.json",
    "device": {"name": "A GPU", "threads": 8, "gpus": 2},
    "versions": {"python": "3.12", "torch": "2.11", "mamba3lite": "1", "nccl": "2.28"},
    "plan": {"config": "pretrain_434m", "rows": 8, "steps": 50, "warm_up": 10,
             "gpus": [1, 2, 8]},
    "model": {"gradient_bytes": 1_734_653_184, "matrix_parameters": 433_000_000},
    "rows": [
        speed(1, "alone", 200.0, SEEN | {"collective_ms": 0.0, "exposed_ms": 0.0}),
        speed(2, "ddp", 208.0, SEEN),
        speed(2, "fsdp2", 250.0, None),
    ],
    "exchanges": [{"gpus": 2, "mb": 1024, "ms": 3.2, "bus_gb_s": 335.5}],
    "checkpoints": [{"gpus": 2, "parallel": "fsdp2", "checkpoint_bytes": 5.2e9,
                     "save_s": 21.25, "find_s": 4.0, "load_s": 6.0}],
    "same_loss": [compared("fp32", [5.0, 4.00002], [5.0, 4.0])],
    "resumed": compared("fp32", [5.0, 4.00001], [5.0, 4.0]) | {"gpus": [2, 1, 2]},
    "dead_rank": {"gpus": 2, "killed_rank": 1, "dist_timeout_s": 15,
                  "others_gone_s": 14.87, "torchrun_exit_code": 1,
                  "said": "rank 0: nothing moved", "sound_checkpoints": 2,
                  "faults": []},
    "not_run": [{"part": "8 GPUs", "reason": "this machine has 2"}],
}  # fmt: skip


def test_a_whole_report_of_several_gpus_has_no_faults():
    assert report_faults(SCALING) == []


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda r: r.update(command="mamba3lite bench"), "starts no benchmark"),
        (lambda r: r["rows"].clear(), "no rows"),
        (lambda r: r["rows"][1].update(step_ms=0), "step_ms is 0, not a finite"),
        (lambda r: r["rows"][1].update(mfu=1.1), "mfu is 1.1, all of the device"),
        (lambda r: r["rows"][1].update(step_ms=100.0), "tokens a step by its time"),
        (lambda r: r["rows"][2].update(efficiency=0.95), "efficiency is 0.95"),
        (lambda r: r["device"].update(gpus=1), "more GPUs than the machine has"),
        (lambda r: r["same_loss"][0].update(largest=1e-9), "largest is 1e-09"),
        (lambda r: r["resumed"]["losses"].append(3.0), "steps and losses are"),
        (lambda r: r["not_run"].clear(), "8 GPUs: neither a row nor a reason"),
        (lambda r: r["checkpoints"][0].update(save_s=math.nan), "save_s is nan"),
    ],
)
def test_a_damaged_report_of_several_gpus_is_named(damage, complaint):
    report = copy.deepcopy(SCALING)
    damage(report)
    assert any(complaint in fault for fault in report_faults(report))


def test_the_tables_of_several_gpus_say_what_the_file_says():
    page = site.benchmark_markdown(SCALING, "b.json")
    assert "*Measured* on 2 x A GPU, 2026-11-30, with python 3.12, torch 2.11" in page
    assert "[b.json](b.json)" in page and f"\n{SCALING['command']}\n" in page
    assert "medians of the steps 11 to 50" in page
    measured = page.partition("(*derived*, not run)")[0]
    assert cells(measured, "1,&nbsp;`alone`")[1:3] == ["81,920", "100.0%"]
    assert cells(measured, "2,&nbsp;`ddp`")[1:] == [
        *("157,538", "96.2%", "208<br><small>206 to 212</small>"),
        *("41.5%", "31.2", "21.0<br><small>8.0 exposed</small>"),
    ]
    assert cells(measured, "2,&nbsp;`fsdp2` | 131,072")[-1] == "-"
    assert cells(measured, "2 | 1024")[2:] == ["3.2", "335.5"]
    saved = ["5.20", "21.2", "4.0", "6.0"]
    assert cells(measured, "2,&nbsp;`fsdp2` | 5.20")[1:] == saved
    small = "`ddp`, fp32, `small_gpu`"
    assert cells(page, f"2 GPUs, {small}")[1:] == ["2", "5.0e-06", "2", "1e-05"]
    assert cells(page, f"resumed: 2 to 1 to 2 GPUs, {small}")[2] == "2.5e-06"
    assert "gone after 14.9 s, torchrun ended with exit code 1" in page
    assert "2 sound checkpoints and no faults" in page
    assert "**Not run**\n\n- 8 GPUs: this machine has 2\n" in page
    # 2 x 7/8 of 1.735e9 bytes at 450e9 a second, against a step of 200 ms.
    derived = page.partition("(*derived*, not run)")[2]
    assert cells(derived, "8,&nbsp;`ddp`")[1:4] == ["3.04", "6.7", "3.4%"]
    assert "| 64,&nbsp;`ddp`<br><small>8 x 400 Gb/s a host</small> |" in derived
    assert derived.count("\n| 512,") == 4


def test_what_several_gpus_did_not_do_has_no_table():
    report = copy.deepcopy(SCALING)
    report |= {"exchanges": [], "checkpoints": [], "same_loss": [], "not_run": []}
    report |= {"resumed": None, "dead_rank": None}
    del report["rows"][0]
    page = site.benchmark_markdown(report, "b.json")
    assert "**" not in page and page.count("| --- |") == 1


def test_a_file_without_a_place_and_a_place_without_a_file_are_named():
    page = (
        "# Page\n\n<!-- benchmark a.json -->\n\n`<!-- benchmark c.json -->` in a line"
    )
    assert placing_faults(page, ["a.json"]) == []
    assert placing_faults(page, ["b.json"]) == [
        "b.json has no place on the page",
        "a.json does not exist",
    ]


# ---------------------------------------------------------------- the tables


def cells(markdown: str, start: str) -> list[str]:
    """The cells of the table line that begins with `start`."""
    (line,) = (row for row in markdown.splitlines() if row.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_say_what_the_file_says():
    page = site.benchmark_markdown(REPORT, "a.json")
    assert "*Measured* on A GPU, 2026-11-29, with python 3.12, torch 2.11" in page
    assert "triton None" not in page and "[a.json](a.json)" in page
    assert f"```console\n{REPORT['command']}\n```" in page
    assert "B = 8, T = 2048, H = 16, D = 64, N = 64, C = 64; errors at B = 2" in page
    assert "copies 4.28 TB/s and multiplies 51.6 TFLOP/s in fp32" in page
    first_part = page.partition("**The scan of a block")[0]
    assert cells(first_part, "`triton`,&nbsp;tf32")[1:] == [
        "0.400<br><small>0.360 to 0.480; floor 0.0500</small>",
        "2.40<br><small>2.16 to 2.88; floor 0.150</small>",
        *("812", "7.3e-04<br><small>`dX`</small>"),
    ]
    inside, block = "the inside of the chunks", "the scan of a block, projection in"
    for start, numbers in [
        (f"`triton` as `einsum`, tf32: {inside}", ["2.50", "1.25"]),
        (f"`fused` as `triton`, tf32: {block} float32", ["3.00", "4.00"]),
        (f"`fused` as `fla`, bf16: {block} bfloat16", ["0.50", "1.50"]),
    ]:
        assert cells(page, start)[1:] == numbers
    assert cells(page, "`fla`,&nbsp;bf16")[1].startswith("0.100<br>")
    assert "**The whole scan**" not in page, "a part without rows has no table"
    assert cells(page, "4 warps, 1 stage") == ["4 warps, 1 stage", "0.800", "**0.400**"]
    assert cells(page, "8 warps, 1 stage")[1:] == ["**0.700**", "0.440"]


def test_rows_of_a_model_and_of_a_sweep_have_tables():
    page = site.benchmark_markdown(REPORT, "a.json")
    losses = "10.82 to 7.50"
    eager = ["8.00", "125,000", "-", "3.2", losses]
    assert cells(page, "`pytorch`,&nbsp;eager")[1:] == eager
    compiled = ["0.500", "2,000,000", "41.7%", "3.2", losses]
    assert cells(page, "`fused`,&nbsp;compiled")[1:] == compiled
    lines = [line for line in page.splitlines() if line.startswith("| `walk`")]
    assert [line.split("|")[2].strip() for line in lines] == [
        "32 x 32",
        "32 x 128",
        "32 x 64",
    ], "the three fastest of four, the fastest first"
    launch = ["16", "8", "2", "168", "1.50"]
    assert cells(page, "`backward`,&nbsp;bf16")[1:] == launch
    assert "of 6 launches that were tried; 1 of them did not fit" in page
    assert "not measured" not in page
    page = site.benchmark_markdown(REPORT | {"refused": {"fla": "no"}}, "a.json")
    assert "`fla` was installed and not measured. It said: no" in page


def test_an_older_file_without_the_newer_sections_still_has_its_tables():
    report = copy.deepcopy(REPORT)
    del report["model"], report["fused_launches"], report["rows"][2:]
    del report["ratios"][1:]
    assert report_faults(report) == []
    page = site.benchmark_markdown(report, "a.json")
    assert cells(page, "`triton` as `einsum`, tf32")[1:] == ["2.50", "1.25"]
    assert cells(page, "4 warps, 1 stage")[2] == "**0.400**"
    assert "of a block" not in page and "a whole model" not in page


def test_a_report_of_a_cpu_has_tables_without_a_kernel():
    report = copy.deepcopy(REPORT) | {"ratios": []}
    del report["launches"], report["fused_launches"]
    del report["rows"][1:], report["rows"][0]["peak_mb"]
    page = site.benchmark_markdown(report, "a.json")
    assert cells(page, "`einsum`,&nbsp;tf32")[-2] == "-"
    assert "The kernel against" not in page and "by launch" not in page


def test_a_marker_alone_on_its_line_becomes_the_tables(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/a.json").write_text(json.dumps(REPORT))
    config = SimpleNamespace(docs_dir=str(tmp_path), config_file_path="mkdocs.yml")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="benchmarks/index.md"))
    quoted = "`<!-- benchmark a.json -->` in a line"
    text = f"# Page\n\n<!-- benchmark a.json -->\n\n{quoted}\n"
    tables = site.benchmark_markdown(REPORT, "a.json")
    shown = site.on_page_markdown(text, page=page, config=config)
    assert shown == f"# Page\n\n{tables}\n\n{quoted}\n"
    with pytest.raises(site.PluginError, match=r"benchmarks/index.md: .* gone.json"):
        site.on_page_markdown("<!-- benchmark gone.json -->", page=page, config=config)


def test_every_row_of_a_table_has_its_columns():
    for block in site.benchmark_markdown(REPORT, "a.json").split("\n\n"):
        if block.startswith("|"):
            assert (
                len({len(re.findall(r"\|", line)) for line in block.split("\n")}) == 1
            )
