"""Several processes that train one model: their group, what they agree on, who writes.

`torchrun` starts the processes and gives each its rank. Rank 0 decides and writes;
the others compute their share of every batch and follow. A single process takes the
same path through the trainer, with every exchange left out. What only shards need is
imported where it is needed: that takes half a second.
"""

import math
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mamba3lite.terminal import note
from mamba3lite.training.checkpoint import (
    MOMENTS,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    put_moments,
    read_moments,
    read_weights,
)
from mamba3lite.training.config import ConfigError, RunConfig, TrainingConfig
from mamba3lite.training.recovery import RankFailed, RunError

_T = TypeVar("_T")

# The group gives up later than the watch, which has the better words.
SECONDS_AFTER_THE_WATCH = 30


def world_size() -> int:
    """How many processes ``torchrun`` started for this run; 1 without it."""
    return number_in_environment("WORLD_SIZE", range(1, 2**31), 1)


def is_main_process() -> bool:
    """True for rank 0 and for a process alone, before there is a group too."""
    size = world_size()
    return size == 1 or number_in_environment("RANK", range(size), 0) == 0


def number_in_environment(name: str, allowed: range, default: int) -> int:
    """A number that ``torchrun`` gives to each process.

    Raises: RunError for anything else.
    """
    text = os.environ.get(name, str(default))
    if re.fullmatch("[0-9]{1,10}", text) and int(text) in allowed:
        return int(text)
    raise RunError(
        f"{name}={text} in the environment: should be a number from {allowed[0]} to "
        f"{allowed[-1]}; start the processes with torchrun, or unset it for one alone"
    )


def rows_of_rank(config: RunConfig, rank: int, size: int) -> range:
    """The rows of every global batch that a rank trains on.

    Raises: ConfigError when the rows cannot be shared equally.
    """
    rows, training = config.global_rows, config.training
    if rows % size:
        share = size // math.gcd(size, training.gradient_accumulation_steps)
        fits = math.ceil(training.micro_batch_size / share) * share
        raise ConfigError(
            f"training.micro_batch_size: {training.micro_batch_size} x "
            f"gradient_accumulation_steps {training.gradient_accumulation_steps} are "
            f"{rows} rows a step, which {size} processes cannot share equally; wanted "
            f"a multiple of {size}, such as training.micro_batch_size={fits}"
        )
    share = rows // size
    return range(rank * share, (rank + 1) * share)


class Watch:
    """Ends this process, with one line, when its run has not moved for some time.

    A thread, because the main one may hang inside a collective operation of a GPU,
    which raises nothing.

    Args: patience_s: seconds between two calls of ``beat``. line: the reason.
    """

    def __init__(self, patience_s: float, line: str):
        self.patience_s, self.line = patience_s, line
        self.over = threading.Event()
        self.beat()
        threading.Thread(target=self._run, daemon=True).start()

    def beat(self) -> None:
        """The run moves."""
        self.deadline = time.monotonic() + self.patience_s

    def close(self) -> None:
        """Watch no longer."""
        self.over.set()

    def _run(self) -> None:
        while not self.over.wait(max(0.0, self.deadline - time.monotonic())):
            if time.monotonic() >= self.deadline:
                note(self.line)
                os._exit(1)


class Ranks:
    """This process among those of a run; alone, its methods exchange nothing.

    Args: rank: 0 to size - 1. size: processes in all. local_rank: number of its GPU on
    this host. watch: of several processes.
    Attributes: asked: whether this process has got a signal to stop.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        watch: Watch | None = None,
    ):
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.watch = watch
        self.asked: Callable[[], bool] = lambda: False
        self._agreed = False
        self._by_hand: list[nn.Parameter] = []
        self._compiled = False

    @classmethod
    def join(cls, training: TrainingConfig, program: str) -> "Ranks":
        """The processes that ``torchrun`` started, once all of them are here.

        Raises: RunError for more processes than GPUs, or an environment that
        ``torchrun`` did not make; RankFailed when not all of them come in time.
        """
        size = world_size()
        if size == 1:
            return cls()
        rank = number_in_environment("RANK", range(size), 0)
        local = number_in_environment("LOCAL_RANK", range(size), 0)
        here = number_in_environment("LOCAL_WORLD_SIZE", range(1, size + 1), 1)
        number_in_environment("MASTER_PORT", range(2**16), 0)
        patience = training.dist_timeout_s
        options: dict[str, Any] = {"backend": "gloo"}
        if torch.cuda.is_available():
            _require_gpus(max(here, local + 1))
            torch.cuda.set_device(local)
            # gloo carries what the processors agree on, NCCL the gradients.
            options = {"backend": "cpu:gloo,cuda:nccl"}
            options["device_id"] = torch.device("cuda", local)
        options["timeout"] = timedelta(seconds=patience + SECONDS_AFTER_THE_WATCH)
        watch = Watch(patience, f"{program}: rank {rank}: {waited_in_vain(patience)}")
        try:
            dist.init_process_group(**options)
        except ValueError as error:
            watch.close()
            raise RunError(f"{error}; start the processes with torchrun") from None
        except RuntimeError as error:
            watch.close()
            reason = lost_how(error)
            raise RankFailed(f"rank {rank}: found no others: {reason}") from None
        return cls(rank, size, local, watch)

    @property
    def main(self) -> bool:
        """True for the one that decides and writes."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The GPU of this process, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if self.size == 1:
            return torch.device("cuda")
        return torch.device("cuda", self.local_rank)

    def close(self) -> None:
        """Leave the group, after the others have come as far."""
        if self.size > 1:
            self.sums()
            self.watch.close()
            dist.destroy_process_group()

    # ----------------------------------------------------------------------------------
    # Agreement

    def first(self, action: Callable[[], _T]) -> _T:
        """What an action gives that rank 0 alone does; what it raises, on every rank.

        Its result goes to the others.
        """
        if self.size == 1:
            return action()
        outcome = [_attempt(action) if self.main else None]
        self._beat()
        dist.broadcast_object_list(outcome, src=0)
        self._beat()
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    def together(self, action: Callable[[], _T]) -> _T:
        """What an action of this rank gives; what it raises on any rank, on every rank.

        The action exchanges nothing.
        """
        if self.size == 1:
            return action()
        result, error = _attempt(action)
        for rank, raised in enumerate(self.gather(error)):
            if raised is not None and rank and isinstance(raised, ValueError):
                raise type(raised)(f"rank {rank}: {raised}")
            if raised is not None:
                raise raised
        return result

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        self._beat()
        dist.all_gather_object(values, value)
        self._beat()
        return values

    def sums(self, *numbers: float) -> list[float]:
        """Sums over the ranks, in double precision."""
        if self.size == 1:
            return list(numbers)
        tensor = torch.tensor([0.0, *numbers], dtype=torch.float64)
        self._beat()
        dist.all_reduce(tensor)
        self._beat()
        return tensor.tolist()[1:]

    def control(self, loss: Tensor, norm: Tensor) -> tuple[float, float]:
        """Loss and gradient norm of a step, by which every rank decides the same.

        One small tensor carries the two as rank 0 has them, and whether any rank was
        asked to stop.

        Args: loss: of this rank's rows. norm: of the gradient of all.
        """
        if self.size == 1:
            return loss.item(), norm.item()
        dist.all_reduce(loss)
        told = (loss.item(), norm.item()) if self.main else (0.0, 0.0)
        mean, length, stops = self.sums(*told, self.asked())
        self._agreed = self._agreed or stops > 0
        return mean, length

    @property
    def stopping(self) -> bool:
        """Whether to stop, as agreed at the latest ``control`` or ``poll``."""
        return self.asked() if self.size == 1 else self._agreed

    def poll(self) -> bool:
        """Ask all ranks whether to stop; every rank calls it as often as the others."""
        if self.size > 1 and not self._agreed:
            self._agreed = self.sums(self.asked())[0] > 0
        return self.stopping

    def _beat(self) -> None:
        self.watch.beat()

    # ----------------------------------------------------------------------------------
    # The model

    def spread(
        self, model: nn.Module, training: TrainingConfig, bf16: bool
    ) -> nn.Module:
        """Put a model on the devices; returns what a training step calls.

        ``ddp`` keeps the whole model on each device and averages gradients. ``fsdp2``
        shards the matrices, a block at a time; vectors, A among them, are whole on each
        device: small, of other dtypes, and without a shard of their own to sum.
        """
        if self.size > 1 and training.parallel == "fsdp2":
            self._shard(model, training, bf16)
            return model
        called = model.to(self.device)
        if training.compile:
            called = compiled_for_training(called, training.compile_mode)
        if self.size == 1:
            return called
        on_gpu = self.device.type == "cuda"
        return DistributedDataParallel(
            called,
            device_ids=[self.local_rank] if on_gpu else None,
            gradient_as_bucket_view=True,
        )

    def _shard(self, model: nn.Module, training: TrainingConfig, bf16: bool) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self._by_hand = [p for p in model.parameters() if p.ndim < 2]
        for parameter in self._by_hand:
            parameter.data = parameter.data.to(self.device)
        self._compiled = training.compile
        # What the scan returns may be a view; the blocks change nothing in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* a view tensor")
        mesh = init_device_mesh(self.device.type, (self.size,))
        shared = {"mesh": mesh, "ignored_params": set(self._by_hand)}
        # Products read bfloat16 and the residual stream stays float32, as in autocast.
        half = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        for layer in model.layers:
            if training.compile:
                # Inside the hooks that gather its parameters.
                layer._forward_impl = compiled_for_training(
                    layer._forward_impl, training.compile_mode
                )
            fully_shard(layer, mp_policy=half, **shared)
        fully_shard(model, reshard_after_forward=True, **shared)

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager:
        """The context of one micro-batch of a step.

        Whole gradients are averaged with the last one. Shards are summed with each, or
        every device would hold gradients of the whole model.
        """
        if self.size == 1:
            return nullcontext()
        self._beat()
        whole = isinstance(model, DistributedDataParallel) and not last
        return model.no_sync() if whole else nullcontext()

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Scale the gradient to a norm of at most ``limit``; returns the norm before.

        The norm is that of the whole gradient, whatever is sharded. It is summed in
        float64: how the gradient is cut then all but never shows in the float32 factor.
        """
        if self._by_hand:
            self._average_by_hand()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        whole = [real(g) for g in gradients if not is_sharded(g)]
        shards = [local(g) for g in gradients if is_sharded(g)]
        squares = squared_norm(whole)
        if shards:
            of_shards = squared_norm(shards)
            dist.all_reduce(of_shards)
            squares += of_shards
        norm = squares.sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0).float()
        torch._foreach_mul_(whole + shards, factor)
        return norm

    def _average_by_hand(self) -> None:
        """Average the gradients that no wrapper does, in one exchange."""
        gradients = [real(p.grad) for p in self._by_hand]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= self.size
        parts = flat.split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def raw(self) -> AbstractContextManager:
        """Inside, nothing compiled runs: neither evaluation nor samples need it."""
        if not self._compiled:
            return nullcontext()
        return torch.compiler.set_stance("force_eager")

    @contextmanager
    def as_rank_0_says(self, model: nn.Module, bf16: bool) -> Iterator[None]:
        """Inside, every rank sees the logits of rank 0, so all choose alike."""
        if self.size == 1:
            yield
            return

        def take(module: nn.Module, arguments: tuple, output: tuple) -> None:
            dist.broadcast(output[0], src=0)

        handle = model.register_forward_hook(take)
        try:
            # Gathered in bfloat16, shards multiply nothing else.
            half = bf16 and bool(self._by_hand)
            with (
                self.raw(),
                torch.autocast(self.device.type, torch.bfloat16, enabled=half),
            ):
                yield
        finally:
            handle.remove()

    # ----------------------------------------------------------------------------------
    # Checkpoints

    def collect(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and moments as one process has them: on rank 0; elsewhere nothing.

        Shards are put together tensor by tensor, in the memory of rank 0's processor.
        """
        if not self._by_hand:
            if not self.main:
                return {}, {}
            return model_tensors(model), optimizer_tensors(model, optimizer)
        weights, moments = {}, {}
        for name, parameter in model.named_parameters():
            weights |= self._assembled(name, parameter.detach())
            for key, value in optimizer.state.get(parameter, {}).items():
                moments |= self._assembled(f"{name}.{key}", value)
        return weights, moments

    def _assembled(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        self._beat()
        return {name: whole.cpu().contiguous()} if self.main else {}

    def load(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Take weights and moments from a checkpoint, which rank 0 alone reads.

        Raises: CheckpointError for tensors that differ in name or shape.
        """
        if self.size == 1:
            load_model(path, model)
            load_optimizer(path, model, optimizer)
            return
        stored: dict[str, Tensor] = {}

        def read() -> bool:
            moments = read_moments(path, model)
            stored.update(read_weights(path, model) | moments)
            return bool(moments)

        begun = self.first(read)
        moments = {}
        for name, parameter in model.named_parameters():
            value = self._handed_out(stored.get(name), parameter.detach())
            local(parameter.detach()).copy_(local(value))
            for key in MOMENTS if begun else ():
                like = parameter.detach() if key != "step" else torch.zeros(())
                full = stored.get(f"{name}.{key}")
                moments[f"{name}.{key}"] = self._handed_out(full, like)
        put_moments(optimizer, moments)

    def _handed_out(self, full: Tensor | None, like: Tensor) -> Tensor:
        """A tensor that rank 0 has, placed and sharded like another one."""
        whole = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if full is not None:
            whole.copy_(full)
        self._beat()
        dist.broadcast(real(whole), src=0)
        if not is_sharded(like):
            return whole
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(
            whole, like.device_mesh, like.placements, src_data_rank=None
        )


ALONE = Ranks()


def compiled_for_training(function: Callable, mode: str = "default", **options):
    """``torch.compile`` for a model or a part of it.

    The compiler would pad the rows of wide matrices to whole cache lines. The scan's
    operator takes what it was promised, rows one after the other, so that every
    projection would be copied, and every gradient of one. ``options``: ``fullgraph``.
    """
    from torch._inductor import list_mode_options  # it takes a second to import

    settings = list_mode_options(mode) | {"comprehensive_padding": False}
    return torch.compile(function, options=settings, **options)


def waited_in_vain(patience_s: float) -> str:
    """The reason why a process leaves that nobody answers."""
    return (
        f"nothing moved for training.dist_timeout_s={patience_s} s: another rank died, "
        "hangs, or needs longer; the checkpoints are as they were, and the same "
        "command continues from them"
    )


def lost_rank(error: Exception) -> bool:
    """Whether an error says that another process of the group is gone."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text


def lost_how(error: Exception) -> str:
    """What a backend says of it: the first sentence, without its source file."""
    first = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\] ", "", first).partition(". ")[0]


def leave(code: int, ranks: Ranks) -> int:
    """The exit code; one of several processes ends here and waits for no one.

    A broken group would be waited for. And after a run with shards the libraries take
    themselves down, in which now and then a thread of theirs aborts a process that is
    done: torchrun would call a finished run failed.
    """
    if ranks.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: its shard, or all of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """Sum of the squares of all numbers, in float64."""
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).square().sum()


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor, without the half second that its module takes to import."""
    return hasattr(tensor, "to_local")


def real(tensor: Tensor) -> Tensor:
    """The same numbers, real and imaginary parts along a last axis of 2."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _require_gpus(processes: int) -> None:
    """Raises: RunError for more processes on this host than it has GPUs."""
    if processes > (here := torch.cuda.device_count()):
        raise RunError(
            f"{processes} processes on a host with {here} GPUs; each needs one of its "
            f"own: torchrun --nproc-per-node {here}"
        )


def _attempt(action: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # raised again, on every rank
        return None, error
