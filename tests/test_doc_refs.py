"""What the documentation says about the code is held against the working tree.

Pages are the Markdown files under docs/, the README and the rendered notebooks. Each
rule is a function that lists faults; one test holds the real tree to it, another
plants a fault and sees it named.

Marks that a page can use:

- `` `mamba3lite/models/mimo.py:MIMO.weight` ``, `` `tests/test_ssd.py::test_x` ``,
  `` `tests/test_x.py::TestX::test_y` ``: a code anchor, from the root of the
  repository, never with a line number;
- a fence opened with `{ .python .run }` is run, all those of a page in one namespace;
  a fence `{ .text .output }` right after it is what it prints;
- a fence `console` holds commands, with a prompt `$ ` when it shows output too;
- the table of kernels in guides/extending.md names every `triton.jit` function;
- a paragraph with *measured* in it names a file of docs/benchmarks.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import runpy
import tomllib
import warnings
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest
import yaml
from markdown import Markdown
from typer.main import get_command

from mamba3lite import bench_command
from mamba3lite.cli import app

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("site_hook", ROOT / "tools/site_hook.py")
site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site)

Pages = dict[str, str]  # address within the site -> Markdown


def all_pages(root: Path = ROOT) -> Pages:
    """Every page by its place under docs/; the README stands as ../README.md."""
    docs = root / "docs"
    found = {
        p.relative_to(docs).as_posix(): site.with_settings(p.read_text(), root)
        for p in docs.rglob("*.md")
    }
    for path in site.notebooks(root):
        found[f"notebooks/{path.stem}.md"] = site.notebook_page(path)[0]
    return found | {"../README.md": (root / "README.md").read_text()}


FENCE = re.compile(
    r"^(?P<indent>[ ]*)(?P<ticks>`{3,})(?P<info>[^\n]*)\n"
    r"(?P<body>.*?)^[ ]*(?P=ticks)[ ]*$",
    re.MULTILINE | re.DOTALL,
)


def fences(text: str) -> list[tuple[str, str]]:
    """(info string, body) of each fenced block, the body without its indent."""
    found = []
    for match in FENCE.finditer(text):
        body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        found.append((match["info"].strip(), body))
    return found


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def code_spans(text: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(text))


# ---------------------------------------------------------------- anchors


def anchor_faults(pages: Pages, root: Path) -> list[str]:
    """Anchors that name nothing, are not written from the root, or name a line."""
    faults = []
    for page, text in pages.items():
        for span in code_spans(text):
            anchor = site.ANCHOR.fullmatch(span)
            if anchor is None:
                if re.match(r"[\w./-]+\.py:{1,2}\w", span):
                    faults.append(f"{page}: {span} is no anchor from the root")
                continue
            try:
                site.resolve_anchor(root, anchor["file"], anchor["symbol"])
            except site.AnchorError as error:
                faults.append(f"{page}: {error}")
    return faults


def test_doc_refs_all_anchors_resolve():
    assert anchor_faults(all_pages(), ROOT) == []


SOURCE = """
import os
__all__ = ["public"]
LIMIT: int = 3
if LIMIT:
    def public(): ...
class Box:
    size = 1
    def open(self):
        self.width = 2
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "mamba3lite").mkdir()
    (tmp_path / "mamba3lite/demo.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_demo.py").write_text(
        "def test_a(): ...\nclass TestBox:\n    def test_b(self): ...\n"
    )
    (tmp_path / "docs/references").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    "anchor",
    [
        "mamba3lite/demo.py",
        "mamba3lite/demo.py:public",
        "mamba3lite/demo.py:LIMIT",
        "mamba3lite/demo.py:Box.open",
        "mamba3lite/demo.py:Box.size",
        "mamba3lite/demo.py:Box.width",
        "tests/test_demo.py::test_a",
        "tests/test_demo.py::TestBox::test_b",
    ],
)
def test_an_anchor_to_what_exists_resolves(tree, anchor):
    assert anchor_faults({"p.md": f"See `{anchor}`."}, tree) == []


@pytest.mark.parametrize(
    "anchor, complaint",
    [
        ("mamba3lite/gone.py:public", "does not exist"),
        ("mamba3lite/demo.py:gone", "defines no gone"),
        ("mamba3lite/demo.py:os", "defines no os"),
        ("mamba3lite/demo.py:Box.gone", "has no gone"),
        ("mamba3lite/demo.py:public.gone", "has no gone"),
        ("tests/test_demo.py::test_b", "defines no test_b"),
        ("tests/test_demo.py::TestBox::test_c", "TestBox in tests/test_demo.py has no"),
        ("tests/test_demo.py::TestGone::test_b", "defines no TestGone"),
        ("mamba3lite/demo.py:12", "no anchor"),
        ("demo.py:public", "no anchor"),
    ],
)
def test_an_anchor_to_what_does_not_exist_is_named(tree, anchor, complaint):
    (fault,) = anchor_faults({"p.md": f"See `{anchor}`."}, tree)
    assert complaint in fault


# ---------------------------------------------------------------- coverage


def public_symbols(root: Path) -> set[str]:
    """`file.py:Symbol` of everything public that the package defines itself."""
    found = set()
    for path in (root / "mamba3lite").rglob("*.py"):
        names = site.definitions(ast.parse(path.read_text()).body)
        exported = names.get("__all__")
        if exported is not None and "models" in path.parts:
            chosen = ast.literal_eval(exported.value)
        else:
            chosen = [name for name in names if not name.startswith("_")]
        file = path.relative_to(root).as_posix()
        found |= {f"{file}:{name}" for name in chosen}
    return found


def uncovered(pages: Pages, root: Path) -> list[str]:
    """Public symbols that no hand-written reference page cites."""
    cited = set()
    for page, text in pages.items():
        if page.startswith("references/") and not page.startswith("references/api"):
            cited |= set(code_spans(text))
    return sorted(public_symbols(root) - cited)


def test_every_public_symbol_is_in_a_reference_page():
    assert uncovered(all_pages(), ROOT) == []


def test_a_symbol_left_out_of_the_references_is_named(tree):
    anchors = [f"`mamba3lite/demo.py:{name}`" for name in ("public", "LIMIT", "Box")]
    whole = {"references/a.md": " ".join(anchors)}
    assert uncovered(whole, tree) == []
    part = {"references/a.md": anchors[0], "references/api.md": anchors[1]}
    part["concepts/b.md"] = anchors[2]
    assert uncovered(part, tree) == [
        "mamba3lite/demo.py:Box",
        "mamba3lite/demo.py:LIMIT",
    ]


# ---------------------------------------------------------------- links


def _extensions() -> list[str]:
    """The names of the Markdown extensions that the site is built with."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return [name for item in config["markdown_extensions"] for name in _names(item)]


def _names(item: str | dict) -> list[str]:
    return [item] if isinstance(item, str) else list(item)


def link_faults(pages: Pages, root: Path) -> list[str]:
    """Relative links to no page or file, and fragments that no heading has."""
    rendered, targets = {}, {}
    for page, text in pages.items():
        extension = site.SiteMarkdown(root)
        html = Markdown(extensions=[*_extensions(), extension]).convert(text)
        rendered[page] = re.sub(r"<pre.*?</pre>", "", html, flags=re.DOTALL)
        targets[page] = set(re.findall(r'\bid="([^"]+)"', html))
    files = _site_files(root)
    faults = []
    for page, html in rendered.items():
        for link in re.findall(r'\b(?:href|src)="([^"]*)"', html):
            if re.match(r"(https?|mailto):", link):
                continue
            path, _, fragment = link.partition("#")
            target = _normal(PurePosixPath(page).parent / path) if path else page
            outside = target.startswith("../") and (root / target[3:]).exists()
            if not (outside or target in targets or target in files):
                faults.append(f"{page}: {link} leads nowhere")
            elif fragment and fragment not in targets.get(target, ()):
                faults.append(f"{page}: {link}: no such heading")
    return faults


def _site_files(root: Path) -> set[str]:
    """Files of the site that are no pages: assets, notebooks and their figures."""
    docs = root / "docs"
    found = {p.relative_to(docs).as_posix() for p in docs.rglob("*") if p.is_file()}
    for path in site.notebooks(root):
        found.add(f"notebooks/{path.name}")
        _, figures = site.notebook_page(path)
        found |= {f"notebooks/{path.stem}_files/{name}" for name in figures}
    return found


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        else:
            parts.append(part)
    text = "/".join(parts)
    return text.removeprefix("../docs/")


def test_links_and_fragments_lead_somewhere():
    assert link_faults(all_pages(), ROOT) == []


def test_a_link_that_leads_nowhere_is_named(tree):
    pages = {
        "a.md": "# A\n[b](b.md) [part](guides/c.md#the-part) [here](#a)\n\n`[x](y.md)`",
        "b.md": "# B\n[gone](gone.md)\n\n![gone](assets/gone.svg)",
        "guides/c.md": "# C\n## The part\n[up](../a.md) [gone](../a.md#gone)",
        "../README.md": "[docs](docs/b.md) [gone](docs/gone.md) [a](mamba3lite/demo.py)"
        " [gone](notebooks/gone.ipynb)",
    }
    assert link_faults(pages, tree) == [
        "b.md: gone.md leads nowhere",
        "b.md: assets/gone.svg leads nowhere",
        "guides/c.md: ../a.md#gone: no such heading",
        "../README.md: docs/gone.md leads nowhere",
        "../README.md: notebooks/gone.ipynb leads nowhere",
    ]


# ---------------------------------------------------------------- snippets


def snippet_faults(page: str, text: str) -> list[str]:
    """Runs the `.run` fences of a page in order; compares what they print."""
    namespace: dict[str, object] = {"__name__": "docs"}
    printed = None
    for info, body in fences(text):
        if (
            ".output" in info
            and printed is not None
            and printed.strip() != body.strip()
        ):
            return [f"{page}: printed {printed!r}, the page says {body!r}"]
        printed = None
        if ".run" in info:
            stream = io.StringIO()
            try:
                with contextlib.redirect_stdout(stream):
                    exec(compile(body, page, "exec"), namespace)
            except Exception as error:
                return [f"{page}: {type(error).__name__}: {error} in\n{body}"]
            printed = stream.getvalue()
    return []


@pytest.mark.parametrize(
    "page", [p for p, text in all_pages().items() if ".run" in text]
)
def test_runnable_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert snippet_faults(page, all_pages()[page]) == []


RUN = "``` { .python .run }\n%s\n```\n\n"
OUTPUT = "``` { .text .output }\n%s\n```\n"


@pytest.mark.parametrize(
    "text, complaint",
    [
        (RUN % "x = 1" + RUN % "print(x)" + OUTPUT % "1", None),
        (RUN % "1 / 0", "ZeroDivisionError"),
        (RUN % "print(1)" + OUTPUT % "2", "the page says"),
        ("```python\n1 / 0\n```\n", None),
    ],
)
def test_a_snippet_that_fails_is_named(text, complaint):
    faults = snippet_faults("p.md", text)
    assert bool(faults) == bool(complaint)
    assert complaint is None or complaint in faults[0]


# ---------------------------------------------------------------- commands

TOOLS = {"git", "cd", "source", "pip", "python", "jupyter", "kill", "ls", "tail"}


def commands(text: str) -> list[str]:
    """Command lines of `console` fences, and code spans that read like one."""
    found = []
    for info, body in fences(text):
        if info.split()[:1] == ["console"]:
            lines = body.replace("\\\n", " ").splitlines()
            prompted = [line[2:] for line in lines if line.startswith("$ ")]
            found += prompted or [line for line in lines if line.strip()]
    start = r"(make|mamba3lite|[.\w/]*python -m) [a-z]"
    spans = [s for s in code_spans(text) if re.match(start, s)]
    return [line.partition("  #")[0] for line in found + spans]


def command_faults(pages: Pages, root: Path) -> list[str]:
    """Commands, options and make targets that do not exist."""
    make_targets = set()
    if (root / "Makefile").exists():
        text = (root / "Makefile").read_text()
        make_targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", text, re.MULTILINE))
    faults = []
    for page, text in pages.items():
        for line in commands(text):
            if why := _command_fault(line.split(), make_targets, root):
                faults.append(f"{page}: {line}: {why}")
    return faults


def _command_fault(words: list[str], make_targets: set[str], root: Path) -> str | None:
    words = [w for w in words if not re.match(r"[A-Z_]+=", w)]  # environment
    first = words[0].removeprefix(".venv/bin/")
    if first == "make":
        wrong = [w for w in words[1:] if w not in make_targets]
        return f"make has no target {wrong[0]}" if wrong else None
    if first == "mamba3lite":
        return _cli_fault(words[1:])
    if first == "python" and words[1:2] == ["-m"]:
        if words[2] == "pytest":
            return _marker_fault(words[3:])
        if words[2].startswith("mamba3lite"):
            return _module_fault(words[2], words[3:])
    if first == "torchrun" and "-m" in words:
        module = words.index("-m") + 1
        return _module_fault(words[module], words[module + 1 :])
    if first not in TOOLS:
        return f"unknown command {first}"
    missing = [
        w for w in words if w.startswith("notebooks/") and not (root / w).exists()
    ]
    return f"{missing[0]} does not exist" if missing else None


def _module_fault(name: str, words: list[str]) -> str | None:
    shown = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(shown),
        contextlib.suppress(SystemExit),
    ):
        patch.setattr("sys.argv", [name, "--help"])
        warnings.simplefilter("ignore")  # that a module is imported and run
        try:
            runpy.run_module(name, run_name="__main__")
        except ImportError as error:
            return f"no module {name} to run: {error}"
    for word in words:
        if word.startswith("--") and word not in shown.getvalue().split():
            return f"no option {word}"
    return None


def _marker_fault(words: list[str]) -> str | None:
    """A marker that no test can carry."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    known = {line.partition(":")[0] for line in settings["ini_options"]["markers"]}
    marker = words[words.index("-m") + 1] if "-m" in words else None
    return f"no marker {marker}" if marker and marker not in known else None


PASSED_ON = {"bench": bench_command.app}  # commands that hand their words to another


def _cli_fault(words: list[str]) -> str | None:
    command = get_command(app)
    if words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if command.name in PASSED_ON:
        command = get_command(PASSED_ON[command.name])
    options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in options | {"--help"}:
            return f"no option {word}"
    return None


def test_commands_options_and_targets_exist():
    assert command_faults(all_pages(), ROOT) == []


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("```console\nmake go\nmamba3lite train --config tiny\n```", None),
        ("Type `make gone`.", "no target gone"),
        ("```console\n$ mamba3lite trian\nno output\n```", "no command trian"),
        ("```console\n.venv/bin/mamba3lite train \\\n  --cnofig x\n```", "no option"),
        ("`mamba3lite bench --tune --json FILE`", None),
        ("`mamba3lite bench --gone`", "no option --gone"),
        ("`mamba3lite doctor --gone`", "no option --gone"),
        ("```console\npython -m mamba3lite.gone\n```", "no module"),
        ("```console\npython -m mamba3lite.training.pretrain --gone\n```", "no option"),
        ("```console\npython -m mamba3lite.training.pretrain --set\n```", None),
        ("`.venv/bin/python -m mamba3lite.bench --gone`", "no option --gone"),
        ("Type `python -m mamba3lite.bench --tune`.", None),
        ("Type `python -m mamba3lite`.", "no module"),
        ("```console\npython -m pytest -m gpuu\n```", "no marker gpuu"),
        ("```console\npython -m pytest -m gpu -rs\n```", None),
        ("```console\ntorchrun -m mamba3lite.training.pretrain --set\n```", None),
        ("```console\ntorchrun -m mamba3lite.gone\n```", "no module"),
        ("```console\ntorchrun -m mamba3lite.bench --gone\n```", "no option --gone"),
        ("```console\nfrobnicate x\n```", "unknown command"),
        ("```console\njupyter lab notebooks/99_gone.ipynb\n```", "does not exist"),
    ],
)
def test_a_command_that_does_not_exist_is_named(tree, text, complaint):
    (tree / "Makefile").write_text("go: .venv\n\techo\nPY := python\n")
    faults = command_faults({"p.md": text}, tree)
    assert bool(faults) == bool(complaint)
    assert complaint is None or complaint in faults[0]


# ---------------------------------------------------------------- kernels

KERNELS_PAGE, KERNELS_HEADING = "guides/extending.md", "### The kernels there are"


def jit_functions(root: Path) -> Counter[str]:
    """How many functions of each name `triton.jit` decorates in the package."""
    return Counter(
        node.name
        for path in (root / "mamba3lite").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
    )


def kernel_faults(pages: Pages, root: Path) -> list[str]:
    """Kernels that the list leaves out, and rows of kernels that do not exist."""
    after = pages[KERNELS_PAGE].partition(f"\n{KERNELS_HEADING}\n")[2]
    listed = Counter(re.findall(r"^\| `(\w+)` \|", re.split(r"\n#+ ", after)[0], re.M))
    found = jit_functions(root)
    faults = [f"{name} is in no row" for name in sorted(found - listed)]
    return faults + [f"{name} is no kernel" for name in sorted(listed - found)]


def test_every_kernel_is_in_the_list_of_kernels():
    assert kernel_faults(all_pages(), ROOT) == []


def test_a_kernel_left_out_or_invented_is_named(tree):
    (tree / "mamba3lite/kernels.py").write_text(
        "if HAS_TRITON:\n    @triton.jit\n    def _first(): ...\n"
        "    @triton.jit(noinline=True)\n    def _second(): ...\n"
    )
    (tree / "mamba3lite/others.py").write_text("@triton.jit\ndef _second(): ...\n")
    rows = "| kernel |\n|---|\n| `_second` | x |\n| `_third` | x |\n"
    page = f"\n{KERNELS_HEADING}\n{rows}\n## Next\n| `_first` | y |\n"
    assert kernel_faults({KERNELS_PAGE: page}, tree) == [
        "_first is in no row",
        "_second is in no row",
        "_third is no kernel",
    ]


# ---------------------------------------------------------------- measured


def measured_faults(pages: Pages, root: Path) -> list[str]:
    """Paragraphs marked *measured* that name no benchmark file that exists."""
    faults = []
    for page, text in pages.items():
        for paragraph in re.split(r"\n\s*\n", prose(text)):
            if not re.search(r"(?<!\*)\*measured\*(?!\*)", paragraph, re.IGNORECASE):
                continue
            files = re.findall(r"benchmarks/([\w./-]+\.(?:jsonl?|txt))", paragraph)
            if not files:
                faults.append(f"{page}: no benchmark file: {paragraph.strip()[:60]}")
            missing = [f for f in files if not (root / "docs/benchmarks" / f).is_file()]
            faults += [f"{page}: benchmarks/{name} does not exist" for name in missing]
    return faults


def test_measured_statements_name_their_file():
    assert measured_faults(all_pages(), ROOT) == []


def test_a_measured_statement_without_its_file_is_named(tree):
    (tree / "docs/benchmarks").mkdir()
    (tree / "docs/benchmarks/scan.json").write_text("{}")
    pages = {
        "a.md": "*measured*: fast, [file](benchmarks/scan.json)\n\n*Measured*: slow",
        "b.md": "*measured*, `docs/benchmarks/gone.json`\n\n*derived*: 433,662,400",
    }
    assert measured_faults(pages, tree) == [
        "a.md: no benchmark file: *Measured*: slow",
        "b.md: benchmarks/gone.json does not exist",
    ]
