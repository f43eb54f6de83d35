"""`mamba3lite doctor` tells a scan that is right here from one that is wrong."""

from __future__ import annotations

import re

import pytest
import torch
from typer.testing import CliRunner

from mamba3lite import doctor
from mamba3lite.cli import app
from mamba3lite.models import ssd_triton
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise

HAS_CUDA = torch.cuda.is_available()
CPU = torch.device("cpu")
FUSED = ("fused", "bf16")


def run_doctor():
    return CliRunner().invoke(app, ["doctor"])


def verdicts(output: str) -> dict[str, str]:
    """ "fused bf16" -> "right", "wrong" or "not checked"."""
    lines = re.findall(
        r"^ *(\w+) (\w+): (right|wrong|not checked)", output, re.MULTILINE
    )
    return {
        f"{dispatch} {precision}": verdict for dispatch, precision, verdict in lines
    }


ALL = ("pytorch ieee", "triton ieee", "triton tf32")
ALL += ("fused ieee", "fused tf32", "fused bf16")


@pytest.fixture(scope="module")
def here():
    """What the command says of this machine; it takes a quarter of a minute."""
    return run_doctor()


@pytest.mark.slow
def test_every_dispatch_and_precision_is_right_here(here):
    """Interpreted where there is no GPU: formulas and rounding, not the compiler."""
    result = here
    assert result.exit_code == 0, result.output
    assert verdicts(result.output) == dict.fromkeys(ALL, "right")
    for limits, line in zip(
        doctor.LIMITS.values(),
        re.findall(r"right \((.+)\)", result.output),
        strict=True,
    ):
        shown = dict(re.findall(r"(\w+) ([\d.e+-]+)", line))
        assert list(shown) == ["y", "dx", "dA", "dB", "dC", "ddt"]
        most, of_dt, of_A = limits
        assert max(float(shown[name]) for name in ("y", "dx", "dB", "dC")) <= most
        assert float(shown["ddt"]) <= of_dt and float(shown["dA"]) <= of_A


@pytest.mark.slow
def test_exact_decode_is_exact_here(here):
    names = ["bf16", "tf32", "ieee"] if HAS_CUDA else ["windows"]
    lines = re.findall(r"^exact decode in (\w+): the bits of", here.output, re.M)
    assert lines == names


@pytest.mark.skipif(HAS_CUDA, reason="windows are what a CPU has")
def test_a_step_with_other_bits_is_unhealthy(monkeypatch):
    step = doctor.decode.exact_step

    def rounded(*entry):
        return step(*entry).bfloat16().float()

    monkeypatch.setattr(doctor.decode, "exact_step", rounded)
    monkeypatch.setattr(doctor, "LIMITS", {})
    said = []
    assert not doctor.examine(said.append)
    assert any(line.endswith("not reproducible") for line in said)


# --------------------------------------------------------------------------------------
# A planted fault. The PyTorch scan stands in for the kernel: only the fault counts.


def scan_with(change):
    """The scan that the doctor calls, changed wherever it is asked for the kernel."""

    def scan(x, A, B_t, C_t, dt, chunk_size, ssd_dispatch, precision):
        if ssd_dispatch == "pytorch":
            return ssd_complex_chunkwise(x, A, B_t, C_t, dt, chunk_size)
        return change(x, A, B_t, C_t, dt)

    return scan


def same_value_other_gradient(z: torch.Tensor, factor: float) -> torch.Tensor:
    return z.detach() + factor * (z - z.detach())


PLANTED = {
    "y": lambda x, A, B, C, dt: (
        (y := ssd_complex_chunkwise(x, A, B, C, dt)) + 0.02 * y.detach()
    ),
    "dx": lambda x, A, B, C, dt: ssd_complex_chunkwise(
        same_value_other_gradient(x, 1.02), A, B, C, dt
    ),
    "dA": lambda x, A, B, C, dt: ssd_complex_chunkwise(
        x, same_value_other_gradient(A, 0.9), B, C, dt
    ),
    "dB": lambda x, A, B, C, dt: ssd_complex_chunkwise(
        x, A, same_value_other_gradient(B, 1.02), C, dt
    ),
    "dC": lambda x, A, B, C, dt: ssd_complex_chunkwise(
        x, A, B, same_value_other_gradient(C, 1.02), dt
    ),
    "ddt": lambda x, A, B, C, dt: ssd_complex_chunkwise(
        x, A, B, C, same_value_other_gradient(dt, 1.02)
    ),
}


@pytest.fixture
def two_checks(monkeypatch):
    """The PyTorch scan and one kernel, which counts as present."""
    limits = {key: doctor.LIMITS[key] for key in [("pytorch", "ieee"), FUSED]}
    monkeypatch.setattr(doctor, "LIMITS", limits)
    monkeypatch.setattr(doctor, "why_not", lambda dispatch, device: None)


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_kernel_is_named_with_what_is_wrong(name, two_checks, monkeypatch):
    monkeypatch.setattr(doctor, "ssd_complex_chunkwise", scan_with(PLANTED[name]))
    result = run_doctor()
    assert result.exit_code == 1
    assert verdicts(result.output) == {"pytorch ieee": "right", "fused bf16": "wrong"}
    advice = result.output.splitlines()[-1]
    assert advice.startswith(f"  {name}: do not train with ssd_dispatch: fused in bf16")
    assert "use ssd_dispatch: pytorch" in advice and "ssd_precision: ieee" in advice


def test_a_right_stand_in_is_right(two_checks, monkeypatch):
    """The faults above are seen for what they are, not for the stand-in."""
    monkeypatch.setattr(
        doctor, "ssd_complex_chunkwise", scan_with(ssd_complex_chunkwise)
    )
    assert run_doctor().exit_code == 0


def test_numbers_that_are_not_finite_are_wrong(two_checks, monkeypatch):
    spoiled = scan_with(lambda *args: ssd_complex_chunkwise(*args) * torch.nan)
    monkeypatch.setattr(doctor, "ssd_complex_chunkwise", spoiled)
    result = run_doctor()
    assert result.exit_code == 1
    assert "  y, dx, dB, dC, ddt, dA: do not train" in result.output


def test_a_wrong_pytorch_scan_leads_to_another_torch(monkeypatch):
    monkeypatch.setattr(
        doctor, "LIMITS", {("pytorch", "ieee"): doctor.LIMITS["pytorch", "ieee"]}
    )
    monkeypatch.setattr(
        doctor,
        "ssd_complex_chunkwise",
        lambda *args, **_: 1.01 * ssd_complex_chunkwise(*args),
    )
    result = run_doctor()
    assert result.exit_code == 1
    assert "constraints.txt" in result.output
    assert "do not train" not in result.output


# --------------------------------------------------------------------------------------
# What cannot be checked


def only_pytorch_is_checked(reason: str) -> None:
    result = run_doctor()
    assert result.exit_code == 0, "nothing that can run here is wrong"
    others = dict.fromkeys(ALL[1:], "not checked")
    assert verdicts(result.output) == {"pytorch ieee": "right"} | others
    assert result.output.count(f"not checked, {reason}") == len(others)


def test_without_triton_the_kernels_are_not_checked(monkeypatch):
    monkeypatch.setattr(ssd_triton, "HAS_TRITON", False)
    only_pytorch_is_checked("triton is not installed")


@pytest.mark.skipif(HAS_CUDA, reason="a GPU checks them")
def test_without_a_gpu_and_the_interpreter_the_kernels_are_not_checked(monkeypatch):
    monkeypatch.setattr(ssd_triton, "_interpreted", lambda: False)
    only_pytorch_is_checked("it needs a CUDA device (TRITON_INTERPRET=1")


# --------------------------------------------------------------------------------------
# What it says about the machine


def test_versions_name_what_is_installed_and_what_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("pydantic", "no-such-package"))
    python, package, torch_line, pydantic, missing = doctor.versions()
    assert re.fullmatch(r"python 3\.\d+\.\d+\S*", python)
    assert package.startswith("mamba3lite ") and package[-1].isdigit()
    assert torch_line == f"torch {torch.__version__}"
    assert re.fullmatch(r"pydantic [\d.]+\S*", pydantic)
    assert missing == "no-such-package is missing: pip install no-such-package"


def test_a_cpu_is_described_with_its_threads():
    threads = torch.get_num_threads()
    assert (
        doctor.describe_device(CPU) == f"device: CPU, {threads} threads; no CUDA device"
    )


def test_inputs_for_bf16_are_numbers_that_bf16_holds():
    z = torch.tensor([1 + 2**-7, 1 + 2**-9, -3.0])
    assert doctor.rounded_to_bf16(z).tolist() == [1 + 2**-7, 1.0, -3.0]
    assert doctor.rounded_to_bf16(torch.complex(z, -z)).imag.tolist() == [
        -1 - 2**-7,
        -1.0,
        3.0,
    ]
