"""tools/notebooks.py: what it stores, and every fault it refuses, planted and named."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_output
from traitlets.config import PyFileConfigLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import export
import pairs

import notebooks

ROOT = Path(__file__).parents[1]

HEADER = """\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---
"""

EXECUTED = """
# %% [markdown]
# # A notebook
# Everything an execution has to deal with.

# %%
import os
import warnings

import matplotlib.pyplot as plt

# %%
print(os.getcwd(), os.__file__, sep="\\n")
warnings.warn("a warning names the file of its cell", stacklevel=1)

# %% [markdown]
# ## Numbers

# %%
print("sum", 0.5 + 0.25)

# %%
print("sum", 0.5 + 0.25)

# %% tags=["a-tag"]
print([hash("seeded"), os.environ["PYTHONHASHSEED"]])
print("one write", flush=True)
print("another", end="")

# %%
plt.plot([1, 2])
plt.show()
"""


class Pair:
    """A repository of one notebook whose .ipynb is made by hand, without a kernel."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys
        self.folder = root / "notebooks"
        self.folder.mkdir()
        shutil.copy(ROOT / "notebooks" / "jupytext.toml", self.folder)

    def make(self, *cells: tuple[str, str, list], name: str = "01_a") -> Path:
        """Cells of (source, tag, outputs) below the heading "Cells"."""
        text = HEADER + "\n# %% [markdown]\n# # Cells\n"
        for source, tag, _ in cells:
            tags = f' tags=["{tag}"]' if tag else ""
            text += f"\n# %%{tags}\n{source}\n"
        path = self.folder / f"{name}.py"
        path.write_text(text)
        notebook = notebooks.load_source(path)
        for count, (_, _, outputs) in enumerate(cells, 1):
            notebook.cells[count].outputs = outputs
            notebook.cells[count].execution_count = count
        path.with_suffix(".ipynb").write_text(notebooks.dumps(notebook))
        return path

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = notebooks.main(["--root", str(self.root), *arguments])
        return code, *self.capsys.readouterr()

    def refusal(self, task: str = "--check") -> str:
        """What a check says of a pair it refuses."""
        code, _, err = self.run(task)
        assert code == 1
        assert "Traceback" not in err
        return err


@pytest.fixture
def pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Pair:
    return Pair(tmp_path, capsys)


def said(text: str) -> list:
    return [new_output("stream", name="stdout", text=text)]


FIGURE = [
    new_output(
        "display_data",
        data={"image/png": "iVBORw0KGgo=", "text/plain": "<Figure with 1 Axes>"},
    )
]


def edit(path: Path, change) -> None:
    """Change the .ipynb beside `path` as a dict."""
    path = path.with_suffix(".ipynb")
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# --------------------------------------------------------------------- the execution


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The .py of an executed notebook."""
    folder = tmp_path_factory.mktemp("executed") / "notebooks"
    folder.mkdir()
    shutil.copy(ROOT / "notebooks" / "jupytext.toml", folder)
    path = folder / "01_a.py"
    path.write_text(HEADER + EXECUTED)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MPLBACKEND", "Agg")
        environment.setenv("PYTHONHASHSEED", "1")
        assert notebooks.main(["--root", str(folder.parent)]) == 0
    return path


@pytest.fixture
def stored(executed: Path) -> nbformat.NotebookNode:
    return nbformat.read(executed.with_suffix(".ipynb"), as_version=4)


def test_an_executed_notebook_passes_its_check(executed, stored):
    nbformat.validate(stored)
    for task in ("--check", "--check-outputs"):
        assert notebooks.main(["--root", str(executed.parent.parent), task]) == 0


def test_a_second_execution_writes_the_same_bytes(executed):
    before = executed.with_suffix(".ipynb").read_bytes()
    assert notebooks.main(["--root", str(executed.parent.parent), "--force"]) == 0
    assert executed.with_suffix(".ipynb").read_bytes() == before


def test_an_unchanged_notebook_is_not_executed(executed, capsys):
    before = executed.with_suffix(".ipynb").stat().st_mtime_ns
    assert notebooks.main(["--root", str(executed.parent.parent)]) == 0
    assert "01_a: unchanged" in capsys.readouterr().out
    assert executed.with_suffix(".ipynb").stat().st_mtime_ns == before


def test_only_kernelspec_and_tags_are_stored_as_metadata(stored):
    assert stored.metadata == {"kernelspec": pairs.KERNELSPEC}
    assert [cell.metadata for cell in stored.cells if cell.metadata] == [
        {"tags": ["a-tag"]}
    ]


def test_ids_come_from_sources_and_equal_cells_count(stored):
    first, second = (
        cell.id for cell in stored.cells if cell.source[:11] == 'print("sum"'
    )
    assert second == f"{first}-2"
    assert len({cell.id for cell in stored.cells}) == len(stored.cells)


def test_paths_of_this_machine_are_replaced(executed, stored):
    where, warning = stored.cells[2].outputs
    module = os.__file__.removeprefix(sys.base_prefix)
    assert where.text == f"<repo>/notebooks\n<python>{module}\n"
    assert warning.text.startswith("<cell>:2: UserWarning: a warning names")
    text = executed.with_suffix(".ipynb").read_text()
    for place in (executed.parent.parent, Path.home(), sys.prefix):
        assert f"{place}/" not in text


def test_the_hash_seed_is_fixed_and_one_stream_is_one_output(stored):
    (output,) = stored.cells[6].outputs
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('seeded'))"],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    seed = int(expected.stdout)
    assert output.text == f"[{seed}, '0']\none write\nanother"


def test_figures_are_drawn_inline_whatever_the_backend_outside(stored):
    (output,) = stored.cells[7].outputs
    assert output.data.keys() == {"image/png", "text/plain"}


def test_the_interpreter_is_on_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    environment = notebooks.kernel_environment(str(tmp_path))
    assert environment["TRITON_INTERPRET"] == "1"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "TRITON_INTERPRET" not in notebooks.kernel_environment(str(tmp_path))


def test_nbval_refuses_one_changed_number_and_nothing_else(executed, tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    text = executed.with_suffix(".ipynb").read_text()
    assert text.count('"sum 0.75\\n"') == 2
    (folder / "true.ipynb").write_text(text)
    changed = text.replace('"sum 0.75\\n"', '"sum 0.74\\n"', 1)
    (folder / "false.ipynb").write_text(changed)
    command = [
        *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"),
        *("--nbval", "--nbval-current-env", "--nbval-cell-timeout", "120"),
        *("--nbval-sanitize-with", str(ROOT / "notebooks" / "nbval.cfg")),
        *(f"--rootdir={folder}", str(folder)),
    ]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    environment.pop("MPLBACKEND", None)
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    verdicts = re.findall(
        r"/(\w+)(?:\.|::)ipynb::Cell (\d+) (PASSED|FAILED)", run.stdout
    )
    assert len(verdicts) == 12, run.stdout
    assert [v for v in verdicts if v[2] == "FAILED"] == [("false", "2", "FAILED")]
    assert "sum 0.74" in run.stdout


def test_a_failing_cell_is_named_and_nothing_is_written(pair):
    path = pair.make(("X = 1", "", []), ("def f():\n    assert X == 2, 'no'", "", []))
    path.write_text(path.read_text() + "\n# %% [markdown]\n# ## Fails\n\n# %%\nf()\n")
    before = path.with_suffix(".ipynb").read_bytes()
    code, out, err = pair.run()
    assert code == 1
    assert 'notebooks/01_a.py:23 ("Fails"): AssertionError: no\n' in err
    assert "assert X == 2" in err, "the traceback"
    assert "\x1b" not in err
    assert "01_a: running" in out
    assert path.with_suffix(".ipynb").read_bytes() == before


def test_a_notebook_is_chosen_by_number_or_name(pair):
    pair.make(("X = 1", "", []), name="01_a")
    pair.make(("X = 1", "", []), name="02_b")
    paths = notebooks.notebook_paths(pair.root)
    assert [p.stem for p in notebooks.select(paths, ["02"])] == ["02_b"]
    assert [p.stem for p in notebooks.select(paths, ["notebooks/01_a.py"])] == ["01_a"]
    code, _, err = pair.run("03")
    assert code == 2
    assert err == "03: no such notebook (there are 01_a, 02_b)\n"


# ------------------------------------------------------------------------ the checks


def test_a_pair_in_order_passes(pair):
    pair.make(("print(1)", "", said("1\n")))
    assert pair.run("--check")[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "cell"),
    [
        ("print(1)", "print(2)", "cell 2 ('print(2)')"),
        ("# %%\n", '# %% tags=["export"]\n', "cell 2 ('print(1)')"),
        ("\n# %%\nprint(1)\n", "", "cell 2 ('print(1)')"),
    ],
)
def test_a_notebook_whose_source_was_edited_is_stale(pair, old, new, cell):
    path = pair.make(("print(1)", "", said("1\n")))
    path.write_text(path.read_text().replace(old, new))
    assert pair.refusal() == (
        f"notebooks/01_a.ipynb is not 01_a.py from {cell} on: it is stale; "
        "run `make notebooks`\n"
    )


def test_file_times_decide_nothing(pair):
    path = pair.make(("print(1)", "", said("1\n")))
    os.utime(path, (2e9, 2e9))
    assert pair.run("--check")[0] == 0
    path.write_text(path.read_text().replace("print(1)", "print(2)"))
    os.utime(path, (1e9, 1e9))
    assert "stale" in pair.refusal()


def test_a_notebook_with_conflict_marks_is_named(pair):
    path = pair.make(("print(1)", "", said("1\n")))
    stored = path.with_suffix(".ipynb")
    stored.write_text("<<<<<<< HEAD\n" + stored.read_text())
    assert "notebooks/01_a.ipynb: not a notebook (a merge?)" in pair.refusal()


def test_json_of_something_else_is_named(pair):
    path = pair.make(("print(1)", "", said("1\n")))
    path.with_suffix(".ipynb").write_text("[]")
    assert "notebooks/01_a.ipynb: not a notebook (a merge?)" in pair.refusal()


def test_a_missing_half_is_named(pair):
    path = pair.make(("print(1)", "", said("1\n")))
    path.rename(path.with_name("02_b.py"))
    said_of_it = pair.refusal()
    assert "notebooks/02_b.ipynb: missing" in said_of_it
    assert "notebooks/01_a.ipynb: has no .py beside it" in said_of_it


def set_id(content):
    content["cells"][1]["id"] = "0123abcd"


def set_timing(content):
    content["cells"][1]["metadata"]["execution"] = {"iopub.status.idle": "12:00"}


def set_language(content):
    content["metadata"]["language_info"] = {"name": "python", "version": "3.11.7"}


def drop_outputs(content):
    content["cells"][1].update(outputs=[], execution_count=None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (set_id, 'the id of notebooks/01_a.py:13 ("Cells") is not its own'),
        (
            set_timing,
            "notebooks/01_a.py:13 (\"Cells\") has 'execution' in its metadata",
        ),
        (set_language, "its metadata is not the kernelspec alone"),
        (drop_outputs, 'notebooks/01_a.py:13 ("Cells") was not executed in order'),
    ],
)
def test_a_notebook_that_something_else_wrote_is_named(pair, change, complaint):
    edit(pair.make(("print(1)", "", said("1\n"))), change)
    assert pair.run("--check")[0] == 0, "the cells are the same"
    said_of_it = pair.refusal("--check-outputs")
    assert f"01_a.ipynb: not written by tools/notebooks.py: {complaint}" in said_of_it


@pytest.mark.parametrize("path", ["/home/me/runs/a", "/tmp/tmpab1_", "/root/.cache"])
def test_a_path_of_a_machine_is_named(pair, path):
    pair.make((f"save({path!r})", "", said(f"first\nsaved {path}/x\n")))
    expected = (
        f'01_a.py:13 ("Cells"): a path of this machine in the output: saved {path}/x'
    )
    assert expected in pair.refusal("--check-outputs")


IGNORE = "nbval-ignore-output"


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        (FIGURE, "figures only"),
        (FIGURE + FIGURE, "figures only"),
        (said("loss 2.31, T = 64, 640x480\n"), "deterministic text"),
        (said("largest error 1.2e-07\n") + FIGURE, "deterministic text"),
        ([], "empty"),
    ],
)
def test_an_output_that_nbval_could_compare_is_not_ignored(pair, outputs, kind):
    pair.make(("show()", IGNORE, outputs))
    assert (
        f'notebooks/01_a.py:13 ("Cells"): tagged {IGNORE}, but its output is {kind}'
    ) in pair.refusal("--check-outputs")


@pytest.mark.parametrize(
    "text",
    ["took 3.1 s", "12 ms", "41,000 tokens/s", "torch 2.13.0", "on cpu", "peak 312 MB"],
)
def test_times_versions_and_devices_may_be_ignored(pair, text):
    pair.make(("show()", IGNORE, said(text)))
    assert pair.run("--check-outputs")[0] == 0


@pytest.mark.parametrize(("name", "allowed"), [("01_a", 4), ("08_training", 10)])
def test_ignored_cells_are_few(pair, name, allowed):
    cells = [(f"show({i})", IGNORE, said(f"{i} s")) for i in range(allowed)]
    pair.make(*cells, name=name)
    assert pair.run("--check-outputs")[0] == 0
    pair.make(*cells, ("show()", IGNORE, said("1 s")), name=name)
    assert (
        f"notebooks/{name}.py: {allowed + 1} cells are tagged {IGNORE}, "
        f"at most {allowed} may be: lines 13, 16"
    ) in pair.refusal("--check-outputs")


def test_a_large_notebook_is_named_with_its_largest_output(pair):
    pair.make(("A = 1", "", said("x" * 90_000)), ("B = 2", "", said("x" * 305_000)))
    assert pair.run("--check-outputs")[0] == 0
    pair.make(("A = 1", "", said("x" * 100_000)), ("B = 2", "", said("x" * 305_000)))
    assert (
        "notebooks/01_a.ipynb: 406 kB, at most 400; the largest output, 305 kB, is "
        'that of notebooks/01_a.py:16 ("Cells")'
    ) in pair.refusal("--check-outputs")


def test_a_large_notebook_is_not_written(pair):
    path = pair.make(("print('x')", "", said("x\n")))
    path.write_text(path.read_text().replace("'x'", "('x' * 99 + '\\n') * 4_000"))
    before = path.with_suffix(".ipynb").read_bytes()
    code, _, err = pair.run()
    assert code == 1
    assert "the largest output, 404 kB" in err
    assert path.with_suffix(".ipynb").read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (HEADER + "\n", "", r"1: {}; write '# ---\n' here and not '# %% [ma"),
        ("# %%\n", "#%%\n", r"12: {}; write '# %%\n' here and not '#%%\n'"),
        ("(ipykernel)", "(my-venv)", "4: {}; write '#     display_name: Python 3 (ipy"),
        (
            "print(1)\n",
            "print(1)",
            r"13: {}; write 'print(1)\n' here and not ",
        ),
    ],
)
def test_a_source_that_jupyterlab_would_rewrite_is_named(pair, old, new, complaint):
    path = pair.make(("print(1)", "", said("1\n")))
    path.write_text(path.read_text().replace(old, new))
    shown = complaint.format("saving it in JupyterLab would change more than an edit")
    refusal = pair.refusal()
    assert f"notebooks/01_a.py:{shown}" in refusal
    assert refusal.count("\n") == 1


# -------------------------------------------------- which side was edited; JupyterLab


def commit(root: Path) -> None:
    """Commit everything below `root`, in a repository of its own."""
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=root, check=True)


@pytest.fixture
def committed(pair: Pair) -> Path:
    """The .py of a committed pair."""
    path = pair.make(("X = 1", "", []), ("print(X)", "", said("1\n")))
    commit(pair.root)
    return path


def edit_source(path: Path) -> None:
    path.write_text(path.read_text().replace("X = 1", "X = 3"))


def edit_stored(content: dict) -> None:
    content["cells"][2]["source"] = ["print(X + 1)"]


def delete_the_last(content: dict) -> None:
    del content["cells"][2]


def add_a_tag(content: dict) -> None:
    content["cells"][2]["metadata"]["tags"] = ["export"]


edits_of_the_ipynb = pytest.mark.parametrize(
    "change", [edit_stored, delete_the_last, add_a_tag]
)
TAKE = "`.venv/bin/python tools/notebooks.py --take-ipynb 01`"
DROP = "`git checkout notebooks/01_a.ipynb` drops it"


@edits_of_the_ipynb
def test_an_edit_of_the_ipynb_is_named_kept_and_brought_over(pair, committed, change):
    edit(committed, change)
    stored = committed.with_suffix(".ipynb")
    before = [committed.read_bytes(), stored.read_bytes()]
    expected = f": the .ipynb was edited; {TAKE} brings that over, {DROP}\n"
    assert pair.refusal().endswith(expected)
    code, _, err = pair.run("--force")
    assert (code, err.endswith(expected)) == (1, True)
    code = export.main(["--root", str(pair.root)])
    assert (code, pair.capsys.readouterr().err.endswith(expected)) == (1, True)
    assert [committed.read_bytes(), stored.read_bytes()] == before

    code, out, _ = pair.run("--take-ipynb", "01")
    assert (code, out) == (
        0,
        "wrote notebooks/01_a.py; `make export notebooks` does the rest\n",
    )
    assert pair.run("--check")[0] == 0
    assert stored.read_bytes() == before[1]
    assert notebooks.load_source(committed).cells[1].source == "X = 1"
    assert pair.run()[0] == 0, "executed"
    assert pair.run("--check-outputs")[0] == 0


def test_an_edit_brought_over_is_all_that_changes_in_the_py(pair):
    """Blank lines between cells too, of which an .ipynb knows nothing."""
    path = min((ROOT / "notebooks").glob("03_*.py"))
    for kind in (".py", ".ipynb"):
        shutil.copy(path.with_suffix(kind), pair.folder)
    commit(pair.root)
    copy = pair.folder / path.name
    stored = notebooks.load_stored(copy)
    number = max(i for i, c in enumerate(stored.cells) if "\ndef " in c.source)
    before = stored.cells[number].source
    stored.cells[number].source += "\nprint(1)"
    copy.with_suffix(".ipynb").write_text(notebooks.dumps(stored))
    expected = copy.read_text().replace(before, f"{before}\nprint(1)")
    assert pair.run("--take-ipynb", "03")[0] == 0
    assert copy.read_text() == expected


def test_an_edit_of_each_side_is_brought_over_by_neither(pair, committed):
    edit_source(committed)
    edit(committed, edit_stored)
    before = committed.read_bytes()
    expected = (
        "notebooks/01_a.ipynb is not 01_a.py from cell 2 ('X = 3') on: both were "
        f"edited; commit the .py, then {TAKE} puts the cells of the .ipynb in its "
        f"place, {DROP}\n"
    )
    assert pair.refusal() == expected
    for arguments in (["--force"], ["--take-ipynb", "01"]):
        code, _, err = pair.run(*arguments)
        assert code
        assert err == expected
    assert committed.read_bytes() == before
    commit(pair.root)
    pair.run("--take-ipynb", "01")
    assert "print(X + 1)" in committed.read_text()


def test_an_edit_of_the_py_is_executed_whatever_was_committed(pair, committed):
    for value in (3, 4):  # the second time the .ipynb is not the committed one
        source = re.sub(r"X = \d", f"X = {value}", committed.read_text())
        committed.write_text(source)
        assert "it is stale; run `make notebooks`" in pair.refusal()
        assert export.main(["--root", str(pair.root)]) == 0
        code, _, err = pair.run("--take-ipynb", "01")
        assert (code, "it is stale; run `make notebooks`" in err) == (2, True)
        assert pair.run()[0] == 0
    stored = nbformat.read(committed.with_suffix(".ipynb"), 4)
    assert stored.cells[2].outputs[0].text == "4\n"
    assert "has no edit that the .py lacks" in pair.run("--take-ipynb", "01")[2]


def test_without_git_the_ids_say_who_edited(pair):
    path = pair.make(("X = 1", "", []), ("print(X)", "", said("1\n")))
    edit_source(path)
    assert "it is stale; run `make notebooks`" in pair.refusal()
    edit_source(path)
    edit(path, edit_stored)
    assert "the .ipynb was edited" in pair.refusal()


def saved_in_lab(path: Path, change) -> nbformat.NotebookNode:
    """The .ipynb beside `path` after a save in JupyterLab of what `change` made."""
    on_screen = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    change(on_screen)
    on_screen.metadata["language_info"] = {"name": "python"}
    for cell in on_screen.cells:
        cell.metadata["trusted"] = True
    notebook = pairs.keep_outputs(on_screen, path, path.parents[1])
    path.with_suffix(".ipynb").write_text(notebooks.dumps(notebook))
    path.write_text(pairs.as_saved(on_screen, path.parents[1]))
    return notebook


def run_all(screen: nbformat.NotebookNode) -> None:
    screen.cells[1].execution_count = 7
    screen.cells[2].update(execution_count=8, outputs=said("a run\n"))


def edit_and_run(screen: nbformat.NotebookNode) -> None:
    screen.cells[2].source = "print(X, __file__)"
    run_all(screen)
    screen.cells[2].outputs = said(f"1 {sys.prefix}/x\n{Path.home()}/y\n")


def undo(screen: nbformat.NotebookNode) -> None:
    screen.cells[2].source = "print(X)"
    run_all(screen)


def test_a_save_keeps_what_the_last_commit_has_of_unedited_cells(pair, committed):
    before = committed.with_suffix(".ipynb").read_bytes()
    saved_in_lab(committed, run_all)
    assert committed.with_suffix(".ipynb").read_bytes() == before
    notebook = saved_in_lab(committed, edit_and_run)
    assert [c.get("execution_count") for c in notebook.cells] == [None, 1, None]
    assert notebook.cells[2].outputs == said("1 <python>/x\n~/y\n")
    assert pair.run("--check")[0] == 0
    assert "was not executed in order" in pair.refusal("--check-outputs")
    saved_in_lab(committed, undo)
    assert committed.with_suffix(".ipynb").read_bytes() == before


def test_a_save_keeps_what_was_executed_since_the_last_commit(pair, committed):
    edit_source(committed)
    assert pair.run()[0] == 0
    before = committed.with_suffix(".ipynb").read_bytes()
    assert b"3\\n" in before
    saved_in_lab(committed, lambda screen: None)
    assert committed.with_suffix(".ipynb").read_bytes() == before


def test_a_save_of_a_copy_outside_of_git_keeps_the_outputs_of_the_reader(pair):
    path = pair.make(("X = 1", "", []), ("print(X)", "", said("1\n")))
    notebook = saved_in_lab(path, run_all)
    assert notebook.cells[2].outputs == said("a run\n")


def test_the_hook_of_make_lab_writes_both_files_in_their_normal_form():
    place = ROOT / "tools" / "lab"
    config = PyFileConfigLoader("jupyter_server_config.py", str(place)).load_config()
    hook = config.FileContentsManager.pre_save_hook
    source = min((ROOT / "notebooks").glob("*.py"))
    text, stored = source.read_text(), source.with_suffix(".ipynb")
    other = text.replace("Python 3 (ipykernel)", "my kernel")
    assert other != text
    model = {"type": "file", "content": other}
    hook(model=model, path=source.name, contents_manager=None)
    assert model["content"] == text
    content = json.loads(stored.read_text())
    content["metadata"]["language_info"] = {"name": "python"}
    content["cells"][1]["metadata"]["collapsed"] = True
    model = {"type": "notebook", "content": content}
    hook(model=model, path=stored.name, contents_manager=None)
    assert notebooks.dumps(model["content"]) == stored.read_text()
    model = {"type": "notebook", "content": {"mine": 1}}
    hook(model=model, path="Untitled.ipynb", contents_manager=None)
    assert model["content"] == {"mine": 1}


# ------------------------------------------------------- what depends on the processor


@pytest.mark.processor
def test_the_cell_that_compares_every_row_holds_on_this_processor():
    """That of the notebook on decoding; what it needs, earlier cells export."""
    from mamba3lite.models import decode

    (path,) = (ROOT / "notebooks").glob("*_decoding.py")
    (cell,) = (
        cell
        for cell in export.read_notebook(path).cells
        if cell.kind == "code"
        and not cell.tags
        and cell.heading == "Does this device keep the promise?"
    )
    assert "scanned_twice(" in cell.source and "assert" in cell.source
    exec(cell.source, vars(decode) | {"device": torch.device("cpu")})
