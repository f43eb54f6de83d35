# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:ssd_triton"]
# # Complex autograd
# The per-chunk Triton kernel, and the gradient that goes with it.

# %% [markdown]
# ## The tools

# %% tags=["export"]
import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from mamba3lite.models.ssd_complex import per_chunk_ssd_pytorch


# %% [markdown]
# ## Two real tensors from one complex one

# %% tags=["export"]
def _view_real_imag(
    z: Complex[Tensor, "*shape"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """The real and the imaginary half of z, each a contiguous float32 tensor.

    Args: z: complex64. Its own halves are strided views; a kernel that walks a pointer
    would read the two interleaved.

    Raises: TypeError for any other dtype.

    Source: notebook 04, "Two real tensors from one complex one".
    """
    if z.dtype != torch.complex64:
        raise TypeError(f"expected complex64, got {z.dtype}")
    halves = torch.view_as_real(z.resolve_conj()).movedim(-1, 0).contiguous()
    return halves[0], halves[1]


# %% [markdown]
# ## Recompute and inject

# %%
def _per_chunk_ssd_triton_forward(
    Bc, Cc, Xc, A_log, decay_states, input_precision="ieee"
):
    return per_chunk_ssd_pytorch(Bc, Cc, Xc, A_log, decay_states)


# %% tags=["export"]
class _PerChunkSSDTriton(torch.autograd.Function):
    """The kernel forward; a backward that runs `per_chunk_ssd_pytorch` once more.

    Forward keeps the five inputs and nothing else. Backward computes the same two
    outputs again in PyTorch and lets autograd carry the incoming gradients through
    them.

    Source: notebook 04, "Recompute and inject".
    """

    @staticmethod
    def forward(ctx, Bc, Cc, Xc, A_log, decay_states, input_precision="ieee"):
        ctx.save_for_backward(Bc, Cc, Xc, A_log, decay_states)
        # An output that the loss does not use comes back as None, not as zeros.
        ctx.set_materialize_grads(False)
        return _per_chunk_ssd_triton_forward(
            Bc, Cc, Xc, A_log, decay_states, input_precision
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y_diag, grad_state):
        wanted = ctx.needs_input_grad[:5]
        leaves = [
            z.detach().requires_grad_(needed)
            for z, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            outputs = per_chunk_ssd_pytorch(*leaves)
        incoming = [
            torch.zeros_like(out) if grad is None else grad
            for out, grad in zip(outputs, (grad_y_diag, grad_state), strict=True)
        ]
        used = [z for z in leaves if z.requires_grad]
        found = iter(torch.autograd.grad(outputs, used, grad_outputs=incoming))
        return *(next(found) if needed else None for needed in wanted), None
