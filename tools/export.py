"""Build the modules of mamba3lite/models from the exported cells of the notebooks.

    python tools/export.py            write the modules
    python tools/export.py --check    compare in memory: diff on stdout, exit 1

What decides where a cell goes:

- `module:ssd_complex`, a tag on a notebook's first cell, names its module;
- `export`, a tag on a code cell, sends that cell there;
- `export:mimo` sends it to another module.

Notebooks are read in number order and several may build one module. The tool writes
the notice, the docstring, `from __future__ import annotations`, `__all__` and the
back-links; every other line is a cell's, byte for byte. There is no way back from a
module to its notebook: the diff says what was edited, the back-link where it belongs.
"""

import argparse
import ast
import builtins
import difflib
import re
import symtable
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import jupytext
from jupytext.magics import comment_magic
from pairs import PERCENT, compare

ROOT = Path(__file__).resolve().parent.parent
MODELS = Path("mamba3lite/models")
PACKAGE = "mamba3lite.models"
ALWAYS_THERE = {*dir(builtins), "__name__", "__file__", "__doc__", "__spec__"}


class Fault(Exception):
    """One line that says what is wrong, where, and what to do."""


@dataclass(frozen=True)
class Cell:
    """One cell of a notebook.

    `line` is where the source of a code cell starts in the .py; a markdown cell has
    the line of the code before it.
    """

    notebook: str
    kind: str
    source: str
    tags: tuple[str, ...]
    heading: str
    slug: str
    line: int

    def at(self, offset: int = 0) -> str:
        """Where a reader finds this cell, `offset` lines into its source."""
        return f'notebooks/{self.notebook}:{self.line + offset} ("{self.heading}")'


@dataclass(frozen=True)
class Notebook:
    """A notebook's cells with its title and the first sentence of its prose."""

    name: str
    title: str
    sentence: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Names:
    """What the statements of a cell bind at module level, and what they look up.

    `defined` and `imported` share a name such as that of an optional package.
    """

    defined: frozenset[str]
    imported: frozenset[str]
    used: frozenset[str]


# --------------------------------------------------------------------------- reading


def notebook_paths(root: Path) -> list[Path]:
    """The notebooks of `root` in number order; raises Fault for a name without one."""
    paths = sorted((root / "notebooks").glob("*.py"))
    for path in paths:
        if not re.fullmatch(r"\d\d_\w+\.py", path.name):
            raise Fault(f"notebooks/{path.name}: a notebook is called NN_name.py")
    return paths


def read_notebook(path: Path) -> Notebook:
    """Read a py:percent notebook; every cell knows its heading and its line."""
    text = path.read_text(encoding="utf-8")
    raw = jupytext.reads(text, fmt=PERCENT)
    cells, position = [], 0
    heading, slug, seen = "", "", {}
    for cell in raw.cells:
        if cell.cell_type == "markdown":
            for heading in headings(cell.source):
                slug = github_slug(heading, seen)
        else:
            position = find_source(text, cell.source, position)
        line = text.count("\n", 0, position) + 1
        tags = tuple(cell.metadata.get("tags", ()))
        parts = (path.name, cell.cell_type, cell.source, tags, heading, slug, line)
        cells.append(Cell(*parts))
    prose = "\n\n".join(cell.source for cell in cells if cell.kind == "markdown")
    title = next(iter(headings(prose)), "")
    return Notebook(path.name, title, first_sentence(prose), tuple(cells))


def find_source(text: str, source: str, start: int) -> int:
    """Where the code cell `source` starts in a py:percent text, from `start` on."""
    written = "\n".join(comment_magic(source.split("\n")))
    for body in (source, written):
        pattern = rf"^#\s*%%[^\n]*\n(?={re.escape(body)}\n*(^#\s*%%|\Z))"
        if found := re.compile(pattern, re.MULTILINE).search(text, start):
            return found.end()
    return start


def headings(markdown: str) -> list[str]:
    """The ATX headings of a markdown text, in order, outside fenced code."""
    found, fenced = [], False
    for line in markdown.splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced and (match := re.match(r"#{1,6}\s+(.+?)\s*#*\s*$", line)):
            found.append(match[1])
    return found


def github_slug(heading: str, seen: dict[str, int]) -> str:
    """The anchor GitHub gives `heading`; `seen` counts the equal ones before it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
    count = seen.get(slug, 0)
    seen[slug] = count + 1
    return f"{slug}-{count}" if count else slug


def first_sentence(markdown: str) -> str:
    """The first sentence of the first paragraph that is plain prose."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^#{1,6}\s.*$", "\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        if line and not re.match(r"[>|<]|!\[|\$\$|[-*+] |\d+[.)] ", line):
            return re.match(r".+?[.!?](?=\s+[^a-z]|$)|.+", line)[0]
    return ""


# ------------------------------------------------------------------------- the names


def names_of(source: str, module: str | None = None) -> Names:
    """What `source` binds and looks up at module level, annotations included.

    An import from `module`, the one being built, binds nothing: it looks up.
    """
    tree = ast.parse(source)
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == f"{PACKAGE}.{module}":
            own |= {alias.name for alias in node.names}
    defined = bound_names(ast.unparse(WithoutImports().visit(tree)))
    module_scope = symtable.symtable(source, "<cell>", "exec")
    imported = {s.get_name() for s in module_scope.get_symbols() if s.is_imported()}
    used = {
        symbol.get_name()
        for scope in scopes(source)
        for symbol in scope.get_symbols()
        if symbol.is_referenced()
        and (scope.get_type() == "module" or symbol.is_global())
    }
    return Names(frozenset(defined), frozenset(imported - own), frozenset(used | own))


class WithoutImports(ast.NodeTransformer):
    """Replaces every import by `pass`."""

    def visit_Import(self, node: ast.AST) -> ast.Pass:
        return ast.Pass()

    visit_ImportFrom = visit_Import


def bound_names(source: str) -> set[str]:
    """Names that `source` binds at module level, under whatever condition."""
    return {
        symbol.get_name()
        for scope in scopes(source)
        for symbol in scope.get_symbols()
        if (symbol.is_assigned() or symbol.is_imported())
        and (scope.get_type() == "module" or symbol.is_declared_global())
    }


def scopes(source: str) -> Iterator[symtable.SymbolTable]:
    """The module scope of `source` and every scope inside it."""
    waiting = [symtable.symtable(source, "<cell>", "exec")]
    while waiting:
        scope = waiting.pop()
        yield scope
        waiting.extend(scope.get_children())


def certain_names(body: Iterable[ast.stmt]) -> list[str]:
    """Names, but for imports, that `body` binds whichever way it runs, in order."""
    names = []
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.Assign() | ast.AnnAssign(value=ast.expr()):
                names += [
                    target.id
                    for target in ast.walk(node)
                    if isinstance(target, ast.Name)
                    and isinstance(target.ctx, ast.Store)
                ]
            case ast.If():
                other = certain_names(node.orelse)
                names += [name for name in certain_names(node.body) if name in other]
            case ast.Try():
                rescues = [certain_names(handler.body) for handler in node.handlers]
                names += [
                    name
                    for name in certain_names([*node.body, *node.orelse])
                    if all(name in rescue for rescue in rescues)
                ]
                names += certain_names(node.finalbody)
            case ast.With():
                names += certain_names(node.body)
    return list(dict.fromkeys(names))


# ------------------------------------------------------------------------- the check


def destination(cell: Cell, default: str | None) -> str | None:
    """The module `cell` is exported to, or None; raises Fault for unclear tags."""
    elsewhere = [tag.split(":", 1)[1] for tag in cell.tags if tag.startswith("export:")]
    if not elsewhere and "export" not in cell.tags:
        return None
    if cell.kind != "code":
        raise Fault(f"{cell.at()}: a {cell.kind} cell cannot be exported")
    if len(elsewhere) > 1:
        raise Fault(f"{cell.at()}: exported to two modules, {' and '.join(elsewhere)}")
    module = elsewhere[0] if elsewhere else default
    if module is None:
        raise Fault(f"{cell.at()}: exported, but the first cell has no module: tag")
    if not module.isidentifier():
        raise Fault(f"{cell.at()}: {module!r} is not a module name")
    return module


def default_module(notebook: Notebook) -> str | None:
    """The module named on the first cell; raises Fault for one named elsewhere."""
    named = [
        (position, cell, tag.split(":", 1)[1])
        for position, cell in enumerate(notebook.cells)
        for tag in cell.tags
        if tag.startswith("module:")
    ]
    for position, cell, module in named:
        if position or len(named) > 1:
            raise Fault(
                f"{cell.at()}: tag module:{module}, but a notebook has one, on "
                "its first cell"
            )
    return named[0][2] if named else None


def check_code(cell: Cell) -> None:
    """Raise Fault for code that cannot be a part of a module."""
    try:
        tree = ast.parse(cell.source)
    except SyntaxError as error:
        line = cell.source.splitlines()[(error.lineno or 1) - 1].strip()
        where = cell.at((error.lineno or 1) - 1)
        magic = re.match(r"([\w, ]+=\s*)?[%!?]|.*\?$", line)
        if magic or comment_magic([line]) != [line]:
            raise Fault(f"{where}: magic in an exported cell: {line}") from None
        raise Fault(f"{where}: {error.msg}: {line}") from None
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        where = cell.at(node.lineno - 1)
        if node.module == "__future__":
            raise Fault(f"{where}: leave `from __future__` out, the export writes it")
        if node.names[0].name == "*":
            raise Fault(f"{where}: `import *` in an exported cell hides its names")


def twice_defined(cells: list[Cell], names: list[Names]) -> Iterator[str]:
    """A line for every name that two cells of a module define; imports may repeat."""
    first: dict[str, Cell] = {}
    for cell, own in zip(cells, names, strict=True):
        for name in sorted(own.defined):
            if name in first:
                yield (
                    f"{cell.at()}: {name!r} is exported twice, first in "
                    f"{first[name].at()}"
                )
            first.setdefault(name, cell)
    for cell, own in zip(cells, names, strict=True):
        for name in sorted((own.imported - own.defined) & first.keys()):
            if name not in names[cells.index(first[name])].imported:
                yield (
                    f"{cell.at()}: {name!r} is exported twice, imported here and "
                    f"defined in {first[name].at()}"
                )


def left_behind(
    cells: list[Cell], names: list[Names], others: list[Cell]
) -> Iterator[str]:
    """A line for every name that exported `cells` use and their module lacks.

    `others` are the cells of the notebooks that the module does not get.
    """
    there = ALWAYS_THERE.union(*(own.defined | own.imported for own in names))
    for cell, own in zip(cells, names, strict=True):
        for name in sorted(own.used - there):
            yield (
                f"{cell.at(line_of(name, cell.source))}: uses {name!r}, "
                f"{whereabouts(name, cell, others)}"
            )


def line_of(name: str, source: str) -> int:
    """The line, from 0, on which `source` first looks `name` up."""
    lines = [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Name) and node.id == name)
        or (isinstance(node, ast.ImportFrom) and name in [a.name for a in node.names])
    ]
    return min(lines, default=1) - 1


def whereabouts(name: str, user: Cell, others: list[Cell]) -> str:
    """Which of the `others` defines `name`, the notebook of `user` first."""
    for cell in sorted(others, key=lambda cell: cell.notebook != user.notebook):
        try:
            source = "\n".join(comment_magic(cell.source.split("\n")))
            has = name in bound_names(source)
        except SyntaxError:
            continue
        if has:
            exported = any(tag.startswith("export") for tag in cell.tags)
            kind = "a cell exported elsewhere" if exported else "an unexported cell"
            return f"which only {kind} defines: {cell.at()}"
    return "which no cell defines"


# ------------------------------------------------------------------------ the module


def render(module: str, sources: list[Notebook], cells: list[Cell]) -> str:
    """The text of `module`: notice, docstring, `__all__` and the linked cells."""
    notice = ["# Generated by tools/export.py. Edit the notebook, then `make export`:"]
    notice += [f"#   notebooks/{notebook.name}" for notebook in sources]
    parts = [
        "\n".join(notice) + "\n" + docstring(sources[0]),
        "from __future__ import annotations",
    ]
    trees = [ast.parse(cell.source) for cell in cells]
    body = [node for tree in trees for node in tree.body]
    promised = public(certain_names(body))
    parts.append(name_list("__all__ = ", promised))
    blocks = ["\n\n".join(parts)]
    for (name, slug), run in groupby(cells, lambda cell: (cell.notebook, cell.slug)):
        first, *rest = (cell.source for cell in run)
        blocks += [f"# %% notebooks/{name}#{slug}\n{first}", *rest]
    for node in body:
        if isinstance(node, ast.If) and not node.orelse:
            names = [n for n in public(certain_names(node.body)) if n not in promised]
            if names:
                listed = textwrap.indent(name_list("__all__ += ", names), "    ")
                blocks.append(f"if {ast.unparse(node.test)}:\n{listed}")
    return "\n\n\n".join(blocks) + "\n"


def public(names: Iterable[str]) -> list[str]:
    """The names without a leading underscore."""
    return [name for name in names if not name.startswith("_")]


def name_list(head: str, names: list[str]) -> str:
    """A list of strings on one line, or one a line where it would be too long."""
    quoted = [f'"{name}"' for name in names]
    line = f"{head}[{', '.join(quoted)}]"
    if len(line) <= 84:
        return line
    return f"{head}[\n" + "".join(f"    {name},\n" for name in quoted) + "]"


def docstring(notebook: Notebook) -> str:
    """A module docstring: the title and the first sentence of a notebook."""
    sentence = textwrap.fill(notebook.sentence, 88, break_long_words=False)
    raw = "r" if "\\" in notebook.title + sentence else ""
    return f'{raw}"""{notebook.title}\n\n{sentence}\n"""'


def build(root: Path) -> tuple[dict[Path, str], list[str]]:
    """The text of every module of `root`, and a line for every fault."""
    notebooks = [read_notebook(path) for path in notebook_paths(root)]
    every = [cell for notebook in notebooks for cell in notebook.cells]
    faults, exported = [], {}
    for notebook in notebooks:
        try:
            default = default_module(notebook)
            for cell in notebook.cells:
                if module := destination(cell, default):
                    check_code(cell)
                    exported.setdefault(module, []).append(cell)
        except Fault as fault:
            faults.append(str(fault))
    if faults:
        return {}, faults
    texts = {}
    for module, cells in exported.items():
        used = {cell.notebook for cell in cells}
        sources = [notebook for notebook in notebooks if notebook.name in used]
        if not (sources[0].title and sources[0].sentence):
            faults.append(
                f"notebooks/{sources[0].name}: no `# ` title or no sentence of prose; "
                f"they make the docstring of {module}"
            )
        names = [names_of(cell.source, module) for cell in cells]
        others = [c for c in every if c.kind == "code" and c not in cells]
        faults += twice_defined(cells, names)
        faults += left_behind(cells, names, others)
        texts[MODELS / f"{module}.py"] = render(module, sources, cells)
    return texts, faults + list(orphans(root, texts))


def orphans(root: Path, texts: dict[Path, str]) -> Iterator[str]:
    """A line for every module of the generated folder that no notebook builds."""
    for path in sorted((root / MODELS).glob("*.py")):
        if path.name != "__init__.py" and MODELS / path.name not in texts:
            yield (
                f"{MODELS / path.name}: no notebook exports to this module; bring the "
                "notebook back or delete the module"
            )


def edits_left_behind(root: Path) -> Iterator[str]:
    """A line for every .ipynb that was edited where its .py, the source, was not."""
    for path in notebook_paths(root):
        fault, edited = compare(path)
        if ".ipynb" in edited:
            yield fault


def difference(path: Path, found: str, expected: str) -> str:
    """A unified diff from the module as it is to the module the notebooks make."""
    return "".join(
        difflib.unified_diff(
            found.splitlines(keepends=True),
            expected.splitlines(keepends=True),
            f"{path} (as it is)",
            f"{path} (from the notebooks)",
        )
    )


def main(arguments: list[str] | None = None) -> int:
    """Write or check the modules; 0 when all is well, 1 with the reasons otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    try:
        texts, faults = build(options.root)
        if not options.check:
            faults += edits_left_behind(options.root)
    except Fault as fault:
        texts, faults = {}, [str(fault)]
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        return 1
    stale = 0
    for path, expected in texts.items():
        target = options.root / path
        found = target.read_text(encoding="utf-8") if target.exists() else ""
        if found == expected:
            continue
        stale += 1
        if options.check:
            print(difference(path, found, expected))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(expected, encoding="utf-8")
            print(f"wrote {path}")
    if stale and options.check:
        print(
            "the modules above differ from their notebooks: edit the notebook, then "
            "`make export`",
            file=sys.stderr,
        )
        return 1
    print(f"{len(texts)} modules agree with the notebooks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
