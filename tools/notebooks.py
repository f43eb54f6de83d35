"""Execute the notebooks: every notebooks/NN_name.py makes an .ipynb with outputs.

    python tools/notebooks.py                  execute what changed
    python tools/notebooks.py 02 07            execute these
    python tools/notebooks.py --force          execute all: the package may have changed
    python tools/notebooks.py --check          compare the cells of the pairs
    python tools/notebooks.py --check-outputs  look at what the .ipynb store
    python tools/notebooks.py --take-ipynb 02  write the .py from an edited .ipynb

The .py is the source, and the .ipynb is a function of it, in the normal form of
tools/pairs.py. File times decide nothing, a fresh clone has none to trust. An .ipynb
that was edited is not overwritten.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import jupytext
from export import ROOT, Cell, Fault, notebook_paths, read_notebook
from nbclient import NotebookClient
from nbclient.exceptions import (
    CellExecutionError,
    CellTimeoutError,
    DeadKernelError,
)
from nbformat import NotebookNode
from pairs import (
    PERCENT,
    as_saved,
    compare,
    dumps,
    jupytext_config,
    load_source,
    load_stored,
    machine_places,
    normalize,
    sanitize,
    source_of_stored,
)

from mamba3lite.files import write_whole
from mamba3lite.threads import spin_briefly

MAX_BYTES = 400_000
CELL_TIMEOUT = 300  # seconds; a whole notebook should take a fifth of that
IGNORE = "nbval-ignore-output"
MAX_IGNORED = {"08": 10}
MAX_IGNORED_ELSEWHERE = 4

# What an output holds when it differs from run to run or from machine to machine: the
# one reason for IGNORE. Anything else is compared.
VARIES = re.compile(
    r"""\d\s*(ns|us|µs|ms|s|sec|seconds?|min|minutes?|h|hours?)\b   # a duration
      | /\s*(s|sec|second)\b                                        # a rate
      | \d\s*[kKMGT]i?B\b                                           # memory in use
      | \b\d+\.\d+\.\d+                                             # a version
      | \b\d{4}-\d\d-\d\d\b | \b\d\d:\d\d:\d\d\b                    # a date, a clock
      | \b(cpu|cuda|gpu|nvidia|cores?|threads?)\b                   # a device
      | \b0x[0-9a-f]{6,} | <(repo|python|cell)>                     # an address, a path
    """,
    re.IGNORECASE | re.VERBOSE,
)
MACHINE_PATH = re.compile(
    r"(?<![\w.~>-])/(home|root|Users|tmp|var|opt|usr|mnt|private)/"
)


# ------------------------------------------------------------------------ the checks


def check_source(path: Path, root: Path) -> Iterator[str]:
    """A line that says where JupyterLab would rewrite the .py by saving it."""
    text = path.read_text(encoding="utf-8")
    notebook = jupytext.reads(text, fmt=PERCENT, config=jupytext_config(root))
    saved = as_saved(notebook, root)
    lines = (z.splitlines(keepends=True) for z in (text, saved))
    for number, (line, wanted) in enumerate(zip_longest(*lines, fillvalue=""), 1):
        if line != wanted:
            yield (
                f"notebooks/{path.name}:{number}: saving it in JupyterLab would change "
                f"more than an edit; write {wanted!r} here and not {line!r}"
            )
            return


def check_stored(path: Path) -> Iterator[str]:
    """A line for everything that is wrong with what the .ipynb beside `path` stores."""
    name = f"notebooks/{path.stem}.ipynb"
    if fault := compare(path).fault:
        yield fault
        return
    stored, source = load_stored(path), load_source(path)
    cells = read_notebook(path).cells
    yield from check_shape(stored, source, cells, name)
    yield from check_outputs(stored, cells)
    if path.with_suffix(".ipynb").stat().st_size > MAX_BYTES:
        yield too_large(stored, cells, name)


def check_shape(
    stored: NotebookNode, source: NotebookNode, cells: tuple[Cell, ...], name: str
) -> Iterator[str]:
    """A line where `stored` is not what this tool writes for `source`."""
    foreign = f"{name}: not written by tools/notebooks.py"
    remedy = "run `make notebooks`"
    if stored.metadata != source.metadata:
        yield f"{foreign}: its metadata is not the kernelspec alone; {remedy}"
    count = 0
    for cell, expected, place in zip(stored.cells, source.cells, cells, strict=True):
        if cell.get("id") != expected.id:
            yield f"{foreign}: the id of {place.at()} is not its own; {remedy}"
        for key in sorted(cell.metadata.keys() - {"tags"}):
            yield f"{foreign}: {place.at()} has {key!r} in its metadata; {remedy}"
        if cell.cell_type == "code" and cell.source:
            count += 1
            if cell.execution_count != count:
                yield f"{foreign}: {place.at()} was not executed in order; {remedy}"


def check_outputs(stored: NotebookNode, cells: tuple[Cell, ...]) -> Iterator[str]:
    """A line for an output of this machine and for an output that nbval should see."""
    ignored = []
    for cell, place in zip(stored.cells, cells, strict=True):
        if cell.cell_type != "code":
            continue
        text = "\n".join(text for output in cell.outputs for text in texts_of(output))
        if found := MACHINE_PATH.search(text):
            line = text[text.rfind("\n", 0, found.start()) + 1 :].split("\n")[0]
            yield f"{place.at()}: a path of this machine in the output: {line.strip()}"
        if IGNORE in place.tags:
            ignored.append(place)
            if not VARIES.search(text):
                yield (
                    f"{place.at()}: tagged {IGNORE}, but its output is "
                    f"{what_is_shown(cell)}; let nbval compare it"
                )
    allowed = MAX_IGNORED.get(cells[0].notebook[:2], MAX_IGNORED_ELSEWHERE)
    if len(ignored) > allowed:
        yield (
            f"notebooks/{cells[0].notebook}: {len(ignored)} cells are tagged {IGNORE}, "
            f"at most {allowed} may be: lines {', '.join(str(c.line) for c in ignored)}"
        )


def texts_of(output: NotebookNode) -> list[str]:
    """Every text of an output; pictures have none."""
    if output.output_type == "stream":
        return [output.text]
    if output.output_type == "error":
        return [output.ename, output.evalue, *output.traceback]
    return [text for kind, text in output.data.items() if not kind.startswith("image/")]


def what_is_shown(cell: NotebookNode) -> str:
    """The kind of a code cell's output, for a message."""
    if not cell.outputs:
        return "empty"
    pictures = [
        output.output_type == "display_data"
        and any(kind.startswith("image/") for kind in output.data)
        for output in cell.outputs
    ]
    return "figures only" if all(pictures) else "deterministic text"


def too_large(notebook: NotebookNode, cells: tuple[Cell, ...], name: str) -> str:
    """A line that names the cell with the largest output."""
    sizes = [len(str(cell.get("outputs", ""))) for cell in notebook.cells]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    size = len(dumps(notebook).encode())
    return (
        f"{name}: {size / 1000:.0f} kB, at most {MAX_BYTES // 1000}; the largest "
        f"output, {sizes[largest] / 1000:.0f} kB, is that of {cells[largest].at()}"
    )


def check_orphans(root: Path) -> Iterator[str]:
    """A line for every .ipynb without its .py."""
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        if not path.with_suffix(".py").exists():
            yield f"notebooks/{path.name}: has no .py beside it; delete it"


# --------------------------------------------------------------------- the execution


def kernel_environment(folder: str) -> dict[str, str]:
    """The environment of a kernel: the same wherever the notebook runs.

    `folder` takes the place of the user's IPython profile, which could change outputs.
    """
    spin_briefly()
    import torch

    environment = dict(os.environ)
    environment |= {
        "PYTHONHASHSEED": "0",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "IPYTHONDIR": folder,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    return environment


def execute(path: Path, root: Path) -> NotebookNode:
    """The executed notebook of `path`; raises Fault naming the cell that fails."""
    notebook = load_source(path)
    cells = read_notebook(path).cells
    running = [0]
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_TIMEOUT,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=lambda cell, cell_index: running.append(cell_index),
    )
    with tempfile.TemporaryDirectory() as profile:
        try:
            client.execute(env=kernel_environment(profile))
        except CellExecutionError as error:
            # The error's own text repeats the cell; its output holds the traceback.
            lines = notebook.cells[running[-1]].outputs[-1].traceback
            report = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))
            place = cells[running[-1]].at()
            raise Fault(f"{place}: {error.ename}: {error.evalue}\n{report}") from None
        except (CellTimeoutError, DeadKernelError) as error:
            raise Fault(f"{cells[running[-1]].at()}: {error}") from None
    places = machine_places(root)
    for cell in normalize(notebook).cells:
        if cell.cell_type == "code":
            cell.outputs = sanitize(cell.outputs, places)
    faults = [*check_outputs(notebook, cells)]
    if len(dumps(notebook).encode()) > MAX_BYTES:
        faults.append(too_large(notebook, cells, f"notebooks/{path.stem}.ipynb"))
    if faults:
        raise Fault("\n".join(faults))
    return notebook


def write(path: Path, notebook: NotebookNode) -> int:
    """Write the .ipynb beside `path` in one piece; returns its size in bytes."""
    text = dumps(notebook)
    write_whole(path.with_suffix(".ipynb"), text)
    return len(text.encode())


def take_ipynb(path: Path, root: Path) -> None:
    """Write `path` from its edited .ipynb; raises Fault if `path` has an edit too."""
    fault, edited = compare(path)
    if not fault:
        fault = f"notebooks/{path.stem}.ipynb: has no edit that the .py lacks"
    if edited != {".ipynb"}:
        raise Fault(fault)
    write_whole(path, source_of_stored(path, root))
    print(f"wrote notebooks/{path.name}; `make export notebooks` does the rest")


def select(paths: list[Path], names: list[str]) -> list[Path]:
    """The notebooks with these numbers or names; raises Fault for an unknown one."""
    chosen = []
    for name in names:
        stem = Path(name).stem
        found = [path for path in paths if stem in (path.stem, path.stem[:2])]
        if not found:
            known = ", ".join(path.stem for path in paths)
            raise Fault(f"{name}: no such notebook (there are {known})")
        chosen += found
    return [path for path in paths if path in chosen]


def run_all(paths: list[Path], root: Path, everything: bool) -> list[str]:
    """Execute and write notebooks one after the other; returns the faults."""
    faults = []
    for path in paths:
        fault, edited = compare(path)
        if ".ipynb" in edited:
            faults.append(fault)
            continue
        if not everything and not [*check_stored(path)]:
            print(f"{path.stem}: unchanged", flush=True)
            continue
        print(f"{path.stem}: running", flush=True)
        start = time.perf_counter()
        try:
            size = write(path, execute(path, root))
        except Fault as fault:
            faults.append(str(fault))
            continue
        seconds = time.perf_counter() - start
        print(f"{path.stem}: {seconds:.1f} s, {size / 1000:.0f} kB", flush=True)
    return faults


def main(arguments: list[str] | None = None) -> int:
    """Execute or check the notebooks; 0 when all is well, 1 with the reasons if not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="numbers or names; all without")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--check", action="store_true", help="compare, execute nothing")
    task.add_argument(
        "--check-outputs", action="store_true", help="look at what the .ipynb store"
    )
    task.add_argument("--take-ipynb", action="store_true", help="the .ipynb was edited")
    task.add_argument("--force", action="store_true", help="execute unchanged ones too")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    if options.take_ipynb and not options.names:
        parser.error("--take-ipynb: of which notebooks? (their numbers)")
    root = options.root.resolve()
    try:
        paths = notebook_paths(root)
        chosen = select(paths, options.names) if options.names else paths
        if options.take_ipynb:
            for path in chosen:
                take_ipynb(path, root)
            return 0
    except Fault as fault:
        print(fault, file=sys.stderr)
        return 2
    faults = [fault for path in chosen for fault in check_source(path, root)]
    if options.check:
        faults += [fault for path in chosen if (fault := compare(path).fault)]
        faults += check_orphans(root)
    elif options.check_outputs:
        faults += [fault for path in chosen for fault in check_stored(path)]
    elif not faults:
        faults = run_all(chosen, root, options.force or bool(options.names))
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        return 1
    print(f"{len(chosen)} notebooks agree with their sources")
    return 0


if __name__ == "__main__":
    sys.exit(main())
