"""How the threads of a computation wait for one another.

OpenMP lets a thread that waits spin, by default for so long that beside another busy
process most of a processor's time is spent waiting. A short spin costs an idle machine
nothing and leaves a busy one to those who work. The library reads its settings once,
when PyTorch loads it: what is set here counts only before that.
"""

from __future__ import annotations

import os
import sys

SPINS = "1000"  # rounds before a thread sleeps; docs/benchmarks/runs/cpu-threads.json
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def spin_briefly() -> None:
    """Let threads sleep after `SPINS` rounds, unless the user has chosen.

    Of use before torch is imported, on systems whose OpenMP is GNU's.
    """
    if not any(name in os.environ for name in SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def how_threads_wait(threads: int) -> str:
    """One line: how many threads compute, how they wait, how to change either."""
    if threads == 1:
        return "1 thread computes; OMP_NUM_THREADS says how many"
    chosen = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    if sys.platform != "linux" or not chosen:
        chosen = ["as the system has it"]
    return (
        f"{threads} threads compute; OMP_NUM_THREADS says how many, OMP_WAIT_POLICY or "
        f"GOMP_SPINCOUNT how they wait for one another ({', '.join(chosen)})"
    )
