"""What `mamba3lite bench` measures is the scan, and its report is of this run."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import sys
import types

import pytest
import torch
from test_benchmark_files import report_faults
from trainer_cases import tiny_model, write_config
from typer.testing import CliRunner

from mamba3lite import bench, bench_decode, reference
from mamba3lite.cli import app
from mamba3lite.generate import MODES
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise, ssd_naive_complex

CPU = torch.device("cpu")
HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
SMALL = reference.Shape(B=2, T=48, H=3, D=4, N=2, chunk=16)
cpu_only = pytest.mark.skipif(HAS_CUDA, reason="what a machine without a GPU writes")


def run_command(*arguments: object):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


TINY = (
    *("--batch", 1, "--time", 32, "--chunk-size", 16),
    *("--heads", 2, "--head-dim", 4, "--state-dim", 4),
)


# --------------------------------------------------------------------------------------
# The command


def test_help_names_every_option():
    result = run_command("--help")
    assert result.exit_code == 0, result.output
    shown = set(re.findall(r"--[a-z-]+", result.stdout))
    sizes = {"--batch", "--time", "--heads", "--head-dim", "--state-dim"}
    more = {"--chunk-size", "--tune", "--peers", "--model", "--set", "--json"}
    more |= {"--part", "--no-scan", "--decode"}
    assert shown == sizes | more | {"--help"}
    assert "mamba3lite bench" in result.stdout
    for text in ("Heads H; 16.", "head; 64.", "states N; 64.", "per chunk; 64."):
        assert text in result.stdout


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (("--time", 100), "--time 100 is not a multiple of --chunk-size 64"),
        (("--time", 64, "--chunk-size", 48), "--time 64 is not a multiple of"),
        (("--json", "old.json"), "old.json exists; name a new file for --json"),
        (("--json", "gone/new.json"), "gone is not a folder"),
        (("--json", "x" * 300), "x: File name too long"),
        (("--time", "\x1b[31m"), "Invalid value for '--time'"),
        (("--model", "\x1b[31m"), "--config \\x1b[31m: no such file"),
        (("--batch", 0), "'--batch'"),
        (("--fast",), "No such option: --fast"),
        (("--model", "nope"), "nope: no such file"),
        (("--set", "training.lr=1"), "--set changes the configuration of --model"),
        (("--part", "blok"), "--part blok: there are per_chunk, scan, block_fp32"),
        (("--no-scan",), "--no-scan measures --model alone"),
        (("--no-scan", "--model", "tiny", "--peers"), "--no-scan measures --model"),
        (("--no-scan", "--model", "tiny", "--part", "scan"), "and no --part"),
        (("--model", "tiny", "--set", "training.lr=x"), 'training.lr: got "x"'),
        (("--decode",), "--decode measures a model; name one"),
        (("--decode", "--model", "tiny", "--tune"), "--decode leaves the scan out"),
        *(
            (("--decode", "--model", "tiny", size, 100), "--decode leaves the scan out")
            for size in TINY[::2]
        ),
        (("--decode", "--model", "tiny", "--part", "scan"), "there are steps, memory"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_measured(
    arguments, complaint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for module, name in ((bench, "run_bench"), (bench_decode, "run_decode_bench")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "old.json").write_text("kept")
    result = run_command(*arguments)
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr and result.stderr.count("\n") == 1
    assert "Traceback" not in result.output and result.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "kept"


@cpu_only
def test_a_run_on_a_cpu_writes_what_it_measured_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/mamba3lite", "bench", "--tune"])
    file = tmp_path / "new.json"
    model = write_config(tmp_path / "model.yaml", tmp_path / "no-data", tmp_path)
    extra = ("--tune", "--peers", "--model", model, "--json", file)
    result = run_command(*TINY, *extra)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    keys = ("part", "version", "precision")
    assert [tuple(row[key] for key in keys) for row in report["rows"]] == [
        ("per_chunk", "einsum", "ieee"),
        ("per_chunk", "pytorch", "ieee"),
        ("scan", "einsum", "ieee"),
        ("scan", "pytorch", "ieee"),
        ("block_fp32", "pytorch", "ieee"),
    ]
    for row in report["rows"]:
        assert {"peak_mb", "forward_eager_ms"}.isdisjoint(row), "a CPU has neither"
    assert report["ratios"] == [], "no kernel ran, so nothing is faster than another"
    assert {"launches", "fused_launches"}.isdisjoint(report)
    assert [row["dispatch"] for row in report["model"]] == ["pytorch"]
    assert report["shape"]["T"] == 32 and report["error_shape"]["T"] == 32
    assert report["command"] == "mamba3lite bench --tune"
    for kernel in ("triton", "fused"):
        assert f"{kernel} not measured: no compiled kernels here" in result.stderr
    assert "no peer measured" in result.stderr
    assert "times as fast" not in result.stdout
    shown = re.findall(r"(per_chunk|scan|block_fp32) +│ (\w+) +│ ieee", result.stdout)
    assert shown == [(row["part"], row["version"]) for row in report["rows"]]


def test_decoding_is_measured_for_every_mode(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/mamba3lite", "bench", "--decode"])
    monkeypatch.setattr(bench_decode, "BATCHES", (1, 3))
    monkeypatch.setattr(bench_decode, "LENGTHS", (400, 800))
    monkeypatch.setattr(bench_decode, "SEEDS", (3,))
    file = tmp_path / "new.json"
    model = write_config(tmp_path / "model.yaml", tmp_path / "no-data", tmp_path)
    result = run_command("--decode", "--model", model, "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report_faults(report) == []
    assert "rows" not in report and report["command"] == "mamba3lite bench --decode"
    found = [(row["mode"], row["batch"]) for row in report["decode"]]
    assert found == [(mode, batch) for mode in MODES for batch in (1, 3)]
    for row in report["decode"]:
        rate = row["batch"] / row["step_ms"]["mean"] * 1e3
        assert row["tokens_per_s"] == pytest.approx(rate)
        assert row["round_ms"]["mean"] > 0 and row["floor_ms"] > 0
    memory = report["decode_memory"][0]
    assert memory["mode"] == "recurrent"
    assert memory["slot_bytes"] == 2 * 2 * 8 * 4 * 8  # layers, heads, D, N, complex64
    assert len(set(memory["held_bytes"].values())) == (1 if HAS_CUDA else 0)
    (bits,) = report["decode_bits"]
    assert bits["exact"] == {"differ": 0, "largest_log_prob": 0.0}
    assert bits["alone"]["differ"] == 0 and bits["rows"] == 8 * (bits["steps"] + 1)
    assert bits["recurrent"]["differ"] > bits["rows"] / 2, "what exact steps are for"
    shown = re.findall(r"(recurrent|exact) +│ +(\d+)", result.stdout)
    assert shown == [(mode, str(batch)) for mode, batch in found]
    assert "memory, recurrent: 1,024 bytes a sequence" in result.stdout
    assert "bits, tf32, seed 3: of " in result.stdout


def test_a_part_of_decoding_is_measured_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_decode, "SEEDS", (0,))
    model = write_config(tmp_path / "model.yaml", tmp_path / "no-data", tmp_path)
    for part, section in (("memory", "decode_memory"), ("bits", "decode_bits")):
        file = tmp_path / f"{part}.json"
        result = run_command(
            *("--decode", "--part", part, "--model", model, "--json", file)
        )
        assert result.exit_code == 0 and "tokens/s" not in result.stdout
        report = json.loads(file.read_text())
        sections = ("decode", "decode_memory", "decode_bits")
        assert [name for name in sections if report[name]] == [section]
        line_of = {"memory": bench_decode.memory_line, "bits": bench_decode.bits_line}
        assert result.stdout.splitlines() == list(map(line_of[part], report[section]))


def test_a_line_of_memory_by_hand():
    row = {"mode": "exact", "slot_bytes": 1024, "held_bytes": {"1000": 5000}}
    said = "memory, exact: 1,024 bytes a sequence"
    held = "; the device holds 5,000 bytes after 1,000 tokens"
    assert bench_decode.memory_line(row) == said + held
    assert bench_decode.memory_line(row | {"held_bytes": {}}) == said


@pytest.mark.parametrize("mode", MODES)
def test_a_text_that_is_read_is_the_text_that_is_decoded(mode, monkeypatch):
    monkeypatch.setattr(bench_decode, "READ_AT_ONCE", 32)
    found = []
    for first in (0, 75):
        torch.manual_seed(0)
        model = tiny_model(batch_invariant=True)
        steps = bench_decode.Steps(model, mode, 1, choose=False)
        count = bench_decode.read(steps, first)
        assert count == first - first % model.cfg.chunk_size
        steps.tokens.zero_()
        with torch.inference_mode():
            for _ in range(80 - count):
                logits = steps.step(model, steps.tokens, steps.cache, steps.slots)
        found.append(logits)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_the_floor_of_a_step_reads_weights_once_and_states_twice():
    model = tiny_model()
    (row,) = bench_decode.step_rows(model, "recurrent", [3], copy_tb_s=2.0)
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert row["floor_ms"] == pytest.approx((weights + 2 * 3 * 1024) / 2e9)
    untied = tiny_model(weight_tying=False)
    same = bench_decode.weight_bytes(untied, torch.float32)
    assert same == bench_decode.weight_bytes(model, torch.float32)
    assert bench_decode.weight_bytes(model, torch.bfloat16) == same / 2


@pytest.mark.parametrize(
    "typed, command",
    [
        (["/a/bin/mamba3lite", "bench", "--tune"], "mamba3lite bench --tune"),
        (["/a/mamba3lite/bench.py", "--tune"], "python -m mamba3lite.bench --tune"),
    ],
)
def test_the_report_says_what_to_type_again(typed, command, monkeypatch):
    monkeypatch.setattr("sys.argv", typed)
    assert bench.command_line() == command


# --------------------------------------------------------------------------------------
# What is compared is the same function


def naive(inputs: list[torch.Tensor]) -> torch.Tensor:
    return ssd_naive_complex(*map(reference.in_double, inputs)).real


def test_the_baseline_is_the_oracle():
    inputs = list(map(reference.in_double, reference.random_inputs(SMALL, CPU)))
    y = bench.einsum_scan(*inputs, chunk=SMALL.chunk)
    assert reference.relative_error(y, naive(inputs)) < 1e-12


def test_the_baseline_of_the_inside_is_the_pytorch_function():
    inputs = list(map(reference.in_double, bench.part_inputs("per_chunk", SMALL, CPU)))
    got = bench.einsum_per_chunk(*inputs)
    wanted = bench.per_chunk_ssd_pytorch(*inputs)
    for a, b in zip(got, wanted, strict=True):
        assert reference.relative_error(a, b) < 1e-12


@pytest.mark.parametrize("part", ["block_fp32", "block_bf16"])
def test_rotated_and_scanned_with_real_decay_is_the_oracle(part):
    """The four tensors that other projects' scans get lead to the same y."""
    proj, A = bench.part_inputs(part, SMALL, CPU)
    q, k, v, g = bench.rotated(proj.double(), A, SMALL)
    assert g.shape == (SMALL.B, SMALL.T, SMALL.H) and g.unique().numel() > SMALL.T
    state, steps = 0, []
    for t in range(SMALL.T):
        added = k[:, t, :, :, None] * v[:, t, :, None, :]
        state = g[:, t].double().exp()[..., None, None] * state + added
        steps.append((q[:, t, :, None, :] @ state).squeeze(-2))
    (wanted,) = reference.oracle(part, [proj, A], SMALL)[0]
    assert reference.relative_error(torch.stack(steps, 1), wanted) < 1e-5
    assert bench.rotated(proj, A, SMALL)[0].dtype == proj.dtype


@pytest.mark.parametrize("dispatch", ["pytorch", "triton", "fused"])
def test_the_scan_of_a_block_is_the_chunkwise_scan(dispatch):
    shape = reference.Shape(B=1, T=32, H=2, D=16, N=32, chunk=16)
    inputs = reference.random_inputs(shape, DEVICE)
    proj, A = bench.part_inputs("block_fp32", shape, DEVICE)
    wanted = ssd_complex_chunkwise(*map(reference.in_double, inputs), chunk_size=16)
    options = {"shape": shape, "ssd_dispatch": dispatch, "precision": "ieee"}
    y = bench.block_scan(proj, A, **options)
    assert y.dtype == torch.float32 and y.shape == inputs[0].shape
    assert reference.relative_error(y, wanted) < 2e-5
    assert bench.block_scan(proj.bfloat16(), A, **options).dtype == torch.bfloat16


def test_errors_name_the_stream_that_is_wrong():
    proj, A = bench.part_inputs("block_fp32", SMALL, CPU)
    wanted = reference.oracle("block_fp32", [proj, A], SMALL)
    start = SMALL.H * (SMALL.D + 2 * SMALL.N)  # of Re C
    gradients = [z.clone() for z in wanted[1]]
    gradients[0][..., start] += 1
    found = reference.errors("block_fp32", (wanted[0], gradients), wanted, SMALL)
    assert list(found) == ["y", "dx", "dB", "dC", "ddt", "dA"]
    assert [name for name, error in found.items() if error] == ["dC"]


def test_inputs_of_a_block_are_those_of_the_scan():
    x, A, B_t, C_t, dt = bench.part_inputs("scan", SMALL, CPU)
    proj, same_A = bench.part_inputs("block_fp32", SMALL, CPU)
    streams = reference.cut_columns(proj, SMALL)
    wanted = (x, B_t.real, B_t.imag, C_t.real, C_t.imag, dt.unsqueeze(-1))
    assert all(map(torch.equal, streams, wanted)) and torch.equal(A, same_A)
    half, _ = bench.part_inputs("block_bf16", SMALL, CPU)
    assert torch.equal(half, proj.bfloat16())


# --------------------------------------------------------------------------------------
# Floors, by hand


# B = 1, T = 4, H = 1, D = 2, N = 1, chunks of 2: four rows in two chunks.
HAND = reference.Shape(B=1, T=4, H=1, D=2, N=1, chunk=2)


@pytest.mark.parametrize(
    "part, inputs, outputs, flops",
    [
        # A row holds B, C (1 complex number each), X (2), A_log and decay_states; Y has
        # 2 a row, and each chunk a state of 2. Per chunk 4 products for C B^T, 8 for
        # (L C B^T) X and 4 for the state, complex, so 8 FLOPs each.
        ("per_chunk", 4 * 6 * 8, (4 * 2 + 2 * 2) * 8, 2 * (4 + 8 + 4) * 8),
        # A row holds 4 + 2 + 1 numbers, y has 2. Per chunk 8 products for each of
        # q k^T, its product with x, the state and what is read of it, 2 FLOPs each.
        ("scan", 4 * 7 * 4, 4 * 2 * 4, 2 * (8 + 8 + 8 + 8) * 2),
        ("block_fp32", 4 * 7 * 4, 4 * 2 * 4, 2 * (8 + 8 + 8 + 8) * 2),
        ("block_bf16", 4 * 7 * 2, 4 * 2 * 2, 2 * (8 + 8 + 8 + 8) * 2),
    ],
)
def test_cost_is_what_a_count_by_hand_gives(part, inputs, outputs, flops):
    assert bench.cost(part, HAND) == {
        "forward_bytes": inputs + outputs,
        "forward_flops": flops,
        "forward_backward_bytes": 3 * inputs + 2 * outputs,
        "forward_backward_flops": 3 * flops,
    }


def test_the_floor_is_the_larger_of_two_times():
    ceiling = {"copy_tb_s": 2.0, "fp32_tflop_s": 50.0, "bf16_tflop_s": 500.0}
    need = {"forward_bytes": 4e9, "forward_flops": 1e11}
    assert math.isclose(bench.floor_ms(need, ceiling, "forward", "ieee"), 2.0)
    need["forward_flops"] = 1e12
    assert math.isclose(bench.floor_ms(need, ceiling, "forward", "ieee"), 20.0)
    assert math.isclose(bench.floor_ms(need, ceiling, "forward", "bf16"), 2.0)


# --------------------------------------------------------------------------------------
# Which kernel a part is measured for


def row(part: str, version: str, precision: str, forward: float, both: float) -> dict:
    times = {"forward_ms": forward, "forward_backward_ms": both}
    named = {"part": part, "version": version, "precision": precision}
    return named | {key: {"median": ms} for key, ms in times.items()}


ROWS = [
    row("per_chunk", "pytorch", "tf32", 3.0, 9.0),
    row("per_chunk", "triton", "tf32", 1.0, 6.0),
    row("scan", "pytorch", "tf32", 8.0, 12.0),
    row("scan", "triton", "tf32", 4.0, 6.0),
    row("scan", "fused", "tf32", 2.0, 4.0),
    row("scan", "fused", "bf16", 1.0, 3.0),
    row("block_bf16", "fla", "bf16", 0.5, 2.0),
    row("block_bf16", "fused", "bf16", 1.0, 1.0),
]


def test_the_kernel_of_a_part_is_the_fused_one_where_it_ran():
    parts = ("per_chunk", "scan", "block_bf16", "block_fp32")
    found = [bench.kernel_of(part, ROWS) for part in parts]
    assert found == ["triton", "fused", "fused", None]


def test_ratios_compare_within_part_and_precision_alone():
    found = [tuple(ratio.values()) for ratio in bench.ratios_of(ROWS)]
    assert found == [
        ("per_chunk", "tf32", "pytorch", 3.0, 1.5),
        ("scan", "tf32", "pytorch", 4.0, 3.0),
        ("scan", "tf32", "triton", 2.0, 1.5),
        ("block_bf16", "bf16", "fla", 0.5, 2.0),
    ]


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_a_sweep_tries_the_shipped_launch_and_only_whole_tiles(precision):
    shape = reference.Shape(B=8, T=2048, H=16, D=64, N=64, chunk=64)
    for kernel, table in bench.ssd_fused._LAUNCH.items():
        tried = list(bench.candidates(kernel, precision, shape))
        assert table[precision] in tried, kernel
        assert len(set(tried)) == len(tried)
        for d, n, *_ in tried:
            assert shape.N % n == 0 and (d == 0 or shape.D % d == 0)
            # fewer columns than 64 are compiled wrongly
            assert (kernel, precision) != ("backward", "bf16") or n == 64
        small = reference.Shape(B=1, T=32, H=1, D=16, N=16, chunk=16)
        assert {n for _, n, *_ in bench.candidates(kernel, precision, small)} == {16}


def test_mamba2_computes_the_same_from_its_own_inputs(monkeypatch):
    """Its documented recurrence, h = exp(dt A) h + dt B x and y = C h, as a loop."""

    def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size):
        h, y = torch.zeros(*x[:, 0].shape, B.shape[-1], dtype=x.dtype), []
        for t in range(x.shape[1]):
            step = dt[:, t, :, None, None].to(x.dtype)
            added = x[:, t, ..., None] * B[:, t, :, None]
            h = torch.exp(step * A[:, None, None].to(x.dtype)) * h + step * added
            y.append((h * C[:, t, :, None]).sum(-1))
        return torch.stack(y, 1)

    module = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
    module.mamba_chunk_scan_combined = mamba_chunk_scan_combined
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    prepare, run = bench.peers_here()["mamba_ssm"]
    proj, A = bench.part_inputs("block_fp32", SMALL, CPU)
    wanted = reference.oracle("block_fp32", [proj, A], SMALL)[0][0]
    y = run(*prepare(*bench.rotated(proj.double(), A, SMALL)))
    assert reference.relative_error(y, wanted) < 1e-5


def test_a_peer_that_refuses_is_named_and_loses_no_numbers(monkeypatch):
    """What was measured before it is saved before it, and the rest goes on."""

    def refuses(*args):
        raise RuntimeError("not on\n  this GPU")

    def row_of(function, inputs, device):
        function(*inputs)
        return {"forward_ms": {"median": 1.0}, "forward_backward_ms": {"median": 2.0}}

    same = lambda *inputs: list(inputs)  # noqa: E731
    peers = {"broken": (same, refuses), "whole": (same, lambda q, k, v, g: v)}
    monkeypatch.setattr(bench, "peers_here", lambda: peers)
    monkeypatch.setattr(bench, "time_row", row_of)
    shape = reference.Shape(B=1, T=32, H=2, D=16, N=16, chunk=16)
    said: list[str] = []
    ceiling = {"copy_tb_s": 1.0, "fp32_tflop_s": 1.0}
    rows, refused = bench.measure_peers(shape, shape, CPU, ceiling, said.append)
    assert [row["version"] for row in rows] == ["whole"]
    assert refused == {"broken": "not on this GPU"}
    assert said[0] == "broken was not measured: not on this GPU"


@pytest.mark.parametrize("fails_in", ["measure_peers", "measure_model"])
def test_what_was_measured_is_saved_before_the_next_part(fails_in, monkeypatch):
    def fails(*args):
        raise RuntimeError("later")

    rows = copy.deepcopy(ROWS)
    monkeypatch.setattr(bench, "ceilings", lambda device: {"copy_tb_s": 1.0})
    monkeypatch.setattr(bench, "measure_rows", lambda *args: rows)
    monkeypatch.setattr(bench, "peers_here", lambda: {"fla": (fails, fails)})
    monkeypatch.setattr(bench, "this_machine", lambda device: {})
    monkeypatch.setattr(bench, "measure_peers", lambda *args: ([], {}))
    monkeypatch.setattr(bench, fails_in, fails)
    shape = reference.Shape(B=1, T=32, H=2, D=16, N=16, chunk=16)
    saved: list[dict] = []
    with pytest.raises(RuntimeError, match="later"):
        bench.run_bench(
            shape, shape, torch.device("cuda"), parts=(), peers=True, model="tiny",
            say=lambda line: None, save=lambda part: saved.append(copy.copy(part)),
        )  # fmt: skip
    assert saved[-1]["rows"] == rows and saved[-1]["ratios"]


# --------------------------------------------------------------------------------------
# A whole model


def test_training_steps_of_a_model_are_rows(tmp_path):
    config = write_config(tmp_path / "c.yaml", tmp_path / "no-data", tmp_path)
    said: list[str] = []
    before = torch.get_rng_state()
    (first,) = bench.measure_model(str(config), [], 3, CPU, said.append)
    torch.set_rng_state(before)
    assert (first["dispatch"], first["compiled"], first["mfu"]) == (
        "pytorch",
        False,
        None,
    )
    tokens = 4 * 32  # micro-batch 4 of 32 tokens, in the configuration
    assert math.isclose(first["tokens_per_s"], tokens / first["step_ms"] * 1e3)
    # Random weights know nothing: ln 257 at first. The batch is always the same.
    assert abs(first["first_loss"] - math.log(257)) < 0.5
    assert first["last_loss"] < first["first_loss"]
    assert first["peak_gb"] > 0 and len(said) == 1


@cpu_only
def test_the_sweep_takes_every_launch_the_kernel_offers(monkeypatch):
    """Precisions of the kernel itself; the variables are as they were, also after."""
    monkeypatch.setattr(bench, "captured", lambda run: run)
    monkeypatch.setattr(bench, "measure", lambda run, device: run() and {"median": 1.0})
    monkeypatch.setenv("TRITON_PER_CHUNK_NUM_WARPS", "16")
    monkeypatch.delenv("TRITON_PER_CHUNK_NUM_STAGES", raising=False)
    rows = bench.sweep_launches(
        reference.Shape(1, 16, 1, 16, 16, 16), CPU, lambda _: None
    )
    assert [(row["precision"], row["warps"], row["stages"]) for row in rows] == [
        (precision, warps, stages)
        for precision in ("ieee", "tf32")
        for warps in (2, 4, 8)
        for stages in (1, 2)
    ]
    assert os.environ["TRITON_PER_CHUNK_NUM_WARPS"] == "16"
    assert "TRITON_PER_CHUNK_NUM_STAGES" not in os.environ
