# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:ssd_triton"]
# # A Triton kernel
# The inside of a chunk, in one program of a GPU kernel.

# %% [markdown]
# ## The tools

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# %% tags=["export"]
import os

import torch
from jaxtyping import Complex
from torch import Tensor

from mamba3lite.models.ssd_complex import KernelUnavailable, _check_precision

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

# %%
from mamba3lite.models.ssd_triton import _PerChunkSSDTriton, _view_real_imag

# %% [markdown]
# ## Step one: decay

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _chunk_decay(A_re, A_im, BLOCK_C: tl.constexpr):
        """L[l, s] = exp(sum of A over s+1..l) for s <= l, else 0; two (C, C) tiles."""
        U = tl.cumsum(A_re, 0)
        V = tl.cumsum(A_im, 0)
        step = tl.arange(0, BLOCK_C)
        causal = step[:, None] >= step[None, :]
        # Select before exp: above the diagonal the exponent is positive and overflows.
        magnitude = tl.exp(tl.where(causal, U[:, None] - U[None, :], float("-inf")))
        angle = V[:, None] - V[None, :]
        return magnitude * tl.cos(angle), magnitude * tl.sin(angle)


# %% [markdown]
# ## Step two: scores

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _complex_dot(a_re, a_im, b_re, b_im, PRECISION: tl.constexpr):
        """a b for complex tiles given as halves: four real products, fp32 sums."""
        re = tl.dot(a_re, b_re, input_precision=PRECISION)
        re = tl.dot(-a_im, b_im, acc=re, input_precision=PRECISION)
        im = tl.dot(a_re, b_im, input_precision=PRECISION)
        im = tl.dot(a_im, b_re, acc=im, input_precision=PRECISION)
        return re, im


# %% [markdown]
# ## Steps three and four: the output and the state

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _ssd_per_chunk_fwd_kernel(
        B_re_ptr, B_im_ptr, C_re_ptr, C_im_ptr, X_re_ptr, X_im_ptr,
        A_re_ptr, A_im_ptr, D_re_ptr, D_im_ptr,
        Y_re_ptr, Y_im_ptr, S_re_ptr, S_im_ptr,
        n_chunks, n_heads,
        BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One chunk of one head: Y = ((C B^T) * L) X and S = X^T (decay_states * B).

        Grid (B, nc, H). Reads B, C (C, N), X (C, P), A_log and decay_states (C,), as
        contiguous halves of (B, nc, C, H, .); writes Y (C, P) of (B, nc, C, H, P) and
        S (P, N) of (B, nc, H, P, N).
        """
        chunk = tl.program_id(0).to(tl.int64) * n_chunks + tl.program_id(1)
        head = tl.program_id(2)
        step = tl.arange(0, BLOCK_C)
        n = tl.arange(0, BLOCK_N)
        p = tl.arange(0, BLOCK_P)
        row = (chunk * BLOCK_C + step) * n_heads + head  # of every (B, nc, C, H) tensor
        at_n = row[:, None] * BLOCK_N + n[None, :]
        at_p = row[:, None] * BLOCK_P + p[None, :]
        at_state = (chunk * n_heads + head) * BLOCK_P * BLOCK_N
        at_state += p[:, None] * BLOCK_N + n[None, :]

        B_re = tl.load(B_re_ptr + at_n)
        B_im = tl.load(B_im_ptr + at_n)
        C_re = tl.load(C_re_ptr + at_n)
        C_im = tl.load(C_im_ptr + at_n)
        X_re = tl.load(X_re_ptr + at_p)
        X_im = tl.load(X_im_ptr + at_p)
        D_re = tl.load(D_re_ptr + row)[:, None]
        D_im = tl.load(D_im_ptr + row)[:, None]

        L_re, L_im = _chunk_decay(
            tl.load(A_re_ptr + row), tl.load(A_im_ptr + row), BLOCK_C
        )
        G_re, G_im = _complex_dot(C_re, C_im, tl.trans(B_re), tl.trans(B_im), PRECISION)
        M_re = L_re * G_re - L_im * G_im
        M_im = L_re * G_im + L_im * G_re
        Y_re, Y_im = _complex_dot(M_re, M_im, X_re, X_im, PRECISION)
        tl.store(Y_re_ptr + at_p, Y_re)
        tl.store(Y_im_ptr + at_p, Y_im)

        K_re = D_re * B_re - D_im * B_im
        K_im = D_re * B_im + D_im * B_re
        S_re, S_im = _complex_dot(tl.trans(X_re), tl.trans(X_im), K_re, K_im, PRECISION)
        tl.store(S_re_ptr + at_state, S_re)
        tl.store(S_im_ptr + at_state, S_im)


# %% [markdown]
# ## What the kernel accepts

# %% tags=["export"]
_MAX_BLOCK = 256


def _interpreted() -> bool:
    """Whether triton runs its kernels on the CPU (TRITON_INTERPRET=1)."""
    return HAS_TRITON and not isinstance(_ssd_per_chunk_fwd_kernel, triton.JITFunction)


def _check_block_dims(P: int, N: int, chunk_size: int) -> None:
    """Refuse tiles that the kernel cannot hold: a side becomes one `tl.arange`.

    Raises: KernelUnavailable, a ValueError, naming the dimension.
    """
    for name, dim in {"P": P, "N": N, "chunk_size": chunk_size}.items():
        if dim > _MAX_BLOCK:
            fault = f"exceeds the {_MAX_BLOCK}-cap"
        elif dim < 1 or dim & (dim - 1):
            fault = "is not a power of two"
        elif dim < 16 and not _interpreted():
            fault = "is below 16, the smallest side of tl.dot"
        else:
            continue
        raise KernelUnavailable(
            f"per_chunk_ssd_triton: {name}={dim} {fault}. "
            "Use ssd_dispatch='pytorch' for this config."
        )


def _check_device(device: torch.device) -> None:
    """Refuse tensors that no kernel can reach.

    Raises: KernelUnavailable, a ValueError.
    """
    if device.type != "cuda" and not _interpreted():
        raise KernelUnavailable(
            f"per_chunk_ssd_triton: tensors are on {device}; the kernel takes CUDA "
            "tensors, or set TRITON_INTERPRET=1 before starting Python to run it on "
            "the CPU, slowly. Use ssd_dispatch='pytorch' for this device."
        )


def _check_triton() -> None:
    """Raises: ImportError when triton is not installed."""
    if not HAS_TRITON:
        raise ImportError(
            "per_chunk_ssd_triton needs triton, which is not installed: "
            "pip install triton, or use ssd_dispatch='pytorch'"
        )


def _check_chunks(named: dict[str, Tensor]) -> None:
    """Refuse dtypes, shapes and devices that do not fit each other.

    Raises: TypeError, ValueError, naming the argument.
    """
    for name, z in named.items():
        if z.dtype != torch.complex64:
            raise TypeError(
                f"per_chunk_ssd_triton: {name}: expected complex64, got {z.dtype}"
            )
    Xc, Bc = named["Xc"], named["Bc"]
    if Xc.ndim != 5 or Bc.ndim != 5:
        name = "Bc" if Bc.ndim != 5 else "Xc"
        raise ValueError(
            f"per_chunk_ssd_triton: {name} has shape {tuple(named[name].shape)}; wanted "
            f"(B, nc, C, H, {'N' if name == 'Bc' else 'P'})"
        )
    rows, states = tuple(Xc.shape[:4]), Bc.shape[-1]
    wanted = {"Bc": (*rows, states), "Cc": (*rows, states), "Xc": tuple(Xc.shape)}
    wanted |= {"A_log": rows, "decay_states": rows}
    for name, shape in wanted.items():
        if tuple(named[name].shape) != shape:
            raise ValueError(
                f"per_chunk_ssd_triton: {name} has shape {tuple(named[name].shape)}; "
                f"wanted {shape} to fit Xc of shape {tuple(Xc.shape)}"
            )
        if named[name].device != Xc.device:
            raise ValueError(
                f"per_chunk_ssd_triton: {name} is on {named[name].device} but Xc is on "
                f"{Xc.device}"
            )


# %% [markdown]
# ## The launch

# %% tags=["export"]
def _launch_option(name: str, default: int, allowed: tuple[int, ...]) -> int:
    """A launch parameter from the environment variable `name`.

    Raises: ValueError naming the variable, for what is not one of `allowed`.
    """
    text = os.environ.get(name, str(default))
    if not text.strip().isdecimal() or int(text) not in allowed:
        raise ValueError(
            f"{name} is {text!r}; it must be one of the integers "
            f"{', '.join(map(str, allowed))}"
        )
    return int(text)


def _per_chunk_ssd_triton_forward(
    Bc: Complex[Tensor, "B nc C H N"],
    Cc: Complex[Tensor, "B nc C H N"],
    Xc: Complex[Tensor, "B nc C H P"],
    A_log: Complex[Tensor, "B nc C H"],
    decay_states: Complex[Tensor, "B nc C H"],
    input_precision: str = "ieee",
) -> tuple[Complex[Tensor, "B nc C H P"], Complex[Tensor, "B nc H P N"]]:
    """Allocate the outputs, split the inputs into halves, launch, recombine.

    Raises:
        ImportError: triton is not installed.
        TypeError: an input is not complex64.
        KernelUnavailable: a tile does not fit this device.
        ValueError: an environment variable of the launch is not an allowed integer.

    Source: notebook 05, "The launch".
    """
    _check_triton()
    batch, n_chunks, chunk, heads, P = Xc.shape
    N = Bc.shape[-1]
    num_warps = _launch_option("TRITON_PER_CHUNK_NUM_WARPS", 4, (1, 2, 4, 8, 16, 32))
    num_stages = _launch_option("TRITON_PER_CHUNK_NUM_STAGES", 1, tuple(range(1, 9)))
    halves = [h for z in (Bc, Cc, Xc, A_log, decay_states) for h in _view_real_imag(z)]
    Y = Xc.real.new_empty(2, *Xc.shape)
    S = Xc.real.new_empty(2, batch, n_chunks, heads, P, N)
    try:
        with torch.cuda.device_of(Xc):
            _ssd_per_chunk_fwd_kernel[(batch, n_chunks, heads)](
                *halves, *Y, *S, n_chunks, heads,
                BLOCK_C=chunk, BLOCK_P=P, BLOCK_N=N, PRECISION=input_precision,
                num_warps=num_warps, num_stages=num_stages,
            )  # fmt: skip
    except triton.OutOfResources as error:
        raise KernelUnavailable(
            f"per_chunk_ssd_triton: P={P}, N={N}, chunk_size={chunk} do not fit this "
            f"GPU ({error}). Use ssd_dispatch='pytorch' for this config."
        ) from error
    return torch.complex(*Y), torch.complex(*S)


# %% [markdown]
# ## The whole function

# %% tags=["export"]
def per_chunk_ssd_triton(
    Bc: Complex[Tensor, "B nc C H N"],
    Cc: Complex[Tensor, "B nc C H N"],
    Xc: Complex[Tensor, "B nc C H P"],
    A_log: Complex[Tensor, "B nc C H"],
    decay_states: Complex[Tensor, "B nc C H"],
    *,
    input_precision: str = "ieee",
) -> tuple[Complex[Tensor, "B nc C H P"], Complex[Tensor, "B nc H P N"]]:
    """`per_chunk_ssd_pytorch` for complex64 chunks, its forward in one kernel.

    Args:
        Bc, Cc: write and read vectors, complex64. N, P and C are powers of two from
            16 (1 under the interpreter) to 256.
        Xc: input, complex64.
        A_log: log decay of each step, complex64, Re <= 0; small angles keep precision.
        decay_states: factor from each position to the right edge of its chunk, taken
            as given.
        input_precision: "ieee" for float32 products, "tf32" for the matrix units'
            faster ones with ten bits of mantissa. Sums are float32 in both.

    Returns: `(Y_diag, state)`, complex64. All five inputs get their gradients, from
        `per_chunk_ssd_pytorch`.

    Raises:
        ImportError: triton is not installed.
        TypeError: an input is not complex64.
        ValueError: shapes or devices that do not fit each other, an unknown precision
            or launch option; KernelUnavailable, a ValueError, for a tile that the kernel
            or this GPU cannot hold and for CPU tensors without the interpreter.

    Source: notebook 05, "The whole function".
    """
    _check_triton()
    named = {"Bc": Bc, "Cc": Cc, "Xc": Xc, "A_log": A_log, "decay_states": decay_states}
    _check_chunks(named)
    _check_precision("triton", input_precision)
    _check_block_dims(Xc.shape[-1], Bc.shape[-1], Xc.shape[2])
    _check_device(Xc.device)
    return _PerChunkSSDTriton.apply(Bc, Cc, Xc, A_log, decay_states, input_precision)
