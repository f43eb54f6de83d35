# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:ssd_fused"]
# # Rotation, fused
# The whole scan on a GPU in three launches forward and three backward.

# %% [markdown]
# ## The tools

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# %% tags=["export"]
import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from mamba3lite.models.ssd_complex import KernelUnavailable, _check_precision
from mamba3lite.models.ssd_triton import (
    HAS_TRITON,
    _check_device,
    _check_triton,
    _interpreted,
)

if HAS_TRITON:
    import triton
    import triton.language as tl

# %% [markdown]
# ## What the matrix units read

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _operand(z, PRECISION: tl.constexpr, EMULATE: tl.constexpr):
        """z as a product reads it: rounded to bfloat16 or to tf32, or in float32.

        EMULATE keeps a rounded bfloat16 in float32; the interpreter multiplies bfloat16
        wrongly. tf32 is rounded here because the units only cut.
        """
        if PRECISION == "ieee":
            return z.to(tl.float32)
        elif PRECISION == "tf32":
            bits = z.to(tl.float32).to(tl.int32, bitcast=True)
            return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        elif EMULATE:
            bits = z.to(tl.float32).to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            return bits.to(tl.float32, bitcast=True)
        else:
            return z.to(tl.bfloat16)

    @triton.jit
    def _dot(a, b, acc, PRECISION: tl.constexpr):
        """acc + a b in float32; a and b come from `_operand`."""
        if PRECISION == "bf16":
            return tl.dot(a, b, acc=acc)
        else:
            return tl.dot(a, b, acc=acc, input_precision=PRECISION)


# %% [markdown]
# ## Gates

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _softplus(dt):
        """log(1 + exp(dt)), accurate also where it is tiny."""
        e = tl.exp(-tl.abs(dt))
        series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
        return tl.maximum(dt, 0.0) + tl.where(e < 1e-3, series, tl.log(1.0 + e))

    @triton.jit
    def _gates(
        dt_ptr, reset_ptr, A_ptr, h, at, here, W, HAS_RESET: tl.constexpr
    ):  # fmt: skip
        """dt, step size, log decay u + i v, and the number of resets up to each step.

        The angle v is within half a turn. Steps past the end, where `here` is false,
        neither decay nor turn, nor does the step of a reset: what it forgets is masked.
        """
        A_re = tl.load(A_ptr + 2 * h)
        A_im = tl.load(A_ptr + 2 * h + 1)
        dt = tl.load(dt_ptr + at * W, mask=here, other=0.0).to(tl.float32)
        delta = _softplus(dt)
        counts = here
        document = tl.zeros_like(at)
        if HAS_RESET:
            fresh = tl.load(reset_ptr + at, mask=here, other=0).to(tl.int32)
            document = tl.cumsum(fresh, 0)
            counts = here & (fresh == 0)
        delta = tl.where(counts, delta, 0.0)
        u, v = delta * A_re, delta * A_im
        # 2 pi in two parts, the first of few bits, so that turns times it is exact.
        turns = tl.floor(v * 0.15915494309189535 + 0.5)
        v = (v - turns * 6.28125) - turns * 0.0019353071795864769
        return dt, delta, u, v, document

    @triton.jit
    def _decay(U, document, BLOCK_C: tl.constexpr):
        """exp(U[l] - U[s]) for s <= l in one document, else 0."""
        step = tl.arange(0, BLOCK_C)
        seen = step[:, None] >= step[None, :]
        seen = seen & (document[:, None] == document[None, :])
        # Select before exp: above the diagonal the exponent is positive and overflows.
        return tl.exp(tl.where(seen, U[:, None] - U[None, :], float("-inf")))

    @triton.jit
    def _edges(U, document):
        """Decay from the chunk's entry to each step, to its end, and all through."""
        U_last, last = tl.min(U, 0), tl.max(document, 0)
        grown = tl.where(document == 0, tl.exp(U), 0.0)
        left = tl.where(document == last, tl.exp(U_last - U), 0.0)
        return grown, left, tl.where(last == 0, tl.exp(U_last), 0.0)


# %% [markdown]
# ## Rotation in registers

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _turned(ptr, width, at, here, turn_re, turn_im):
        """A complex tile, its halves `width` columns apart, times turn, row by row."""
        re = tl.load(ptr + at, mask=here[:, None], other=0.0).to(tl.float32)
        im = tl.load(ptr + width + at, mask=here[:, None], other=0.0).to(tl.float32)
        turn_re, turn_im = turn_re[:, None], turn_im[:, None]
        return re * turn_re - im * turn_im, re * turn_im + im * turn_re

    @triton.jit
    def _store_turned(ptr, width, at, here, re, im, turn_re, turn_im):
        """The way back: (re + i im) times turn, stored as two halves."""
        turn_re, turn_im = turn_re[:, None], turn_im[:, None]
        kind = ptr.dtype.element_ty
        back_re, back_im = re * turn_re - im * turn_im, re * turn_im + im * turn_re
        tl.store(ptr + at, back_re.to(kind), mask=here[:, None])
        tl.store(ptr + width + at, back_im.to(kind), mask=here[:, None])


# %% [markdown]
# ## States between chunks

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _chunk_sum(
        proj_ptr, A_ptr, reset_ptr, dy_ptr, S_re, S_im, h, first, n, d, T, H, W,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        REVERSE: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """The (n, d) tile of a state, carried through one chunk that adds to it.

        Forward, S becomes e^L S + sum_s e^(L - L_s) B_s x_s with L_s the summed log
        decay and L its total; in reverse, a gradient becomes
        e^conj(L) S + sum_l e^conj(L_l) conj(C_l) dy_l.
        Also returns L as two numbers.
        """
        step = tl.arange(0, BLOCK_C)
        here = first + step < T
        base = proj_ptr + first * W
        _, _, u, v, document = _gates(
            base + H * (D + 4 * N) + h, reset_ptr + first, A_ptr, h, step, here, W,
            HAS_RESET,
        )  # fmt: skip
        V, V_last = tl.cumsum(v, 0), tl.sum(v, 0)
        grown, left, keep = _edges(tl.cumsum(u, 0), document)
        if REVERSE:
            size, angle = grown, V
            column = H * (D + 2 * N) + h * N
            x_ptr = dy_ptr + first * H * D + step[:, None] * H * D
        else:
            size, angle = left, V_last - V
            column = H * D + h * N
            x_ptr = base + step[:, None] * W
        x = tl.load(x_ptr + h * D + d[None, :], mask=here[:, None], other=0.0)
        K_re, K_im = _turned(
            base + column, H * N, step[:, None] * W + n[None, :], here,
            size * tl.cos(angle), size * tl.sin(angle),
        )  # fmt: skip
        keep_re, keep_im = keep * tl.cos(V_last), keep * tl.sin(V_last)
        if REVERSE:
            K_im, keep_im = -K_im, -keep_im
        S_re, S_im = S_re * keep_re - S_im * keep_im, S_re * keep_im + S_im * keep_re
        x = _operand(x, PRECISION, EMULATE)
        K_re = tl.trans(_operand(K_re, PRECISION, EMULATE))
        K_im = tl.trans(_operand(K_im, PRECISION, EMULATE))
        S_re, S_im = _dot(K_re, x, S_re, PRECISION), _dot(K_im, x, S_im, PRECISION)
        return S_re, S_im, keep_re, keep_im

    @triton.jit
    def _states_kernel(
        proj_ptr, A_ptr, reset_ptr, dy_ptr, edge_ptr, states_ptr, keep_ptr, out_ptr,
        T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WALK: tl.constexpr,
        REVERSE: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """States of one (batch, head), a (BLOCK_N, BLOCK_D) tile of them a program.

        WALK: one program takes all chunks in turn, from `edge` on; it stores the state
        that enters each, and the last one in `out`. Otherwise a program takes one chunk and
        stores what it adds to a zero state, and the factor by which it multiplies one;
        `_pass_kernel` does the rest. REVERSE: gradients, from the last chunk back.
        """
        parts: tl.constexpr = (D // BLOCK_D) * (N // BLOCK_N)
        part = tl.program_id(0) % parts
        sequence = tl.program_id(0) // parts
        b, h = sequence // H, sequence % H
        d = part % (D // BLOCK_D) * BLOCK_D + tl.arange(0, BLOCK_D)
        n = part // (D // BLOCK_D) * BLOCK_N + tl.arange(0, BLOCK_N)
        proj_ptr += b.to(tl.int64) * T * W
        reset_ptr += b.to(tl.int64) * T
        dy_ptr += b.to(tl.int64) * T * H * D
        at_edge = sequence.to(tl.int64) * D * N * 2
        at_edge += (d[None, :] * N + n[:, None]) * 2
        tile = n[:, None] * D + d[None, :]
        S_re = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        S_im = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        if WALK and HAS_EDGE:
            S_re = tl.load(edge_ptr + at_edge)
            S_im = tl.load(edge_ptr + at_edge + 1)
        kind = states_ptr.dtype.element_ty
        start, stop = 0, n_chunks
        if not WALK:
            start = tl.program_id(1)
            stop = start + 1
        for i in range(start, stop):
            chunk = i
            if WALK and REVERSE:
                chunk = n_chunks - 1 - i
            index = (b.to(tl.int64) * n_chunks + chunk) * H + h
            if WALK:
                tl.store(states_ptr + index * 2 * N * D + tile, S_re.to(kind))
                tl.store(states_ptr + (index * 2 + 1) * N * D + tile, S_im.to(kind))
            S_re, S_im, keep_re, keep_im = _chunk_sum(
                proj_ptr, A_ptr, reset_ptr, dy_ptr, S_re, S_im, h,
                chunk.to(tl.int64) * BLOCK_C, n, d, T, H, W,
                D, N, BLOCK_C, REVERSE, HAS_RESET, PRECISION, EMULATE,
            )  # fmt: skip
            if not WALK:
                tl.store(states_ptr + index * 2 * N * D + tile, S_re)
                tl.store(states_ptr + (index * 2 + 1) * N * D + tile, S_im)
                tl.store(keep_ptr + 2 * index, keep_re)
                tl.store(keep_ptr + 2 * index + 1, keep_im)
        if WALK:
            tl.store(out_ptr + at_edge, S_re)
            tl.store(out_ptr + at_edge + 1, S_im)

    @triton.jit
    def _pass_kernel(
        added_ptr, keep_ptr, edge_ptr, states_ptr, out_ptr, H, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
        REVERSE: tl.constexpr, HAS_EDGE: tl.constexpr,
    ):  # fmt: skip
        """What enters each chunk, from what each chunk adds and keeps.

        Grid (B H, D N / BLOCK): a program passes BLOCK numbers of a state along.
        """
        sequence = tl.program_id(0)
        b, h = sequence // H, sequence % H
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # n D + d
        at_edge = sequence.to(tl.int64) * D * N * 2 + (at % D * N + at // D) * 2
        S_re = tl.zeros((BLOCK,), tl.float32)
        S_im = tl.zeros((BLOCK,), tl.float32)
        if HAS_EDGE:
            S_re = tl.load(edge_ptr + at_edge)
            S_im = tl.load(edge_ptr + at_edge + 1)
        kind = states_ptr.dtype.element_ty
        for i in range(0, n_chunks):
            chunk = i
            if REVERSE:
                chunk = n_chunks - 1 - i
            index = (b.to(tl.int64) * n_chunks + chunk) * H + h
            keep_re = tl.load(keep_ptr + 2 * index)
            keep_im = tl.load(keep_ptr + 2 * index + 1)
            at_re = index * 2 * N * D + at
            tl.store(states_ptr + at_re, S_re.to(kind))
            tl.store(states_ptr + at_re + N * D, S_im.to(kind))
            add_re = tl.load(added_ptr + at_re)
            add_im = tl.load(added_ptr + at_re + N * D)
            S_re, S_im = (
                S_re * keep_re - S_im * keep_im + add_re,
                S_re * keep_im + S_im * keep_re + add_im,
            )
        tl.store(out_ptr + at_edge, S_re)
        tl.store(out_ptr + at_edge + 1, S_im)


# %% [markdown]
# ## The outputs

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _keys_queries(
        base, H, W, h, n, here, cos, sin, D: tl.constexpr, N: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        """k = (Re, Im) of e^(-iV) B, q = (Re, -Im) of e^(iV) C; columns n of each."""
        at = tl.arange(0, BLOCK_C)[:, None] * W + h * N + n[None, :]
        k_re, k_im = _turned(base + H * D, H * N, at, here, cos, -sin)
        q_re, q_im = _turned(base + H * (D + 2 * N), H * N, at, here, cos, sin)
        return k_re, k_im, q_re, -q_im

    @triton.jit
    def _add_scores(
        M, k_re, k_im, q_re, q_im, PRECISION: tl.constexpr, EMULATE: tl.constexpr
    ):
        """M + q k^T, one real product of vectors twice as long."""
        q_re, k_re = (
            _operand(q_re, PRECISION, EMULATE),
            _operand(k_re, PRECISION, EMULATE),
        )
        q_im, k_im = (
            _operand(q_im, PRECISION, EMULATE),
            _operand(k_im, PRECISION, EMULATE),
        )
        M = _dot(q_re, tl.trans(k_re), M, PRECISION)
        return _dot(q_im, tl.trans(k_im), M, PRECISION)

    @triton.jit
    def _output_kernel(
        proj_ptr, A_ptr, reset_ptr, states_ptr, y_ptr, T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """y of one chunk and head: from its own tokens, and from the entering state.

        Grid (B nc H), heads fastest: neighbors read neighboring columns of one row.
        """
        h, chunk = tl.program_id(0) % H, tl.program_id(0) // H
        b = chunk // n_chunks
        first = (chunk % n_chunks).to(tl.int64) * BLOCK_C
        step, d = tl.arange(0, BLOCK_C), tl.arange(0, D)
        here = first + step < T
        token = b.to(tl.int64) * T + first
        base = proj_ptr + token * W
        _, _, u, v, document = _gates(
            base + H * (D + 4 * N) + h, reset_ptr + token, A_ptr, h, step, here, W,
            HAS_RESET,
        )  # fmt: skip
        U, V = tl.cumsum(u, 0), tl.cumsum(v, 0)
        cos, sin = tl.cos(V), tl.sin(V)
        G_ptr = states_ptr + (chunk.to(tl.int64) * H + h) * 2 * N * D
        Y = tl.zeros((BLOCK_C, D), tl.float32)
        M = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
        for n0 in range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            k_re, k_im, q_re, q_im = _keys_queries(
                base, H, W, h, n, here, cos, sin, D, N, BLOCK_C
            )
            M = _add_scores(M, k_re, k_im, q_re, q_im, PRECISION, EMULATE)
            G_re = tl.load(G_ptr + n[:, None] * D + d[None, :])
            G_im = tl.load(G_ptr + N * D + n[:, None] * D + d[None, :])
            q_re, G_re = (
                _operand(q_re, PRECISION, EMULATE),
                _operand(G_re, PRECISION, EMULATE),
            )
            q_im, G_im = (
                _operand(q_im, PRECISION, EMULATE),
                _operand(G_im, PRECISION, EMULATE),
            )
            Y = _dot(q_im, G_im, _dot(q_re, G_re, Y, PRECISION), PRECISION)
        x_at = step[:, None] * W + h * D + d[None, :]
        x = tl.load(base + x_at, mask=here[:, None], other=0.0)
        P = _operand(M * _decay(U, document, BLOCK_C), PRECISION, EMULATE)
        Y = Y * _edges(U, document)[0][:, None]
        Y = _dot(P, _operand(x, PRECISION, EMULATE), Y, PRECISION)
        y_at = (token * H + h) * D + step[:, None] * H * D + d[None, :]
        tl.store(y_ptr + y_at, Y.to(y_ptr.dtype.element_ty), mask=here[:, None])


# %% [markdown]
# ## The gradients

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _total(z):
        """The sum of a tile."""
        return tl.sum(tl.sum(z, 1), 0)

    @triton.jit
    def _backward_kernel(
        proj_ptr, A_ptr, reset_ptr, states_ptr, dstates_ptr, dy_ptr, dproj_ptr, dA_ptr,
        T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """Every gradient of one chunk and head, columns of dproj and a share of dA.

        From dy, the state G that entered the chunk and the gradient E of the state that
        left it. Grid (B nc H), heads fastest.
        """
        h, chunk = tl.program_id(0) % H, tl.program_id(0) // H
        b = chunk // n_chunks
        first = (chunk % n_chunks).to(tl.int64) * BLOCK_C
        step, d = tl.arange(0, BLOCK_C), tl.arange(0, D)
        here = first + step < T
        token = b.to(tl.int64) * T + first
        base, dbase = proj_ptr + token * W, dproj_ptr + token * W
        dt, delta, u, v, document = _gates(
            base + H * (D + 4 * N) + h, reset_ptr + token, A_ptr, h, step, here, W,
            HAS_RESET,
        )  # fmt: skip
        U, V = tl.cumsum(u, 0), tl.cumsum(v, 0)
        cos, sin = tl.cos(V), tl.sin(V)
        V_last = tl.sum(v, 0)
        cos_last, sin_last = tl.cos(V_last), tl.sin(V_last)
        grown, left, keep = _edges(U, document)
        grown, left = grown[:, None], left[:, None]

        x_at = step[:, None] * W + h * D + d[None, :]
        x = tl.load(base + x_at, mask=here[:, None], other=0.0)
        x = _operand(x, PRECISION, EMULATE)
        y_at = (token * H + h) * D + step[:, None] * H * D + d[None, :]
        dy = tl.load(dy_ptr + y_at, mask=here[:, None], other=0.0)
        dy = _operand(dy, PRECISION, EMULATE)
        M = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
        dM = _dot(dy, tl.trans(x), M, PRECISION)
        for n0 in range(0, N, BLOCK_N):
            k_re, k_im, q_re, q_im = _keys_queries(
                base, H, W, h, n0 + tl.arange(0, BLOCK_N), here, cos, sin, D, N, BLOCK_C
            )
            M = _add_scores(M, k_re, k_im, q_re, q_im, PRECISION, EMULATE)
        L = _decay(U, document, BLOCK_C)
        dM = _operand(dM * L, PRECISION, EMULATE)
        P = tl.trans(_operand(M * L, PRECISION, EMULATE))
        dx = _dot(P, dy, tl.zeros((BLOCK_C, D), tl.float32), PRECISION)

        dU = tl.zeros((BLOCK_C,), tl.float32)
        dV = tl.zeros((BLOCK_C,), tl.float32)
        dU_last, dV_last = 0.0, 0.0
        zero = tl.zeros((BLOCK_C, BLOCK_N), tl.float32)
        state_at = (chunk.to(tl.int64) * H + h) * 2 * N * D
        for n0 in range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            k_re, k_im, q_re, q_im = _keys_queries(
                base, H, W, h, n, here, cos, sin, D, N, BLOCK_C
            )
            at = step[:, None] * W + h * N + n[None, :]
            tile = state_at + n[:, None] * D + d[None, :]
            # What the outputs say about the queries.
            G_re = tl.load(states_ptr + tile).to(tl.float32)
            G_im = tl.load(states_ptr + tile + N * D).to(tl.float32)
            dq_re = tl.trans(_operand(G_re, PRECISION, EMULATE))
            dq_im = tl.trans(_operand(G_im, PRECISION, EMULATE))
            dq_re = _dot(dy, dq_re, zero, PRECISION) * grown
            dq_im = _dot(dy, dq_im, zero, PRECISION) * grown
            dq_re = _dot(dM, _operand(k_re, PRECISION, EMULATE), dq_re, PRECISION)
            dq_im = _dot(dM, _operand(k_im, PRECISION, EMULATE), dq_im, PRECISION)
            dU += tl.sum(dq_re * q_re + dq_im * q_im, 1)
            dV += tl.sum(dq_re * q_im - dq_im * q_re, 1)
            _store_turned(
                dbase + H * (D + 2 * N), H * N, at, here, dq_re, -dq_im, cos, -sin
            )
            # The state that left: what of it entered, and what the keys added.
            E_re = tl.load(dstates_ptr + tile).to(tl.float32)
            E_im = tl.load(dstates_ptr + tile + N * D).to(tl.float32)
            E_re, E_im = (
                E_re * cos_last + E_im * sin_last,
                E_im * cos_last - E_re * sin_last,
            )
            dU_last += keep * _total(E_re * G_re + E_im * G_im)
            dV_last += keep * _total(E_im * G_re - E_re * G_im)
            E_re, E_im = (
                _operand(E_re, PRECISION, EMULATE),
                _operand(E_im, PRECISION, EMULATE),
            )
            dx = _dot(_operand(k_re * left, PRECISION, EMULATE), E_re, dx, PRECISION)
            dx = _dot(_operand(k_im * left, PRECISION, EMULATE), E_im, dx, PRECISION)
            dk_re = _dot(x, tl.trans(E_re), zero, PRECISION) * left
            dk_im = _dot(x, tl.trans(E_im), zero, PRECISION) * left
            dU_last += _total(dk_re * k_re + dk_im * k_im)
            dV_last += _total(dk_im * k_re - dk_re * k_im)
            q_re, q_im = (
                _operand(q_re, PRECISION, EMULATE),
                _operand(q_im, PRECISION, EMULATE),
            )
            dk_re = _dot(tl.trans(dM), q_re, dk_re, PRECISION)
            dk_im = _dot(tl.trans(dM), q_im, dk_im, PRECISION)
            dU -= tl.sum(dk_re * k_re + dk_im * k_im, 1)
            dV += tl.sum(dk_re * k_im - dk_im * k_re, 1)
            _store_turned(dbase + H * D, H * N, at, here, dk_re, dk_im, cos, sin)
        kind = dproj_ptr.dtype.element_ty
        tl.store(dbase + x_at, dx.to(kind), mask=here[:, None])

        # The total is the last sum; and a step is part of every later sum of its chunk.
        dU += tl.where(step == BLOCK_C - 1, dU_last, 0.0)
        dV += tl.where(step == BLOCK_C - 1, dV_last, 0.0)
        du = tl.sum(dU, 0) - tl.cumsum(dU, 0) + dU
        dv = tl.sum(dV, 0) - tl.cumsum(dV, 0) + dV
        ddt = du * tl.load(A_ptr + 2 * h) + dv * tl.load(A_ptr + 2 * h + 1)
        # delta is 0 at a reset and past the end: there, no gradient either.
        ddt = tl.where(delta == 0.0, 0.0, ddt * tl.sigmoid(dt))
        tl.store(dbase + H * (D + 4 * N) + h + step * W, ddt.to(kind), mask=here)
        share = tl.program_id(0).to(tl.int64) * 2
        tl.store(dA_ptr + share, tl.sum(delta * du, 0))
        tl.store(dA_ptr + share + 1, tl.sum(delta * dv, 0))


# %% [markdown]
# ## The launch

# %% tags=["export"]
# (BLOCK_D, BLOCK_N, warps, stages) of a kernel, by precision; a block is cut to what it
# is a part of. States of one sequence and head are walked in one program when there are
# enough of those to fill the device, and computed chunk by chunk when there are not.
_LAUNCH = {
    "states": {"bf16": (64, 32, 4, 2), "tf32": (64, 32, 4, 2), "ieee": (32, 16, 8, 1)},
    "output": {"bf16": (0, 64, 4, 1), "tf32": (0, 32, 4, 1), "ieee": (0, 16, 8, 1)},
    "backward": {"bf16": (0, 16, 4, 1), "tf32": (0, 16, 4, 1), "ieee": (0, 16, 8, 1)},
}
_WALK_FROM = 96  # sequences times heads
_PASS_BLOCK = 256


def _launch(kernel: str, precision: str, D: int, N: int) -> dict[str, int]:
    """Block sizes and launch parameters of a kernel."""
    block_d, block_n, warps, stages = _LAUNCH[kernel][precision]
    blocks = {"BLOCK_D": min(block_d, D)} if block_d else {}
    return {
        **blocks,
        "BLOCK_N": min(block_n, N),
        "num_warps": warps,
        "num_stages": stages,
    }


def _modes(precision: str, reset: Tensor | None) -> dict[str, object]:
    """What every kernel is compiled for."""
    return {
        "PRECISION": precision,
        "EMULATE": _interpreted(),
        "HAS_RESET": reset is not None,
    }


def _states(proj, A, reset, edge, dy, D, N, chunk_size, precision, reverse):
    """The state entering every chunk and the last one; or, reversed, their gradients.

    Args: edge: the initial state, or the gradient of the final one, (B, H, D, N).
    dy: for the reverse.

    Returns: (B, nc, H, 2, N, D), bfloat16 in bf16 mode, and float32 (B, H, D, N, 2).
    """
    batch, time, width = proj.shape
    H, n_chunks = A.shape[0], -(-time // chunk_size)
    options = _launch("states", precision, D, N)
    parts = D // options["BLOCK_D"] * (N // options["BLOCK_N"])
    walk = batch * H >= _WALK_FROM or n_chunks == 1
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    states = proj.new_empty(batch, n_chunks, H, 2, N, D, dtype=kind)
    out = proj.new_empty(batch, H, D, N, 2, dtype=torch.float32)
    added, keep = states, out
    if not walk:
        added = proj.new_empty(states.shape, dtype=torch.float32)
        keep = proj.new_empty(batch, n_chunks, H, 2, dtype=torch.float32)
    edge_ptr = out if edge is None else torch.view_as_real(edge.contiguous())
    _states_kernel[(batch * H * parts, 1 if walk else n_chunks)](
        proj, torch.view_as_real(A), proj if reset is None else reset,
        proj if dy is None else dy, edge_ptr, added, keep, out,
        time, H, width, n_chunks, D=D, N=N, BLOCK_C=chunk_size, WALK=walk,
        REVERSE=reverse, HAS_EDGE=edge is not None, **_modes(precision, reset),
        **options,
    )  # fmt: skip
    if not walk:
        block = min(_PASS_BLOCK, D * N)
        _pass_kernel[(batch * H, D * N // block)](
            added, keep, edge_ptr, states, out, H, n_chunks, D=D, N=N, BLOCK=block,
            REVERSE=reverse, HAS_EDGE=edge is not None,
        )  # fmt: skip
    return states, out


# %% [markdown]
# ## Two operators


# %% tags=["export"]
@torch.library.custom_op(
    "mamba3lite::ssd_fused",
    mutates_args=(),
    schema=(
        "(Tensor proj, Tensor A, Tensor? initial_states, Tensor? reset, int head_dim, "
        "int state_dim, int chunk_size, str precision) -> (Tensor, Tensor, Tensor)"
    ),
)
def _ssd_fused(
    proj, A, initial_states, reset, head_dim, state_dim, chunk_size, precision
):
    """y, the final states, and the states entering each chunk, which backward reads."""
    batch, time, width = proj.shape
    D, N, H = head_dim, state_dim, A.shape[0]
    proj = proj.contiguous()
    A = A.contiguous()
    flags = None if reset is None else reset.contiguous().view(torch.uint8)
    states, final = _states(
        proj, A, flags, initial_states, None, D, N, chunk_size, precision, False
    )
    y = proj.new_empty(batch, time, H, D)
    _output_kernel[(states.shape[1] * batch * H,)](
        proj, torch.view_as_real(A), proj if reset is None else flags, states, y,
        time, H, width, states.shape[1], D=D, N=N, BLOCK_C=chunk_size,
        **_modes(precision, reset), **_launch("output", precision, D, N),
    )  # fmt: skip
    return y, torch.view_as_complex(final), states


@_ssd_fused.register_fake
def _(proj, A, initial_states, reset, head_dim, state_dim, chunk_size, precision):
    batch, time, _ = proj.shape
    D, N, H = head_dim, state_dim, A.shape[0]
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    n_chunks = -(-time // chunk_size)
    return (
        proj.new_empty(batch, time, H, D),
        A.new_empty(batch, H, D, N),
        proj.new_empty(batch, n_chunks, H, 2, N, D, dtype=kind),
    )


@torch.library.custom_op(
    "mamba3lite::ssd_fused_backward",
    mutates_args=(),
    schema=(
        "(Tensor proj, Tensor A, Tensor? reset, Tensor states, Tensor dy, "
        "Tensor? dfinal, int head_dim, int state_dim, int chunk_size, str precision) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)
def _ssd_fused_backward(
    proj, A, reset, states, dy, dfinal, head_dim, state_dim, chunk_size, precision
):
    """Gradients of proj, A and the initial states."""
    time, width = proj.shape[1:]
    D, N, H = head_dim, state_dim, A.shape[0]
    batch, n_chunks = states.shape[:2]
    proj, A, dy = proj.contiguous(), A.contiguous(), dy.contiguous()
    flags = None if reset is None else reset.contiguous().view(torch.uint8)
    dstates, dinitial = _states(
        proj, A, flags, dfinal, dy, D, N, chunk_size, precision, True
    )
    dproj = torch.empty_like(proj)
    shares = proj.new_empty(batch * n_chunks, H, 2, dtype=torch.float32)
    _backward_kernel[(batch * n_chunks * H,)](
        proj, torch.view_as_real(A), proj if reset is None else flags, states, dstates,
        dy, dproj, shares, time, H, width, n_chunks, D=D, N=N, BLOCK_C=chunk_size,
        **_modes(precision, reset), **_launch("backward", precision, D, N),
    )  # fmt: skip
    return dproj, torch.view_as_complex(shares.sum(0)), torch.view_as_complex(dinitial)


@_ssd_fused_backward.register_fake
def _(proj, A, reset, states, dy, dfinal, head_dim, state_dim, chunk_size, precision):
    shape = proj.shape[0], A.shape[0], head_dim, state_dim
    return torch.empty_like(proj), torch.empty_like(A), A.new_empty(shape)


def _save(ctx, inputs, output):
    proj, A, initial_states, reset, *ctx.sizes = inputs
    ctx.has_initial = initial_states is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(proj, A, reset, output[2])


def _differentiate(ctx, dy, dfinal, _dstates):
    proj, A, reset, states = ctx.saved_tensors
    if dy is None:
        dy = proj.new_zeros(*proj.shape[:2], A.shape[0], ctx.sizes[0])
    dproj, dA, dinitial = _ssd_fused_backward(
        proj, A, reset, states, dy, dfinal, *ctx.sizes
    )
    return dproj, dA, dinitial if ctx.has_initial else None, *[None] * 5


_ssd_fused.register_autograd(_differentiate, setup_context=_save)


# %% [markdown]
# ## The whole function

# %% tags=["export"]
_SIDES = (16, 32, 64, 128)


def _check_fused_dims(head_dim: int, state_dim: int, chunk_size: int) -> None:
    """Refuse tiles that the kernels are not made for.

    Raises: KernelUnavailable, a ValueError, naming the dimension.
    """
    sides = {"head_dim": head_dim, "state_dim": state_dim, "chunk_size": chunk_size}
    for name, side in sides.items():
        if side not in _SIDES:
            raise KernelUnavailable(
                f"ssd_fused: {name}={side}; the kernels take "
                f"{', '.join(map(str, _SIDES))}. "
                "Use ssd_dispatch='pytorch' for this config."
            )


def ssd_fused(
    proj: Float[Tensor, "B T columns"],
    A: Complex[Tensor, "H"],
    *,
    n_heads: int,
    head_dim: int,
    state_dim: int,
    chunk_size: int = 64,
    precision: str = "tf32",
    initial_states: Complex[Tensor, "B H D N"] | None = None,
    return_final_states: bool = False,
    reset: Bool[Tensor, "B T"] | None = None,
) -> (
    Float[Tensor, "B T H D"]
    | tuple[Float[Tensor, "B T H D"], Complex[Tensor, "B H D N"]]
):
    """The chunkwise scan on the output of `in_proj` as it lies in memory.

    Args:
        proj: columns x (H D), Re B, Im B, Re C, Im C (H N each) and dt (H); float32,
            bfloat16 or float16.
        A: decay rate per head, complex64, Re(A) < 0.
        n_heads, head_dim, state_dim: H, D and N; D and N are 16, 32, 64 or 128.
        chunk_size: 16, 32, 64 or 128; T need not be a multiple.
        precision: operands of the products: "tf32", "bf16", or "ieee" for float32.
            Sums, exponentials and states are float32 in all of them; in "bf16" mode the
            copies of the states that outputs and gradients read are bfloat16.
        initial_states: the state before the first token; zero when None.
        return_final_states: also return the state after the last token, complex64.
        reset: True where a document starts: the state arriving there is dropped.

    Returns: y in the dtype of proj, or `(y, final_states)`. Gradients of proj, A and
        initial_states; the same bits every time.

    Raises:
        ImportError: triton is not installed.
        TypeError: a dtype that is not listed above.
        ValueError: a shape or device that does not fit, an unknown precision;
            KernelUnavailable, a ValueError, for sizes and devices without a kernel.

    Source: notebook 06, "The whole function".
    """
    _check_triton("ssd_fused")
    _check_precision("fused", precision)
    _check_fused_dims(head_dim, state_dim, chunk_size)
    _check_proj(proj, A, n_heads, head_dim, state_dim, initial_states, reset)
    _check_device(proj.device, "ssd_fused")
    y, final_states, _ = _ssd_fused(
        *(proj, A, initial_states, reset),
        *(head_dim, state_dim, chunk_size, precision or "tf32"),
    )
    return (y, final_states) if return_final_states else y


def _check_proj(proj, A, n_heads, head_dim, state_dim, initial_states, reset) -> None:
    """Refuse dtypes, shapes and devices that do not fit each other.

    Raises: TypeError, ValueError, naming the argument.
    """
    if proj.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"ssd_fused: proj is {proj.dtype}; wanted float32, bfloat16 or float16"
        )
    columns = n_heads * (head_dim + 4 * state_dim + 1)
    if proj.ndim != 3 or proj.shape[2] != columns or proj.shape[1] == 0:
        raise ValueError(
            f"ssd_fused: proj has shape {tuple(proj.shape)}; wanted (B, T, {columns}) "
            f"with T at least 1, for n_heads={n_heads}, head_dim={head_dim}, "
            f"state_dim={state_dim}"
        )
    batch, time, _ = proj.shape
    wanted = {
        "A": (A, torch.complex64, (n_heads,)),
        "initial_states": (
            initial_states, torch.complex64, (batch, n_heads, head_dim, state_dim)
        ),
        "reset": (reset, torch.bool, (batch, time)),
    }  # fmt: skip
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"ssd_fused: {name} is {tensor.dtype}; wanted {dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"ssd_fused: {name} has shape {tuple(tensor.shape)}; wanted {shape}"
            )
        if tensor.device != proj.device:
            raise ValueError(
                f"ssd_fused: {name} is on {tensor.device} but proj is on {proj.device}"
            )
