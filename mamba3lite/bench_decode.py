"""Measure decoding on this machine: time of a step, its floor, memory, and bits.

mamba3lite bench --decode --model pretrain_434m --json docs/benchmarks/NAME.json
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from mamba3lite.bench import (
    FORMAT,
    captured,
    ceilings,
    command_line,
    measure,
    synchronize,
    this_machine,
    versions,
)
from mamba3lite.generate import MODES, Chances, Sampling, products_of, sample
from mamba3lite.models import decode
from mamba3lite.models.batch_invariant import token_log_probs
from mamba3lite.models.decode import ExactCache, RecurrentCache
from mamba3lite.models.transformer import Mamba3Transformer
from mamba3lite.training.config import load_config

BATCHES = (1, 2, 4, 8, 16, 32, 64)
# Tokens after which the memory of a sequence is read, the same to the byte.
LENGTHS = (1_000, 100_000)
# Of a text at least so many tokens are decoded; those before them are prefilled.
STEPPED = 192
READ_AT_ONCE = 8192
# Weights and texts of so many seeds are decoded and compared with a full forward; for
# the last of them states decay a hundred times more slowly.
SEEDS = (0, 1, 2)
WEAK = 0.01


def run_decode_bench(
    config: str,
    overrides: list[str],
    device: torch.device,
    *,
    parts: Sequence[str],
    say: Callable = print,
    save: Callable[[dict], None] = lambda report: None,
) -> dict[str, Any]:
    """Measure every mode of decoding for a model with random weights.

    Args: parts: what to measure. save: called with what is there after each row.
    """
    ceiling = ceilings(device)
    torch.manual_seed(0)
    fields = load_config(config, overrides).model_fields_of_run()
    report: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command_line(),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("TRITON_PER_CHUNK_")
        },
        "device": this_machine(device),
        "versions": versions(),
        "ceilings": ceiling,
        "decode": [],
        "decode_memory": [],
        "decode_bits": [],
    }
    for mode in MODES if {"steps", "memory"} & {*parts} else ():
        exact = {"batch_invariant": True} if mode == "exact" else {}
        with device:
            model = Mamba3Transformer(fields | exact).eval()
        batches = BATCHES if "steps" in parts else ()
        for row in step_rows(model, mode, batches, ceiling["copy_tb_s"]):
            report["decode"].append(row)
            say(
                f"{mode}, {row['batch']} sequences: {row['step_ms']['median']:.3f} ms, "
                f"{row['tokens_per_s']:,.0f} tokens/s"
            )
            save(report)
        if "memory" in parts:
            report["decode_memory"].append(memory_row(model, mode, LENGTHS))
            say(memory_line(report["decode_memory"][-1]))
            save(report)
    if "bits" in parts:
        for row in bits_rows(fields, device):
            report["decode_bits"].append(row)
            say(bits_line(row))
            save(report)
    return report


class Steps:
    """Steps of one mode for so many sequences, each of them at the same token.

    Args: choose: whether a step also samples the next tokens, as `mamba3lite generate`
    does by default.
    """

    def __init__(self, model: nn.Module, mode: str, batch: int, choose: bool) -> None:
        cache_of, self.prefill, self.step = MODES[mode]
        device = model.lm_head.weight.device
        self.products = partial(products_of, mode, device)
        with self.products():
            self.model, self.cache = model, cache_of(model, batch)
        self.slots = torch.arange(batch, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.chances = Chances(batch, device) if choose else None

    def replay(self) -> Callable[[], Any]:
        """A graph of a step, where the device and the cache can have one."""
        return captured(self) if self.tokens.is_cuda and self.cache.captures else self

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        with self.products():
            logits = self.step(self.model, self.tokens, self.cache, self.slots)
        if self.chances is None:
            chosen = logits.argmax(-1)
        else:
            self.chances.at.zero_()
            chosen = sample(logits, self.chances.take(), Sampling())
        return self.tokens.copy_(chosen)


def step_rows(
    model: nn.Module, mode: str, batches: Sequence[int], copy_tb_s: float
) -> Iterator[dict]:
    """Time of a step for each number of sequences; of a replay, where a graph is."""
    device = model.lm_head.weight.device
    for batch in batches:
        row: dict[str, Any] = {"mode": mode, "batch": batch}
        for name, choose in (("step_ms", False), ("round_ms", True)):
            steps = Steps(model, mode, batch, choose)
            replay = steps.replay()
            row[name] = measure(replay, device)
            row[name]["mean"] = mean_ms(replay, device)
        moved = weight_bytes(model, steps.cache.dtype)
        moved += batch * least_bytes(steps.cache)
        row["floor_ms"] = moved / copy_tb_s / 1e9
        row["tokens_per_s"] = batch / row["step_ms"]["mean"] * 1e3
        row["dtype"] = str(steps.cache.dtype).removeprefix("torch.")
        yield row


def least_bytes(cache: RecurrentCache | ExactCache) -> int:
    """What a step moves of one sequence at least.

    A recurrent step reads and writes the state. An exact one reads it, and on average
    half of the open chunk.
    """
    if isinstance(cache, RecurrentCache):
        return 2 * cache.nbytes_per_slot
    opened = cache.open.nbytes // cache.slots
    return cache.nbytes_per_slot - opened + opened // 2


def mean_ms(run: Callable[[], Any], device: torch.device, least: int = 64) -> float:
    """Milliseconds of one of many runs without a pause between them."""
    start = time.perf_counter()
    runs = 0
    while runs < least or time.perf_counter() - start < 0.2:
        run()
        runs += 1
        if runs % least == 0:
            synchronize(device)
    synchronize(device)
    return (time.perf_counter() - start) / runs * 1e3


def weight_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """What a step reads of the weights: all but an embedding that is not the head."""
    count = sum(p.numel() for p in model.parameters())
    if not model.cfg.weight_tying:
        count -= model.embed.weight.numel()
    return count * dtype.itemsize


def memory_row(model: nn.Module, mode: str, lengths: Sequence[int]) -> dict:
    """Bytes of one sequence, and what the device holds after texts of some lengths.

    A CPU has no count of what is held; there the row says what a slot takes.
    """
    steps = Steps(model, mode, 1, choose=False)
    row = {"mode": mode, "slot_bytes": steps.cache.nbytes_per_slot, "held_bytes": {}}
    if steps.tokens.is_cuda:
        replay = steps.replay()
        for length in lengths:
            steps.cache.reset(steps.slots)
            for _ in range(length - read(steps, length - STEPPED)):
                replay()
            torch.cuda.synchronize()
            row["held_bytes"][str(length)] = torch.cuda.memory_allocated()
    return row


@torch.inference_mode()
def read(steps: Steps, count: int) -> int:
    """Prefill the first slot with whole chunks of so many tokens. Returns: how many."""
    chunk = steps.model.cfg.chunk_size
    count -= count % chunk
    for start in range(0, count, READ_AT_ONCE):
        n = min(READ_AT_ONCE, count - start)
        tokens = torch.zeros(1, n, dtype=torch.int64, device=steps.tokens.device)
        lengths = torch.full((1,), n, device=tokens.device)
        with steps.products():
            steps.prefill(steps.model, tokens, lengths, steps.cache, steps.slots)
    return count


def bits_rows(fields: dict, device: torch.device) -> Iterator[dict]:
    """`bits_row` for each seed, on a GPU in each precision that training uses."""
    for precision in ("bf16", "tf32") if device.type == "cuda" else ("tf32",):
        changes = {"batch_invariant": True, "ssd_precision": precision}
        for seed in SEEDS:
            yield bits_row(fields | changes, seed, device)


@torch.no_grad()
def bits_row(fields: dict, seed: int, device: torch.device) -> dict[str, Any]:
    """Both modes against one full forward, bit by bit.

    Prompts around the length of a chunk, of mixed lengths in one batch with a padding
    lane, then more steps than a chunk has; and three of them alone.

    Returns: for each mode how many of the rows of logits differ in some bit, and the
        largest difference of a token's log-probability, in nats.
    """
    torch.manual_seed(seed)
    with device:
        model = Mamba3Transformer(fields).eval()
    slower = WEAK if seed == SEEDS[-1] else 1.0
    for layer in model.layers:
        layer.A *= slower
    cfg, Q = model.cfg, model.chunk()
    prompts = [1, 7, 16, Q - 1, Q, Q + 1, 95, 2 * Q]
    steps = Q + 5
    longest = max(prompts) + steps
    tokens = torch.randint(cfg.vocab_size, (len(prompts), longest + 1), device=device)
    with products_of("exact", device):
        full = model(tokens[:, :longest])
    row: dict[str, Any] = {
        "precision": cfg.ssd_precision,
        "seed": seed,
        "decay": slower,
        "prompts": prompts,
        "steps": steps,
        "rows": len(prompts) * (steps + 1),
    }
    decode.launches.clear()
    for mode in MODES:
        row[mode] = compared(model, mode, steps, tokens, prompts, full)
    alone = [slice(e, e + 1) for e in range(0, len(prompts), 3)]
    differ = [
        compared(model, "exact", steps, tokens[e], prompts[e], full[e])["differ"]
        for e in alone
    ]
    row["alone"] = {"rows": len(alone) * (steps + 1), "differ": sum(differ)}
    return row | {"launches": dict(decode.launches)}


def compared(
    model: nn.Module,
    mode: str,
    steps: int,
    tokens: Tensor,
    prompts: list[int],
    full: Tensor,
) -> dict[str, Any]:
    """Rows of logits that differ from those of a full forward in some bit.

    Args: tokens: (E, T + 1). prompts: how many of each row are one. full: (E, T, V),
    logits of one forward.
    Returns: `differ`, rows; `largest_log_prob`, in nats.
    """
    cache_of, prefill, step = MODES[mode]
    count, device = len(prompts), tokens.device
    slots = torch.arange(count, 0, -1, device=device, dtype=torch.int32)
    lanes = torch.cat([slots, slots.new_full((1,), -1)])
    lengths, each = torch.tensor(prompts, device=device), torch.arange(count)
    differ, largest = 0, 0.0
    with products_of(mode, device):
        cache = cache_of(model, count + 1)
        some = tokens[:, : max(prompts)]
        logits = prefill(model, some, lengths, cache, slots)
        for i in range(steps + 1):
            here = each, (lengths - 1 + i).cpu()
            wanted, following = full[here], tokens[here[0], here[1] + 1]
            differ += int((logits != wanted).any(-1).sum())
            apart = token_log_probs(logits, following)
            apart -= token_log_probs(wanted, following)
            largest = max(largest, apart.abs().max().item())
            entries = torch.cat([following, following[:1]])
            logits = step(model, entries, cache, lanes)[:count]
    return {"differ": differ, "largest_log_prob": largest}


def memory_line(row: dict) -> str:
    """One row of memory, as a person reads it."""
    held = (
        f"; the device holds {count:,} bytes after {int(length):,} tokens"
        for length, count in row["held_bytes"].items()
    )
    line = f"memory, {row['mode']}: {row['slot_bytes']:,} bytes a sequence"
    return line + "".join(held)


def bits_line(row: dict) -> str:
    """One row of bits, as a person reads it."""
    return (
        f"bits, {row['precision']}, seed {row['seed']}: of {row['rows']} rows "
        f"{row['exact']['differ']} differ by exact steps, {row['recurrent']['differ']} "
        f"by recurrent ones (a log-probability by up to "
        f"{row['recurrent']['largest_log_prob']:.2g})"
    )


def decode_table(rows: list[dict]) -> Table:
    """The rows as the reader sees them last."""
    table = Table(title="decoding; ms are medians, floor = share of the floor reached")
    heads = ("mode", "batch", "step, ms", "floor", "tokens/s", "with sampling, ms")
    for head in heads:
        table.add_column(head, justify="left" if head == "mode" else "right")
    for row in rows:
        step = row["step_ms"]["median"]
        table.add_row(
            row["mode"],
            f"{row['batch']}",
            f"{step:.3f}",
            f"{row['floor_ms'] / step:.0%}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['round_ms']['median']:.3f}",
        )
    return table


def print_decode_report(report: dict[str, Any], console: Console) -> None:
    """The table of steps, and a line for every row of memory and bits."""
    if report["decode"]:
        console.print(decode_table(report["decode"]))
    lines = [memory_line(row) for row in report["decode_memory"]]
    for line in [*lines, *map(bits_line, report["decode_bits"])]:
        console.print(line, soft_wrap=True)
