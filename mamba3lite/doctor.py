"""Is everything here, and do the kernels of this device compute the right thing?"""

import importlib.metadata
import math
import platform
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import mamba3lite
from mamba3lite.models import ssd_triton
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise, ssd_naive_complex

PACKAGES = ("triton", "numpy", "safetensors", "tiktoken", "pydantic", "matplotlib")
# Relative error by norm that each dispatch and precision must stay below: outputs and
# most gradients, the gradient of dt, the gradient of A.
LIMITS = {
    ("pytorch", "ieee"): (2e-5, 1e-4, 1e-3),
    ("triton", "ieee"): (2e-5, 1e-4, 1e-3),
    ("triton", "tf32"): (2e-3, 5e-3, 1e-2),
    ("fused", "ieee"): (2e-5, 1e-4, 1e-3),
    ("fused", "tf32"): (1e-3, 5e-3, 1e-2),
    ("fused", "bf16"): (5e-3, 1e-2, 3e-2),
}


def examine(say: Callable[[str], None]) -> bool:
    """Print versions and device, run every scan against the oracle.

    Returns: whether all that can run here is right.
    """
    for line in versions():
        say(line)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    say(describe_device(device))
    healthy = True
    for (dispatch, precision), limits in LIMITS.items():
        name = f"{dispatch:>7} {precision}"
        if reason := why_not(dispatch, device):
            say(f"{name}: not checked, {reason}")
            continue
        errors = scan_errors(dispatch, precision, device)
        worst = {key: errors[key] for key, limit in allowed(limits).items()
                 if not errors[key] <= limit}  # fmt: skip
        shown = ", ".join(f"{key} {error:.1e}" for key, error in errors.items())
        say(f"{name}: {'wrong' if worst else 'right'} ({shown})")
        if worst:
            healthy = False
            say(advice(dispatch, precision, worst))
    return healthy


def versions() -> list[str]:
    """One line for Python, this package, torch and each of PACKAGES."""
    lines = [
        f"python {platform.python_version()}",
        f"mamba3lite {mamba3lite.__version__}",
        f"torch {torch.__version__}",
    ]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} is missing: pip install {package}")
    return lines


def describe_device(device: torch.device) -> str:
    """Name, capability and memory of the device that a run would use."""
    if device.type != "cuda":
        return f"device: CPU, {torch.get_num_threads()} threads; no CUDA device"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"device: {properties.name}, capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"
    )


def why_not(dispatch: str, device: torch.device) -> str | None:
    """Why a dispatch cannot be checked here, or None."""
    if dispatch == "pytorch":
        return None
    if not ssd_triton.HAS_TRITON:
        return "triton is not installed"
    if device.type != "cuda" and not ssd_triton._interpreted():
        return (
            "it needs a CUDA device (TRITON_INTERPRET=1 checks its formulas on a CPU)"
        )
    return None


def allowed(limits: tuple[float, float, float]) -> dict[str, float]:
    """Limit of each error."""
    most, of_dt, of_A = limits
    return dict.fromkeys(("y", "dx", "dB", "dC"), most) | {"ddt": of_dt, "dA": of_A}


def scan_errors(dispatch: str, precision: str, device: torch.device) -> dict:
    """Errors of y and of every gradient against the loop in complex128.

    Random steps and decays, a length that ends inside a chunk; bf16 gets inputs that
    bfloat16 can hold, for the oracle too.
    """
    inputs = random_inputs(device)
    if precision == "bf16":
        inputs = [rounded_to_bf16(z) if i != 1 else z for i, z in enumerate(inputs)]
    scan = partial(
        ssd_complex_chunkwise, chunk_size=64, ssd_dispatch=dispatch, precision=precision
    )
    got = values_and_gradients(scan, inputs)
    double = [z.to(torch.complex128 if z.is_complex() else torch.float64)
              for z in inputs]  # fmt: skip
    wanted = values_and_gradients(lambda *args: ssd_naive_complex(*args).real, double)
    names = ("y", "dx", "dA", "dB", "dC", "ddt")
    pairs = zip(got, wanted, strict=True)
    errors = [float((a.to(b.dtype) - b).norm() / b.norm()) for a, b in pairs]
    return dict(zip(names, errors, strict=True))


def random_inputs(device: torch.device) -> list[Tensor]:
    """x, A, B_t, C_t, dt: two sequences of 150 tokens, 2 heads, D = N = 64."""
    g = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, device=device, generator=g)
    rate = torch.logspace(-3, math.log10(2), 2, device=device)
    A = torch.complex(-rate, torch.tensor([2.5, -1.0], device=device))
    B_t, C_t = (draw(2, 150, 2, 64, dtype=torch.complex64) for _ in range(2))
    return [draw(2, 150, 2, 64), A, B_t, C_t, draw(2, 150, 2)]


def rounded_to_bf16(z: Tensor) -> Tensor:
    """The nearest numbers that bfloat16 holds, half by half for complex ones."""
    if z.is_complex():
        return torch.view_as_complex(torch.view_as_real(z).bfloat16().float())
    return z.bfloat16().float()


def values_and_gradients(scan: Callable, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradient of every input, for one fixed weighting."""
    leaves = [z.detach().clone().requires_grad_() for z in inputs]
    y = scan(*leaves)
    g = torch.Generator(y.device).manual_seed(1)
    weights = torch.randn(y.shape, device=y.device, generator=g)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights.to(y.dtype))]


def advice(dispatch: str, precision: str, worst: dict[str, float]) -> str:
    """What to do about a scan that is wrong here."""
    wrong = ", ".join(worst)
    if dispatch == "pytorch":
        return (
            f"  {wrong}: the PyTorch scan itself is wrong here; install the pinned "
            "torch of constraints.txt and run `pytest tests/test_ssd.py`"
        )
    safer = "" if precision == "ieee" else " or ssd_precision: ieee"
    return (
        f"  {wrong}: do not train with ssd_dispatch: {dispatch} in {precision} on this "
        f"device; use ssd_dispatch: pytorch{safer}, and run `pytest -m gpu` for the "
        "tile sizes concerned. Compilers differ: the kernels were measured with the "
        "versions in docs/benchmarks."
    )
