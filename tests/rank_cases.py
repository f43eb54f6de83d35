"""Several processes of one run: forked, joined by gloo on the loopback interface."""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from fault_cases import Child, Ended

from mamba3lite.training.pretrain import Pretrainer, run_training


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(action: Callable[[int], int], size: int = 2) -> list[Child]:
    """Start action(rank) in forked processes, with the environment of torchrun."""
    port = free_port()

    def of_rank(rank: int) -> Callable[[], int]:
        def run() -> int:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            return action(rank)

        return run

    return [Child(of_rank(rank)) for rank in range(size)]


def in_ranks(action: Callable[[int], int], size: int = 2) -> list[Ended]:
    """Run action(rank) in forked processes to their ends."""
    return [child.wait() for child in start_ranks(action, size)]


def train(config: Path, *overrides: str, kind=Pretrainer, **options) -> Callable:
    """`mamba3lite train` as the action of every rank, with short samples."""

    def action(rank: int) -> int:
        from mamba3lite.training import pretrain

        kind.sample_tokens = kind.final_sample_tokens = 4
        pretrain.Pretrainer = kind
        return run_training(str(config), overrides, **options)

    return action


def all_ended_well(ended: list[Ended]) -> None:
    """Exit code 0 and nothing on stderr."""
    for rank, end in enumerate(ended):
        assert end.code == 0 and not end.err, (rank, end)


def kill_the_rest(children: list[Child]) -> None:
    """Leave no process behind, a stopped one neither."""
    for child in children:
        child.kill(signal.SIGKILL)


class Noted(Pretrainer):
    """Notes which windows each step of this rank reads, one line a batch."""

    def batches(self, position):
        share = (self.rows, self.config.global_rows, self.shift)
        rows = self.train_data.batch(position, *share)[3]
        with (self.run_dir / f"windows_{self.rows.start}.txt").open("a") as file:
            file.write(f"{position}: {rows.tolist()}\n")
        return super().batches(position)


class AskedToStop(Noted):
    """The last rank, and no other, is asked to stop in one of the steps."""

    at_step = 0

    def batches(self, position):
        if self.step + 1 == self.at_step and self.ranks.rank == self.ranks.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batches(position)


def windows_read(run_dir: Path) -> dict[int, list[int]]:
    """The windows of every global batch by position, those of the ranks in order."""
    read: dict[int, list[int]] = {}
    files = run_dir.glob("windows_*.txt")
    for path in sorted(files, key=lambda p: int(p.stem.removeprefix("windows_"))):
        for line in path.read_text().splitlines():
            position, windows = line.split(": ")
            read.setdefault(int(position), []).extend(json.loads(windows))
    return read
