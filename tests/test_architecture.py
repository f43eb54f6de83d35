"""The house: what imports what, and how large a file may grow.

Imports run one way, function-level ones included. What does not yet hold is listed
here by name; an entry that has become untrue fails, so the lists only get shorter.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mamba3lite"
MOST_LINES, MOST_NOTEBOOK_LINES = 900, 1200

CIRCLES = {
    frozenset({"bench", "bench_command", "bench_decode"}),
    frozenset({"models.ssd_complex", "models.ssd_fused", "models.ssd_triton"}),
}
TOO_LONG = {"models/decode.py", "models/ssd_fused.py"}
TOO_LONG_NOTEBOOKS = {
    "03_chunkwise_ssd.py",
    "05_triton_kernel.py",
    "06_rotary_fusion.py",
    "07_block_and_model.py",
    "08_training.py",
    "09_decoding.py",
}


def module_of(path: Path, package: Path = PACKAGE) -> str:
    """The name below the package: training.run of training/run.py; of itself, none."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(source: str, here: str, modules: set[str]) -> set[str]:
    """Modules of the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{here}: a relative import"
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            if root == PACKAGE.name and rest in modules and rest:
                found.add(rest)
    return found - {here}


def import_graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    paths = {module_of(path, package): path for path in package.rglob("*.py")}
    return {
        name: imports_of(path.read_text(), name, set(paths))
        for name, path in paths.items()
    }


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Modules that reach each other, a set for each such group."""

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for name in graph[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        return seen

    reach = {name: reached(name) for name in graph}
    return {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in graph
        if name in reach[name]
    }


def test_models_import_nothing_from_the_rest():
    for name, used in import_graph().items():
        if name.startswith("models"):
            assert all(other.startswith("models") for other in used), name


@pytest.mark.parametrize("lower", ["data", "models"])
def test_nothing_below_imports_the_trainer(lower):
    above = ("training", "cli", "bench", "generate", "doctor")
    for name, used in import_graph().items():
        if name.startswith(lower):
            assert not any(other.startswith(above) for other in used), name


def test_only_the_circles_that_are_listed():
    assert circles(import_graph()) == CIRCLES


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert circles(graph) == {frozenset("abc")}
    source = (
        "def f():\n    from mamba3lite.training import run\nimport mamba3lite.data\n"
    )
    assert imports_of(source, "x", {"training.run", "data", ""}) == {
        "training.run",
        "data",
    }


def lines_of(folder: Path, most: int) -> set[str]:
    """Files with more lines than that, by their place in the folder."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if len(path.read_text().splitlines()) > most
    }


def test_no_file_outgrows_a_sitting():
    assert lines_of(PACKAGE, MOST_LINES) == TOO_LONG
    assert lines_of(ROOT / "notebooks", MOST_NOTEBOOK_LINES) == TOO_LONG_NOTEBOOKS
