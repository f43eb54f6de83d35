# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:transformer"]
# # A block, and a language model
# The language model: embedding, a stack of Mamba-3-Lite blocks, and a tied output head.

# %% [markdown]
# ## A mixer across heads

# %% tags=["export:mimo"]
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class MIMO(nn.Module):
    """Mix the channels of all heads with one dense matrix, the identity at first.

    A linear map between two linear maps: a head mixer, not the rank-R recurrence that
    the Mamba-3 paper calls MIMO.

    Args:
        n_heads: number of heads H.
        head_dim: channels per head D.

    Shapes: (B, T, H, D) -> (B, T, H, D), in the dtype of the weight.

    Source: notebook 07, "A mixer across heads".
    """

    def __init__(self, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(n_heads * head_dim))
        self.weight._identity_init = True  # the model's initializer leaves it alone

    def forward(self, y: Float[Tensor, "B T H D"]) -> Float[Tensor, "B T H D"]:
        return F.linear(y.flatten(-2), self.weight).view_as(y)

# %% [markdown]
# ## The configuration

# %% tags=["export"]
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float, Int, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mamba3lite.models.mamba_block import Mamba3Block


@dataclass
class ModelConfig:
    """The shape of a model and how it computes.

    Raises:
        TypeError: a field that does not exist.
        ValueError: a value out of range, naming field, value and what is allowed.

    Source: notebook 07, "The configuration".
    """

    vocab_size: int = 50257
    d_model: int = 1024
    n_layers: int = 28
    n_heads: int = 16
    head_dim: int = 64
    state_dim: int = 64
    chunk_size: int = 64
    ssd_dispatch: str = "pytorch"
    ssd_precision: str = "tf32"
    ffn_dim: int = 2048
    max_seq_len: int = 2048
    weight_tying: bool = True
    rms_norm_eps: float = 1e-5
    init_std: float = 0.02
    grad_checkpoint: bool = False
    batch_invariant: bool = False
    a_init: str = "decay"

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }
    _CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "ssd_dispatch": ("pytorch", "triton", "fused"),
        "ssd_precision": ("ieee", "tf32", "bf16"),
        "a_init": ("decay", "spectrum"),
    }

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, type(field.default), getattr(self, field.name))
        if self.state_dim % 2:
            raise ValueError(f"state_dim is {self.state_dim}; it must be even")
        if self.batch_invariant:
            raise ValueError(
                "batch_invariant is True; this version of mamba3lite allows False only"
            )

    def _check(self, name: str, kind: type, value: object) -> None:
        if name in self._CHOICES:
            if value not in self._CHOICES[name]:
                allowed = ", ".join(self._CHOICES[name])
                raise ValueError(f"{name} is {value!r}; wanted one of {allowed}")
        elif kind is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; wanted True or False")
        elif kind is int:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; wanted an integer, at least 1")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r}; wanted a number above 0")
        elif not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value!r}; wanted a finite number above 0")

    @classmethod
    def of(cls, config: "ModelConfig | Mapping[str, Any]") -> "ModelConfig":
        """A config as it is, or one built from a mapping of its fields."""
        return cls(**config) if isinstance(config, Mapping) else config

# %% [markdown]
# ## The block

# %% tags=["export:mamba_block"]
import math
import warnings

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mamba3lite.models.mimo import MIMO
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise


def _unavailable(dispatch: str) -> str | None:
    """Why this dispatch cannot run here, or None when it can."""
    if dispatch == "pytorch":
        return None
    return f"this version of mamba3lite has no {dispatch} kernel"


def init_decay(n_heads: int, a_init: str) -> Complex[Tensor, "H"]:
    """The complex decay rate A that every head starts from.

    Args:
        n_heads: number of heads H.
        a_init: "decay" is A = -1 on every head. "spectrum" gives head h the angle
            Im A = pi h / H and Re A = -10^(-3 + 3 frac(0.618 h)), so that rates and
            angles are spread and uncorrelated.

    Returns: A, complex64, Re(A) < 0.

    Source: notebook 07, "The block".
    """
    if a_init == "decay":
        return torch.full((n_heads,), -1.0, dtype=torch.complex64)
    head = torch.arange(n_heads, dtype=torch.float64)
    rate = 10.0 ** (-3 + 3 * (0.618 * head).frac())
    return torch.complex(-rate, math.pi * head / n_heads).to(torch.complex64)


class Mamba3Block(nn.Module):
    """One pre-norm block: the scan and a head mixer, then a SwiGLU, each residual.

    Args:
        cfg: a `ModelConfig` or a mapping of its fields; never changed.
        layer_idx: position in the stack, named in warnings.

    Shapes: (B, T, d_model) -> (B, T, d_model).

    Raises: TypeError when A is no longer complex.

    Source: notebook 07, "The block".
    """

    def __init__(self, cfg, layer_idx: int = 0) -> None:
        super().__init__()
        from mamba3lite.models.transformer import ModelConfig  # it imports this module

        self.cfg = cfg = ModelConfig.of(cfg)
        self.layer_idx = layer_idx
        heads, width = cfg.n_heads, cfg.n_heads * cfg.head_dim
        self._columns = [width, *[heads * cfg.state_dim] * 4, heads]
        self.norm_ssd = nn.RMSNorm(cfg.d_model, cfg.rms_norm_eps)
        self.in_proj = nn.Linear(cfg.d_model, sum(self._columns), bias=False)
        self.A = nn.Parameter(init_decay(heads, cfg.a_init))
        self.mimo = MIMO(heads, cfg.head_dim)
        self.out_proj = nn.Linear(width, cfg.d_model, bias=False)
        self.norm_ffn = nn.RMSNorm(cfg.d_model, cfg.rms_norm_eps)
        self.ffn_gate_up = nn.Linear(cfg.d_model, 2 * cfg.ffn_dim, bias=False)
        self.ffn_down = nn.Linear(cfg.ffn_dim, cfg.d_model, bias=False)
        self._triton_fallback_warned = False

    def forward(
        self,
        u: Float[Tensor, "B T d_model"],
        reset: Bool[Tensor, "B T"] | None = None,
        initial_states: Complex[Tensor, "B H D N"] | None = None,
        return_final_states: bool = False,
    ):
        """Apply the block; with return_final_states also return the scan's state."""
        if self.cfg.grad_checkpoint and self.training:
            return checkpoint(
                self._forward_impl,
                *(u, reset, initial_states, return_final_states),
                use_reentrant=False,
            )
        return self._forward_impl(u, reset, initial_states, return_final_states)

    def _forward_impl(self, u, reset, initial_states, return_final_states):
        y, final_states = self._ssd_with_dispatch(
            self.in_proj(self.norm_ssd(u)), reset, initial_states=initial_states
        )
        mixed = self.mimo(y.to(self.mimo.weight.dtype))
        u = u + self.out_proj(mixed.flatten(-2))
        gate, up = self.ffn_gate_up(self.norm_ffn(u)).chunk(2, dim=-1)
        u = u + self.ffn_down(F.silu(gate) * up)
        return (u, final_states) if return_final_states else u

    def _ssd_with_dispatch(
        self,
        proj: Float[Tensor, "B T columns"],
        reset: Bool[Tensor, "B T"] | None = None,
        *,
        initial_states: Complex[Tensor, "B H D N"] | None = None,
    ) -> tuple[Float[Tensor, "B T H D"], Complex[Tensor, "B H D N"]]:
        """Slice the projection and scan it: the only place that does either."""
        if not self.A.is_complex():
            raise TypeError(
                f"layer {self.layer_idx}: A is {self.A.dtype}, its rotation is gone; "
                "keep parameters in float32 and use autocast for bfloat16"
            )
        dispatch = self._usable_dispatch()
        # torch.complex refuses bf16, and the state is kept in float32 in any case.
        x, B_re, B_im, C_re, C_im, dt = proj.float().split(self._columns, dim=-1)
        heads = (self.cfg.n_heads, -1)
        return ssd_complex_chunkwise(
            x.unflatten(-1, heads),
            self.A,
            torch.complex(B_re, B_im).unflatten(-1, heads),
            torch.complex(C_re, C_im).unflatten(-1, heads),
            dt,
            self.cfg.chunk_size,
            dispatch,
            initial_states=initial_states,
            return_final_states=True,
            reset=reset,
        )

    def _usable_dispatch(self) -> str:
        """The configured dispatch, or "pytorch" with one warning when it cannot run."""
        reason = _unavailable(self.cfg.ssd_dispatch)
        if reason is None:
            return self.cfg.ssd_dispatch
        self._warn_fallback(reason)
        return "pytorch"

    @torch.compiler.assume_constant_result
    def _warn_fallback(self, reason: str) -> None:
        if not self._triton_fallback_warned:
            self._triton_fallback_warned = True
            warnings.warn(
                f"layer {self.layer_idx}: ssd_dispatch={self.cfg.ssd_dispatch!r} "
                f"unavailable ({reason}); falling back to 'pytorch'",
                RuntimeWarning,
                stacklevel=2,
            )

# %% [markdown]
# ## The loss without the logits

# %% tags=["export"]
_LOGITS_AT_ONCE = 2**24  # elements; 64 MiB in float32


def _cross_entropy_sum(
    hidden: Float[Tensor, "B T d_model"],
    weight: Float[Tensor, "V d_model"],
    targets: Int[Tensor, "B T"],
) -> Float[Tensor, ""]:
    """Sum of the cross-entropy over valid targets; logits of a few steps at a time.

    A chunk's logits are computed again in the backward pass instead of kept, so that
    memory holds at most one chunk of them.

    Args:
        hidden: output of the last norm.
        weight: output embedding.
        targets: token ids already shifted; -100 is ignored.

    Source: notebook 07, "The loss without the logits".
    """

    def chunk_loss(hidden, targets):
        logits = F.linear(hidden, weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    batch, time = targets.shape
    steps = max(1, _LOGITS_AT_ONCE // (batch * weight.shape[0]))
    if steps >= time:
        return chunk_loss(hidden, targets)
    chunks = zip(hidden.split(steps, 1), targets.split(steps, 1), strict=True)
    return sum(checkpoint(chunk_loss, h, t, use_reentrant=False) for h, t in chunks)

# %% [markdown]
# ## The whole model

# %% tags=["export"]
class Mamba3Transformer(nn.Module):
    """Embedding, a stack of `Mamba3Block`, a final norm and an output head.

    No positional embedding: order enters only through decay and rotation.

    Args:
        cfg: a `ModelConfig` or a mapping of its fields; never changed.

    Source: notebook 07, "The whole model".
    """

    def __init__(self, cfg) -> None:
        super().__init__()
        self.cfg = cfg = ModelConfig.of(cfg)
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.layers = nn.ModuleList(Mamba3Block(cfg, i) for i in range(cfg.n_layers))
        self.norm_f = nn.RMSNorm(cfg.d_model, cfg.rms_norm_eps)
        self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        if cfg.weight_tying:
            self.lm_head.weight = self.embed.weight
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Normal(0, init_std) for matrices; what writes into the residual, narrower."""
        residual_std = self.cfg.init_std / (2 * self.cfg.n_layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.ndim < 2 or getattr(weight, "_identity_init", False):
                continue
            into_residual = name.endswith(("out_proj.weight", "ffn_down.weight"))
            weight.normal_(0.0, residual_std if into_residual else self.cfg.init_std)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"] | None = None,
        doc_ids: Int[Tensor, "B T"] | None = None,
        reduction: str = "mean",
        states: list[Complex[Tensor, "B H D N"]] | None = None,
        return_states: bool = False,
    ):
        """Logits, or the loss when targets are given.

        Args:
            tokens: token ids in [0, vocab_size).
            targets: the token after each token, already shifted; -100 is ignored.
            doc_ids: the document of each token; the state is dropped wherever they
                change, so that packed documents never see one another.
            reduction: "mean" over valid targets (0 when there is none), or "sum" for
                `(loss_sum, n_valid)`.
            states: one state per layer to continue from, as return_states gave them.
            return_states: return `(logits, states)`; not together with targets.

        Returns:
            logits (B, T, V) float32; a scalar loss; `(loss_sum, n_valid)`; or
            `(logits, states)` with states a list of (B, H, D, N) complex64.

        Raises: ValueError for an unknown reduction, shapes that differ, ids out of
            range (on a CPU, in eager mode), or targets together with return_states.
        """
        self._check_call(tokens, targets, doc_ids, reduction, return_states)
        hidden, states = self._hidden(tokens, doc_ids, states)
        if targets is None:
            logits = self.lm_head(hidden).float()
            return (logits, states) if return_states else logits
        loss_sum = _cross_entropy_sum(hidden, self.lm_head.weight, targets)
        n_valid = (targets != -100).sum()
        if reduction == "sum":
            return loss_sum, n_valid
        return loss_sum / n_valid.clamp(min=1)

    def _hidden(self, tokens, doc_ids, states):
        """The last norm's output, and the state that every layer ends in."""
        reset = None
        if doc_ids is not None:
            reset = F.pad(doc_ids[:, 1:] != doc_ids[:, :-1], (1, 0))
        if states is None:
            states = [None] * len(self.layers)
        u, final_states = self.embed(tokens), []
        for layer, state in zip(self.layers, states, strict=True):
            u, state = layer(u, reset, state, return_final_states=True)
            final_states.append(state)
        return self.norm_f(u), final_states

    def _check_call(self, tokens, targets, doc_ids, reduction, return_states) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; wanted 'mean' or 'sum'")
        if targets is not None and return_states:
            raise ValueError("return_states goes with logits; leave targets out")
        for name, ids in {"targets": targets, "doc_ids": doc_ids}.items():
            if ids is not None and ids.shape != tokens.shape:
                raise ValueError(
                    f"{name} has shape {tuple(ids.shape)}; wanted {tuple(tokens.shape)}"
                    ", one for every token"
                )
        if tokens.device.type != "cpu" or torch.compiler.is_compiling():
            return  # reading the values would wait for the device
        self._check_ids("tokens", tokens)
        if targets is not None:
            self._check_ids("targets", targets[targets != -100])

    def _check_ids(self, name: str, ids: Shaped[Tensor, "..."]) -> None:
        vocab = self.cfg.vocab_size
        if ids.numel() and not 0 <= ids.min() <= ids.max() < vocab:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"{name} holds the id {bad}; wanted 0 to {vocab - 1}")
