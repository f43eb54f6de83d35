"""Run what depends on a processor's matrix products under several of their kernels.

NumPy, which multiplies for interpreted kernels, and PyTorch choose code by the
processor they find. The tests marked `processor` run under that choice and under those
for other processors, so that what is green here is no accident of this machine.
"""

import ctypes
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_AVX512 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
KERNELS = {
    "its own": {},
    "Haswell": {"OPENBLAS_CORETYPE": "Haswell"} | WITHOUT_AVX512,
    "Zen": {"OPENBLAS_CORETYPE": "Zen"} | WITHOUT_AVX512,
    "Sandybridge": {"OPENBLAS_CORETYPE": "Sandybridge"} | WITHOUT_AVX512,
}
FOUND_AS = {"Zen": "Haswell"}  # NumPy's OpenBLAS has no code of its own for it
CHOICES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", *WITHOUT_AVX512)
X86 = ("x86_64", "AMD64")
SYSTEMS = ("Linux x86_64", "Linux arm64", "Windows", "macOS")


def environment(choice: dict[str, str]) -> dict[str, str]:
    """This process's, with these choices of kernels and no other."""
    kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
    return kept | choice


def kernels_in_use() -> str:
    """One line: whose matrix products NumPy and PyTorch use in this process."""
    import numpy
    import torch

    found = "of unknown name"
    for path in Path(numpy.__file__).parents[1].glob("numpy.libs/*openblas*"):
        name = ctypes.CDLL(str(path)).scipy_openblas_get_corename64_
        name.restype = ctypes.c_char_p
        found = name().decode()
    return (
        f"numpy {numpy.__version__} with OpenBLAS {found}, "
        f"torch {torch.__version__} with {torch.backends.cpu.get_cpu_capability()}"
    )


def this_system() -> str:
    """System and processor, as in `SYSTEMS` where it is one of them."""
    name = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    if name != "Linux":
        return name
    machine = platform.machine()
    return f"Linux {'arm64' if machine == 'aarch64' else machine}"


def marked_tests() -> list[str]:
    """The files that have tests of this kind."""
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(p) for p in paths if "mark.processor" in p.read_text(encoding="utf-8")]


def main() -> int:
    """Run the tests under every kernel that this processor has; 0 if all pass."""
    kernels = KERNELS if platform.machine() in X86 else {"its own": {}}
    results: dict[str, str] = {}
    for name, choice in kernels.items():
        chosen = environment(choice)
        asked = [sys.executable, __file__, "--kernels"]
        used = subprocess.check_output(asked, env=chosen, text=True).strip()
        if choice and f" OpenBLAS {FOUND_AS.get(name, name)}," not in used:
            results[used] = f"FAILED: {name} was asked for"
        if used in results:
            continue
        start = time.perf_counter()
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "processor"]
        status = subprocess.run([*tests, *marked_tests()], cwd=ROOT, env=chosen)
        word = "FAILED" if status.returncode else "ok"
        results[used] = f"{word} in {time.perf_counter() - start:.1f} s"
    here = this_system()
    print(f"\nrun on {here}, Python {platform.python_version()}, {processor()}:")
    for used, result in results.items():
        print(f"{used}: {result}")
    others = ", ".join(system for system in SYSTEMS if system != here)
    print(f"not run: {others}", flush=True)
    return int(any(result.startswith("FAILED") for result in results.values()))


def processor() -> str:
    """The processor's name, as well as the system knows it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "a processor without a name"


if __name__ == "__main__":
    if sys.argv[1:] == ["--kernels"]:
        print(kernels_in_use())
    else:
        sys.exit(main())
