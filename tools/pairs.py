"""A pair: NN_name.py, the source, and NN_name.ipynb, the same cells with outputs.

The normal form of an .ipynb is stated here: ids come from the sources of the cells,
only `kernelspec` and `tags` are kept as metadata, paths of this machine are replaced.
tools/notebooks.py writes it after an execution, tools/lab when JupyterLab saves.
"""

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import jupytext
import nbformat
from jupytext.config import JupytextConfiguration, load_jupytext_configuration_file
from nbformat import NotebookNode

PERCENT = {"extension": ".py", "format_name": "percent"}
KERNELSPEC = {
    "display_name": "Python 3 (ipykernel)",
    "language": "python",
    "name": "python3",
}
# The boundary before it keeps the search linear in a long line without spaces.
CELL_FILE = re.compile(r"""(?<![^\s"'(])[^\s"'(]*/ipykernel_\d+/\d+\.py""")


# ----------------------------------------------------------------------- the two files


def load_source(path: Path) -> NotebookNode:
    """The notebook of a .py as it is before execution: ids set, outputs empty."""
    return from_source(path.read_text(encoding="utf-8"))


def from_source(text: str) -> NotebookNode:
    """The notebook of a py:percent text, in normal form."""
    return normalize(jupytext.reads(text, fmt=PERCENT))


def load_stored(path: Path) -> NotebookNode:
    """The .ipynb beside `path`, as it is; raises NotJSONError if it is none."""
    stored = path.with_suffix(".ipynb")
    try:
        return nbformat.read(stored, as_version=nbformat.NO_CONVERT)
    except (AttributeError, KeyError, TypeError) as error:  # JSON of something else
        raise nbformat.reader.NotJSONError(f"{stored}: {error}") from error


def dumps(notebook: NotebookNode) -> str:
    """The text of an .ipynb."""
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


def as_saved(notebook: NotebookNode, root: Path) -> str:
    """The text of the .py that JupyterLab writes for `notebook`."""
    notebook.metadata["kernelspec"] = NotebookNode(KERNELSPEC)
    return jupytext.writes(notebook, fmt=PERCENT, config=jupytext_config(root))


def source_of_stored(path: Path, root: Path) -> str:
    """The text of a .py with the cells of the .ipynb beside it.

    Blank lines between the cells stay as they are in the .py; an .ipynb has none.
    """
    text = path.read_text(encoding="utf-8")
    ours = jupytext.reads(text, fmt=PERCENT, config=jupytext_config(root)).cells
    stored = load_stored(path)
    old, new = ([cell.source for cell in cells] for cells in (ours, stored.cells))
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for kind, start, end, first, last in matcher.get_opcodes():
        if kind == "equal" or end - start == last - first:
            pairs = zip(ours[start:end], stored.cells[first:last], strict=True)
            for cell, edited in pairs:
                if (lines := cell.metadata.get("lines_to_next_cell")) is not None:
                    edited.metadata["lines_to_next_cell"] = lines
    return as_saved(stored, root)


def jupytext_config(root: Path) -> JupytextConfiguration:
    """The pairing configuration that JupyterLab uses for the notebooks of `root`."""
    return load_jupytext_configuration_file(str(root / "notebooks" / "jupytext.toml"))


def at_last_commit(path: Path) -> str | None:
    """The text of a file as git has it; None without git or where git has none."""
    # safe.directory: in a container the checkout may belong to somebody else.
    command = ["git", "-c", "safe.directory=*", "show", f"HEAD:./{path.name}"]
    try:
        found = subprocess.run(command, cwd=path.parent, capture_output=True)
    except FileNotFoundError:
        return None
    return found.stdout.decode("utf-8") if found.returncode == 0 else None


# --------------------------------------------------------------------- the normal form


def normalize(notebook: NotebookNode) -> NotebookNode:
    """Set the ids of the cells and drop all metadata but kernelspec and tags."""
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNELSPEC))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell, name in zip(notebook.cells, cell_ids(notebook.cells), strict=True):
        cell.id = name
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode(tags=tags) if tags else NotebookNode()
    return notebook


def cell_ids(cells: list[NotebookNode]) -> Iterator[str]:
    """An id a cell: the hash of its source, with a counter from its second equal on."""
    seen: dict[str, int] = {}
    for cell in cells:
        name = hashlib.sha256(cell.source.encode()).hexdigest()[:12]
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"


def sanitize(value: object, places: dict[str, str]) -> object:
    """`value`, a part of an output, with the paths of this machine replaced.

    Not in pictures: the base64 of a PNG may spell a path by chance.
    """
    if isinstance(value, str):
        value = CELL_FILE.sub("<cell>", value)
        for place, name in places.items():
            value = re.sub(rf"{re.escape(place)}(?![\w.-])", name, value)
        return value
    if isinstance(value, list):
        return [sanitize(part, places) for part in value]
    if isinstance(value, dict):
        return NotebookNode(
            (key, part if key.startswith("image/") else sanitize(part, places))
            for key, part in value.items()
        )
    return value


def machine_places(root: Path) -> dict[str, str]:
    """Folders of this machine, longest first, and what stands for them in outputs."""
    places = {
        sys.prefix: "<python>",
        sys.base_prefix: "<python>",
        str(root.resolve()): "<repo>",
        str(Path.home()): "~",
    }
    places.pop("/", None)
    return dict(sorted(places.items(), key=lambda item: -len(item[0])))


def keep_outputs(saved: NotebookNode, path: Path, root: Path) -> NotebookNode:
    """What a save in JupyterLab stores beside `path`, in normal form.

    A cell whose source did not change keeps its stored output or, after an edit was
    undone, its committed one. An edited cell gets the output it has on the screen and
    no number: `make notebooks` has not executed it. Without a committed version (a copy
    outside of git) every output is the reader's.
    """
    notebook = normalize(saved)
    committed_text = at_last_commit(path.with_suffix(".ipynb"))
    if committed_text is None:
        return notebook
    committed = code_by_id(nbformat.reads(committed_text, nbformat.NO_CONVERT))
    stored = code_by_id(load_stored(path))
    places = machine_places(root)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.outputs = sanitize(cell.outputs, places)
        before = stored.get(cell.id)
        if before and (cell.id in committed or cell.outputs == before.outputs):
            kept = before
        else:
            kept = committed.get(cell.id, NotebookNode(execution_count=None))
        cell.update(kept)
    return notebook


def code_by_id(notebook: NotebookNode) -> dict[str, NotebookNode]:
    """Outputs and number of each code cell by the id that its source gives it."""
    cells = zip(notebook.cells, cell_ids(notebook.cells), strict=True)
    return {
        name: NotebookNode(outputs=cell.outputs, execution_count=cell.execution_count)
        for cell, name in cells
        if cell.cell_type == "code"
    }


# ------------------------------------------------------------------ which side is ahead


def inputs(notebook: NotebookNode) -> list[tuple[str, tuple[str, ...], str]]:
    """What a reader edits in each cell: type, tags and source."""
    return [
        (cell.cell_type, tuple(cell.metadata.get("tags", ())), cell.source)
        for cell in notebook.cells
    ]


class Comparison(NamedTuple):
    """What differs between the files of a pair.

    fault: a line that says which is ahead and what to run; "" if neither is.
    edited: ".py", ".ipynb", both; none if they agree or were committed unlike.
    """

    fault: str
    edited: frozenset[str] = frozenset()


def compare(path: Path) -> Comparison:
    """Compare the cells of a pair: types, tags and sources."""
    name = f"notebooks/{path.stem}.ipynb"
    if not path.with_suffix(".ipynb").exists():
        return Comparison(f"{name}: missing; run `make notebooks`")
    try:
        stored = load_stored(path)
    except nbformat.reader.NotJSONError:
        return Comparison(f"{name}: not a notebook (a merge?); run `make notebooks`")
    ours, theirs = inputs(load_source(path)), inputs(stored)
    if ours == theirs:
        return Comparison("")
    where = f"{name} is not {path.name} from {first_difference(ours, theirs)} on"
    take = f"`.venv/bin/python tools/notebooks.py --take-ipynb {path.stem[:2]}`"
    drop = f"`git checkout {name}` drops it"
    edited = edited_files(path, stored)
    if ".ipynb" not in edited:
        line = f"{where}: it is stale; run `make notebooks`"
    elif ".py" in edited:
        line = (
            f"{where}: both were edited; commit the .py, then {take} puts the cells of "
            f"the .ipynb in its place, {drop}"
        )
    else:
        line = f"{where}: the .ipynb was edited; {take} brings that over, {drop}"
    return Comparison(line, edited)


def edited_files(path: Path, stored: NotebookNode) -> frozenset[str]:
    """Which files of a pair that differs were edited since they agreed.

    An edit of the .ipynb shows in an id that its cell's source does not give, or in a
    difference from the last commit where the .py has none: with the ids of its sources
    it may have been written by `make notebooks` before the .py was edited again.
    """
    own = [cell.get("id") for cell in stored.cells] == [*cell_ids(stored.cells)]
    source_before = at_last_commit(path)
    stored_before = at_last_commit(path.with_suffix(".ipynb"))
    if source_before is None or stored_before is None:
        return frozenset([".py"] if own else [".ipynb"])
    source = inputs(load_source(path)) != inputs(from_source(source_before))
    before = nbformat.reads(stored_before, nbformat.NO_CONVERT)
    if source:
        output = inputs(stored) != inputs(before) and not own
    else:
        output = inputs(stored) != inputs(before) or not own
    return frozenset([".py"] * source + [".ipynb"] * output)


def first_difference(ours: list[tuple], theirs: list[tuple]) -> str:
    """The first cell, by number and first line, in which two lists of inputs differ."""
    for number, (one, other) in enumerate(zip_longest(ours, theirs), 1):
        if one != other:
            line = (one or other)[2].partition("\n")[0]
            return f"cell {number} ({line[:40]!r})"
    raise ValueError("the inputs are equal")
