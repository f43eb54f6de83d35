"""The documentation hook: notebooks become pages, formulas MathML, anchors links."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from markdown import Markdown

ROOT = Path(__file__).parents[1]


def load_tool(name: str):
    """A module of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(
        f"tool_{name}", ROOT / f"tools/{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site, stages = load_tool("site_hook"), load_tool("stages")

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)


def markdown_cell(source: str, *tags: str) -> dict:
    return {"cell_type": "markdown", "source": source, "metadata": {"tags": [*tags]}}


def code_cell(source: str, *tags: str, outputs: tuple = ()) -> dict:
    return {
        "cell_type": "code",
        "execution_count": 1,
        "source": source,
        "metadata": {"tags": [*tags]},
        "outputs": [*outputs],
    }


def printed(text: str) -> dict:
    return {"output_type": "stream", "name": "stdout", "text": text}


def shown(**data: str) -> dict:
    kinds = {kind.replace("_", "/").replace("0", "+"): v for kind, v in data.items()}
    return {"output_type": "display_data", "data": kinds, "metadata": {}}


def write_notebook(folder: Path, name: str, *cells: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.ipynb"
    notebook = {"cells": [*cells], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


TITLE = markdown_cell("# A title\nWhat it is.", "module:ssd_complex")


# ---------------------------------------------------------------- notebook_page


def test_exported_cells_are_titled_with_the_module_they_go_to(tmp_path):
    path = write_notebook(
        tmp_path,
        "01_a",
        TITLE,
        code_cell("a = 1", "export"),
        code_cell("b = 2", "export:mimo"),
        code_cell("c = 3"),
    )
    page, _ = site.notebook_page(path)
    assert '```python title="exported to mamba3lite/models/ssd_complex.py"\na' in page
    assert '```python title="exported to mamba3lite/models/mimo.py"\nb' in page
    assert "```python\nc = 3\n```" in page


def test_outputs_follow_their_cell_and_figures_come_back_as_bytes(tmp_path):
    figure = shown(image_png=base64.b64encode(PNG).decode(), text_plain="<Figure>")
    svg = "<svg><title>A block, drawn</title></svg>"
    drawing = shown(image_svg0xml=svg)
    source = 'ax.set_title("Decay\\nslows [down]")\nplt.show()'
    path = write_notebook(
        tmp_path,
        "01_a",
        TITLE,
        code_cell("print(1)", outputs=(printed("\x1b[1mone ```\x1b[0m\n"),)),
        code_cell(source, outputs=(figure,)),
        markdown_cell("## The block"),
        code_cell("SVG(block)", outputs=(drawing,)),
    )
    page, figures = site.notebook_page(path)
    assert figures == {"figure_01.png": PNG, "figure_02.svg": svg.encode()}
    assert "```` { .text .output }\none ```\n````" in page
    assert "![Decay slows down](01_a_files/figure_01.png)" in page
    assert "![A block, drawn](01_a_files/figure_02.svg)" in page
    assert page.index("print(1)") < page.index("one ```") < page.index("figure_01")


@pytest.mark.parametrize(
    "source, alt",
    [
        ('fig.suptitle("All")\nax.set_title(f"For {n} steps")', "All. For  steps"),
        ('ax.set(xlabel="t", title="It falls")', "It falls"),
        ('titles = ["real", "complex"]\nax.set_title(titles[0])', "real. complex"),
        ("ax.plot(x)", "The heading above"),
    ],
)
def test_alt_text_is_what_the_titles_of_the_figure_say(tmp_path, source, alt):
    figure = shown(image_png=base64.b64encode(PNG).decode())
    cells = [
        markdown_cell("## The heading above"),
        code_cell(source, outputs=(figure,)),
    ]
    page, _ = site.notebook_page(write_notebook(tmp_path, "01_a", TITLE, *cells))
    assert f"![{' '.join(alt.split())}](" in page


def test_page_offers_the_download_and_the_line_that_opens_it(tmp_path):
    page, _ = site.notebook_page(write_notebook(tmp_path, "01_a", TITLE))
    assert page.startswith("# A title\n")
    assert "[01_a.ipynb](01_a.ipynb)" in page
    assert "\n    make lab\n" in page


def test_notebook_links_lead_to_pages_and_lists_stand_apart(tmp_path):
    text = "See [next](02_b.ipynb#part) and [docs](../docs/guides/q.md):\n- one\n- two"
    path = write_notebook(tmp_path, "01_a", TITLE, markdown_cell(text))
    page, _ = site.notebook_page(path)
    assert "[next](02_b.md#part) and [docs](../guides/q.md):\n\n- one\n- two" in page


def test_reading_a_notebook_is_pure(tmp_path):
    path = write_notebook(tmp_path, "01_a", TITLE, code_cell("1"))
    before = path.read_bytes()
    assert site.notebook_page(path) == site.notebook_page(path)
    assert [p.name for p in tmp_path.iterdir()] == ["01_a.ipynb"]
    assert path.read_bytes() == before


ERROR = {"output_type": "error", "ename": "ZeroDivisionError", "evalue": "division"}


@pytest.mark.parametrize(
    "cells, complaint",
    [
        ([markdown_cell("no title")], "title"),
        ([TITLE, code_cell("1/0", outputs=(ERROR,))], "cell 1: ZeroDivisionError"),
        ([TITLE, code_cell("x", outputs=(shown(audio_wav="x"),))], "audio/wav"),
        ([TITLE, markdown_cell("x") | {"attachments": {"a.png": {}}}], "attachment"),
    ],
)
def test_what_cannot_become_a_page_is_refused_by_name(tmp_path, cells, complaint):
    with pytest.raises(site.NotebookError, match=complaint):
        site.notebook_page(write_notebook(tmp_path, "01_a", *cells))


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    "latex, drawn",
    [
        (r"h_t = \bar{a}_t h_{t-1} + B_t \otimes x_t", ["⊗", "<msub>", "<mover>"]),
        (r"\sum_{s \le t} \Delta_s", ["∑", "≤", "Δ"]),
        (r"\begin{cases} 1 & s \le t \\ 0 & \text{else} \end{cases}", ["{", "else"]),
        (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", ["<mtable", "<mtr>"]),
        (r"\operatorname{softplus}(x) \odot y", ["<mi>softplus</mi>", "⊙"]),
        (r"\ln 2", ["<mi>ln</mi><mspace"]),
        (r"\left| \frac{1+z/2}{1-z/2} \right|", ["<mfrac>", "|"]),
        (r"\mathbb{C}^{N \times D}", ["ℂ", "×"]),
        (r"2 \ln 2", ["</mn><mspace", "<mi>ln</mi><mspace"]),
        (r"h'(t)", ["<mrow><mi>h</mi><mo ", ">′</mo></mrow>"]),
        (r"A = -1", ['form="prefix"']),
        (r"\lVert x \rVert", ['stretchy="false"', "‖"]),
        (r"\langle a \rangle + b", ['<mo stretchy="false">⟨', "<mo>+</mo>"]),
    ],
)
def test_formulas_become_mathml(latex, drawn):
    markup = site.mathml(latex, "block")
    body = re.sub(r'alttext="[^"]*"', "", markup)
    assert markup.startswith("<math ") and "\\" not in body and "&amp;" not in body
    assert all(piece in body for piece in drawn), body


def test_aligned_rows_and_columns_survive():
    markup = site.mathml(r"\begin{aligned} a &= b \\ &= c \end{aligned}", "block")
    assert markup.count("<mtr>") == 2 and markup.count("<mtd ") == 4


@pytest.mark.parametrize(
    "latex", [r"\nosuchcommand x", r"a & b", r"\mathbb R", r"\boxed{x}", r"\frac{1}"]
)
def test_a_formula_that_would_not_draw_is_refused(latex):
    with pytest.raises(site.FormulaError):
        site.mathml(latex)


# ---------------------------------------------------------------- benchmarks

HOSTILE = (
    "<script>x</script> [l](javascript:x) `|` **b** <!-- settings model -->\n```\n# h"
)
REPORTS = sorted((ROOT / "docs/benchmarks").glob("h200-*.json"))
SHOWN = [path for path in REPORTS if "-gate" not in path.name]


def hostile(value, key: str = ""):
    """The same report with hostile text in every string that is no name of a part."""
    if isinstance(value, dict):
        renamed = {k: hostile(v, k) for k, v in value.items()}
        return renamed | ({HOSTILE: HOSTILE} if key == "versions" else {})
    if isinstance(value, list):
        return [hostile(inner, key) for inner in value]
    return HOSTILE if isinstance(value, str) and key not in ("part", "kind") else value


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_strings_of_a_benchmark_file_are_text_on_its_page(path):
    def page(report):
        extensions = ["tables", "attr_list", "md_in_html", "pymdownx.superfences"]
        markdown = Markdown(extensions=[*extensions, site.SiteMarkdown(ROOT)])
        html = markdown.convert(site.benchmark_markdown(report, path.name))
        return html, Counter(re.findall(r"<[a-z0-9]+", html))

    report = json.loads(path.read_text(encoding="utf-8"))
    (_, elements), (html, found) = page(report), page(hostile(report))
    assert set(found) <= set(elements) | {"<span"}, "an element that was not there"
    for name in ("<a", "<strong", "<h1", "<table", "<tr"):
        assert found[name] <= elements[name], name
    assert "&lt;script&gt;" in html or "&#60;script&#62;" in html


# ---------------------------------------------------------------- a small site

PACKAGE = '''"""A demonstration module."""

LIMIT = 3
"""A constant."""


class Box:
    """A box."""

    def open(self) -> int:
        """Open it."""
        self.width = LIMIT
        return self.width


def scan(x: int) -> int:
    """Return x."""
    return x
'''


@pytest.fixture
def tree(tmp_path):
    """A working tree with the real configuration, hook and style, and two pages."""
    for folder in ("docs/assets", "docs/references", "mamba3lite", "tools", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tools/site_hook.py", tmp_path / "tools")
    shutil.copy(ROOT / "docs/assets/site.css", tmp_path / "docs/assets")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    nav = "\nnav:\n  - index.md\n  - Notebooks: []\n  - references/api.md\n"
    (tmp_path / "mkdocs.yml").write_text(config + nav, encoding="utf-8")
    (tmp_path / "mamba3lite/__init__.py").write_text('"""A package."""\n')
    (tmp_path / "mamba3lite/demo.py").write_text(PACKAGE)
    (tmp_path / "docs/references/api.md").write_text("# API\n\n::: mamba3lite.demo\n")
    (tmp_path / "docs/index.md").write_text("# Home\n\nHello.\n")
    figure = shown(image_png=base64.b64encode(PNG).decode())
    write_notebook(
        tmp_path / "notebooks",
        "01_a",
        markdown_cell("# First\nText with $x_t$ and `mamba3lite/demo.py:scan`."),
        code_cell('plt.title("Falls")', outputs=(figure,)),
    )
    return tmp_path


def build(tree: Path) -> subprocess.CompletedProcess:
    """The very command of `make test`: with --quiet it would count no warnings."""
    return subprocess.run(
        [sys.executable, "-m", *stages.TEST["site"].split()],
        cwd=tree,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def add(tree: Path, text: str) -> None:
    with (tree / "docs/index.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{text}\n")


def test_a_strict_build_draws_pages_formulas_figures_and_anchors(tree):
    add(tree, "Inline $a_t$, code `$HOME`.\n\n$$\\sum_{s \\le t} x_s$$")
    add(tree, "- item\n\n    $$y = x$$\n")
    add(tree, "`mamba3lite/demo.py:Box.open`, `mamba3lite/demo.py:Box.width`,")
    add(tree, "`mamba3lite/demo.py:LIMIT`, `mamba3lite/demo.py`,")
    add(tree, "[n](notebooks/01_a.md)")
    result = build(tree)
    assert result.returncode == 0, result.stdout + result.stderr
    home = (tree / "site/index.html").read_text(encoding="utf-8")
    assert home.count("<math ") == 3 and "<code>$HOME</code>" in home
    targets = re.findall(r'href="references/api.html#(mamba3lite[\w.]*)"', home)
    module = "mamba3lite.demo"
    assert targets == [f"{module}.Box.open", f"{module}.Box", module, module]
    page = (tree / "site/notebooks/01_a.html").read_text(encoding="utf-8")
    assert 'alt="Falls"' in page
    assert 'href="../references/api.html#mamba3lite.demo.scan"' in page
    assert (tree / "site/notebooks/01_a_files/figure_01.png").read_bytes() == PNG
    assert (tree / "site/notebooks/01_a.ipynb").is_file()
    assert not (tree / "docs/notebooks").exists(), "the hook writes into the site only"


def test_the_site_asks_no_other_host_for_anything(tree):
    assert build(tree).returncode == 0
    loads = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"(.*?)\"")
    for page in (tree / "site").rglob("*.html"):
        for target in loads.findall(page.read_text(encoding="utf-8")):
            assert not re.match(r"(https?:)?//", target), f"{page.name}: {target}"


WARNED = {
    "[gone](guides/gone.md)": "guides/gone.md",
    "[gone](#no-such-heading)": "no-such-heading",
    "[gone](notebooks/01_a.md#no-such-part)": "no-such-part",
    "[gone](/absolute.md)": "absolute.md",
    "An open $x without an end.": "was not drawn",
}


def test_a_strict_build_names_every_planted_fault(tree):
    for fault in WARNED:
        add(tree, fault)
    cell = markdown_cell("# Second\n[gone](03_gone.ipynb)")
    write_notebook(tree / "notebooks", "02_b", cell)
    result = build(tree)
    assert result.returncode != 0
    log = result.stdout + result.stderr
    missed = [text for text in [*WARNED.values(), "03_gone.md"] if text not in log]
    assert not missed, log


@pytest.mark.parametrize(
    "fault, complaint",
    [
        ("`mamba3lite/demo.py:gone`", "mamba3lite/demo.py defines no gone"),
        ("`mamba3lite/demo.py:Box.gone`", "Box in mamba3lite/demo.py has no gone"),
        ("`mamba3lite/gone.py:scan`", "mamba3lite/gone.py does not exist"),
        ("`tests/test_gone.py::test_x`", "tests/test_gone.py does not exist"),
        ("$\\nosuchcommand$", "nosuchcommand"),
    ],
)
def test_a_wrong_anchor_or_formula_stops_its_page(tree, fault, complaint):
    page = Markdown(extensions=[site.SiteMarkdown(tree)])
    with pytest.raises(site.PluginError, match=complaint):
        page.convert(fault)


def test_a_page_that_stops_the_build_is_named(tree):
    add(tree, "`mamba3lite/demo.py:gone`")
    result = build(tree)
    assert result.returncode != 0
    assert "'index.md'" in result.stderr and "defines no gone" in result.stderr
    assert "Traceback" not in result.stderr


# ---------------------------------------------------------------- mkdocs serve


def _wait_for(path: Path, text: str, count: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while path.read_text().count(text) < count:
        assert time.monotonic() < end, path.read_text()
        time.sleep(0.2)


@pytest.mark.slow
def test_editing_a_notebook_rebuilds_once_not_in_a_loop(tree):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = tree.parent / f"{tree.name}.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "mkdocs", "serve", "--dev-addr", address],
            cwd=tree,
            env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_for(log, "Serving on", 1, 60)
        time.sleep(3)  # the observer polls twice a second
        assert log.read_text().count("Building documentation") == 1
        cell = markdown_cell("# First, edited")
        write_notebook(tree / "notebooks", "01_a", cell)
        _wait_for(log, "Reloading browsers", 1, 60)
        time.sleep(4)
        assert log.read_text().count("Building documentation") == 2, log.read_text()
    finally:
        server.terminate()
        server.wait(timeout=20)
