"""Is everything here, and do the kernels of this device compute the right thing?"""

import importlib.metadata
import platform
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import mamba3lite
from mamba3lite.models import batch_invariant, decode, ssd_triton
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise
from mamba3lite.models.transformer import Mamba3Transformer
from mamba3lite.reference import Shape, errors, oracle, random_inputs, with_gradients

SHAPE = Shape(B=2, T=150, H=2, D=64, N=64, chunk=64)  # ends inside a chunk
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
    for name, verdict, right in exact_decode(device):
        say(f"{name}: {verdict}")
        healthy &= right
    for (dispatch, precision), limits in LIMITS.items():
        name = f"{dispatch:>7} {precision}"
        if reason := why_not(dispatch, device):
            say(f"{name}: not checked, {reason}")
            continue
        found = scan_errors(dispatch, precision, device)
        worst = {key: found[key] for key, limit in allowed(limits).items()
                 if not found[key] <= limit}  # fmt: skip
        shown = ", ".join(f"{key} {error:.1e}" for key, error in found.items())
        say(f"{name}: {'wrong' if worst else 'right'} ({shown})")
        if worst:
            healthy = False
            say(advice(dispatch, precision, worst))
    return healthy


def exact_decode(device: torch.device) -> list[tuple[str, str, bool]]:
    """What exact decode does here, by precision: name, verdict, whether it is right.

    On a GPU rows of the scan and of products are compared with those of the training
    kernels, bit by bit; where some differ, exact decode is slower and still right. On a
    CPU a small model decodes and is compared with its full forward.
    """
    if device.type != "cuda":
        if decoded_rows_that_differ() == 0:
            return [("exact decode in windows", "the bits of a full forward", True)]
        advice = "the bits of a full forward are not reached; matrix products here are "
        return [("exact decode in windows", f"{advice}not reproducible", False)]
    if not ssd_triton.HAS_TRITON:
        return [("exact decode", "not checked, triton is not installed", True)]
    tiles = batch_invariant.tiles_agree(device)
    verdicts = []
    for precision in ("bf16", "tf32", "ieee"):
        sizes = (SHAPE.D, SHAPE.N, SHAPE.chunk, precision)
        kinds = (torch.bfloat16, torch.float32)
        if tiles and all(decode._bits_agree(device, *sizes, kind) for kind in kinds):
            verdict = "the bits of training, by row kernels"
        else:
            verdict = "slower here: row kernels differ from the training kernels, "
            verdict += "which scan the open chunk instead"
        verdicts.append((f"exact decode in {precision}", verdict, True))
    return verdicts


@torch.no_grad()
def decoded_rows_that_differ() -> int:
    """Tokens of 40 whose decoded logits differ from those of a full forward."""
    torch.manual_seed(0)
    model = Mamba3Transformer(
        {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2, "head_dim": 8,
         "state_dim": 8, "chunk_size": 16, "ffn_dim": 64, "batch_invariant": True}
    )  # fmt: skip
    tokens, slot = torch.randint(64, (1, 40)), torch.zeros(1, dtype=torch.int32)
    full, cache = model(tokens)[0], decode.ExactCache(model, 1)
    steps = [decode.exact_step(model, token, cache, slot) for token in tokens.T]
    return int((torch.cat(steps) != full).any(-1).sum())


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
    inputs = random_inputs(SHAPE, device)
    if precision == "bf16":
        inputs = [rounded_to_bf16(z) if i != 1 else z for i, z in enumerate(inputs)]
    scan = partial(
        ssd_complex_chunkwise,
        chunk_size=SHAPE.chunk,
        ssd_dispatch=dispatch,
        precision=precision,
    )
    got, wanted = with_gradients(scan, inputs)(), oracle("scan", inputs, SHAPE)
    return errors("scan", got, wanted, SHAPE)


def rounded_to_bf16(z: Tensor) -> Tensor:
    """The nearest numbers that bfloat16 holds, half by half for complex ones."""
    if z.is_complex():
        return torch.view_as_complex(torch.view_as_real(z).bfloat16().float())
    return z.bfloat16().float()


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
