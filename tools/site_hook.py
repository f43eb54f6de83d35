"""The MkDocs hook: notebooks, measurements, settings as pages; formulas, code anchors.

Nothing is written outside the site: notebook pages and their figures are handed to
MkDocs in memory, so its strict checks of links and anchors see them like any page,
and `mkdocs serve` never sees a change that it made itself.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import json
import logging
import math
import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, get_args, get_origin
from xml.etree import ElementTree

import griffe
import yaml
from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pydantic.fields import FieldInfo

log = logging.getLogger("mkdocs.hooks.site")

# ---------------------------------------------------------------- formulas


ARITY = {"mfrac": 2, "msub": 2, "msup": 2, "msubsup": 3, "munder": 2, "mover": 2}


class FormulaError(PluginError):
    """A formula that would not be drawn as it was meant."""


def mathml(latex: str, display: str = "inline") -> str:
    """Presentation MathML for one LaTeX formula, limited to what browsers draw.

    Args:
        latex: the formula without its dollar signs.
        display: `"inline"` or `"block"`.

    Raises:
        FormulaError: for an unknown command, a stray `&`, or an element outside
            MathML Core (`\\boxed`, `\\mathbb R` without braces).
    """
    # latex2mathml knows align* but not aligned, which is what MathJax wants in $$.
    source = re.sub(r"\\(begin|end)\{aligned\}", r"\\\1{align*}", latex.strip())
    try:
        text = convert(source, display=display)
        root = ElementTree.fromstring(text.replace(" xmlns=", " data-ns=", 1))
    except Exception as error:
        raise FormulaError(f"cannot read the formula {latex!r}: {error!r}") from error
    for element in root.iter():
        if "\\" in (element.text or ""):
            raise FormulaError(f"unknown command {element.text} in {latex!r}")
        if len(element) != ARITY.get(element.tag, len(element)):
            raise FormulaError(f"an argument is missing in {latex!r}")
        variant = element.get("mathvariant", "normal")
        if element.tag == "menclose" or variant != "normal":
            raise FormulaError(f"browsers do not draw {element.tag} of {latex!r}")
    _set_operators(root)
    root.attrib.pop("data-ns")
    root.set("alttext", latex.strip())
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _set_operators(root: ElementTree.Element) -> None:
    """Give every symbol the role, and with it the spacing, that LaTeX gives it."""
    for element in root.iter():
        text = element.text or ""
        if element.tag == "msup" and set(element[1].text or "-") <= {"′", "″"}:
            element.tag = "mrow"  # the sign is raised already
            element[1].tag = "mo"
            element[1].attrib |= {"lspace": "0", "rspace": "0"}
        elif element.tag == "mi" and len(text) == 1:
            if "Α" <= text <= "Ω":
                element.set("mathvariant", "normal")  # LaTeX's capitals stand upright
            elif text != "∞" and unicodedata.category(text) in {"Sm", "Ps", "Pe"}:
                element.tag = "mo"
                if unicodedata.category(text) != "Sm":
                    element.set("stretchy", "false")  # LaTeX's \langle keeps its size
        elif element.tag == "mo":
            _set_operator(element, text)
    for row in [*root.iter("mrow"), *root.iter("mtd")]:
        _set_signs(row)
        _set_words(row)


def _set_operator(element: ElementTree.Element, text: str) -> None:
    if text == "∞" or (len(text) > 1 and text.isalpha()):
        element.tag = "mi"  # a number, or \operatorname
    elif text == "/":
        element.attrib |= {"lspace": "0.1em", "rspace": "0.1em"}
    elif text in {"|", "‖"} and "form" not in element.attrib:
        element.attrib |= {"stretchy": "false", "lspace": "0", "rspace": "0"}


def _set_signs(row: ElementTree.Element) -> None:
    """The minus of x = -1 is no difference."""
    for before, sign in pairwise(row):
        opens = before.tag == "mo" and before.text not in {")", "]", "⟩", "|", "⊤"}
        if opens and sign.tag == "mo" and sign.text in {"−", "+", "±"}:
            sign.set("form", "prefix")


def _set_words(row: ElementTree.Element) -> None:
    """A thin space between `ln` and its neighbors: 2 ln 2, not 2ln2."""
    for index in reversed(range(len(row) - 1)):
        left, right = row[index], row[index + 1]
        needs_space = _is_word(left) and right.tag not in {"mo", "mspace"}
        needs_space |= _is_word(right) and left.tag not in {"mo", "mspace"}
        if needs_space:
            row.insert(index + 1, ElementTree.Element("mspace", width="0.167em"))


def _is_word(element: ElementTree.Element) -> bool:
    while element.tag in {"msub", "msup", "msubsup", "munder"}:
        element = element[0]
    return element.tag == "mi" and len(element.text or "") > 1


class _DisplayMath(Preprocessor):
    """`$$ ... $$` that opens at the start of a line."""

    pattern = re.compile(
        r"^(?P<indent>[ \t]*)\$\$(?P<latex>.+?)\$\$(?P<after>[ \t]*[.,;]?)[ \t]*$",
        re.MULTILINE | re.DOTALL,
    )

    def run(self, lines: list[str]) -> list[str]:
        return self.pattern.sub(self._block, "\n".join(lines)).split("\n")

    def _block(self, match: re.Match[str]) -> str:
        latex = match["latex"].strip() + match["after"].strip()
        box = f'<div class="math" tabindex="0">{mathml(latex, "block")}</div>'
        indent = match["indent"]
        return f"\n{indent}{self.md.htmlStash.store(box)}\n"


class _InlineMath(InlineProcessor):
    """`$...$`, no space just inside, no digit just after, with its punctuation."""

    def handleMatch(self, m: re.Match[str], data: str):
        box = f'<span class="math">{mathml(m[1])}{m[2]}</span>'
        return self.md.htmlStash.store(box), m.start(0), m.end(0)


INLINE_MATH = r"(?<![\\$])\$(?![\s$])([^$]+)(?<![\s\\])\$(?!\d)([.,;:)]*)"


# ---------------------------------------------------------------- code anchors

ANCHOR = re.compile(
    r"(?P<file>(?:mamba3lite|tests|tools)/[\w/]*\w\.py)"
    r"(?:(?P<colon>::?)(?P<symbol>[A-Za-z_]\w*(?:(?:\.|::)[A-Za-z_]\w*)*))?"
)


class AnchorError(PluginError):
    """A code anchor that names nothing in the working tree."""


def resolve_anchor(root: Path, file: str, symbol: str | None) -> str:
    """What an anchor names: module, function, class, method, attribute or constant.

    The file is parsed, never imported. A class attribute counts when the class body
    or one of its methods (`self.name = ...`) assigns it.

    Raises:
        AnchorError: if the file, the symbol or the member does not exist.
    """
    path = root / file
    if not path.is_file():
        raise AnchorError(f"{file} does not exist")
    if symbol is None:
        return "module"
    names = _defined_in(path, path.stat().st_mtime_ns)
    head, _, member = symbol.replace("::", ".").partition(".")
    if head not in names:
        raise AnchorError(f"{file} defines no {head}")
    node = names[head]
    if not member:
        return _kind(node)
    members = _members(node) if isinstance(node, ast.ClassDef) else {}
    if member not in members:
        raise AnchorError(f"{head} in {file} has no {member}")
    is_method = isinstance(members[member], ast.FunctionDef)
    return "method" if is_method else "attribute"


@lru_cache
def _defined_in(path: Path, modified: int) -> dict[str, ast.stmt]:
    """The definitions of a file; a page of anchors parses each file once."""
    return definitions(ast.parse(path.read_text(encoding="utf-8")).body)


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return "function" if is_function else "constant"


def definitions(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names that a block defines itself (imports excluded), branches included."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found[node.name] = node
            case ast.Assign(targets=targets):
                names = [n for t in targets for n in ast.walk(t)]
                found |= {n.id: node for n in names if isinstance(n, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
            case ast.If() | ast.Try() | ast.With():
                found |= definitions(node.body + getattr(node, "orelse", []))
    return found


def _members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign | ast.AnnAssign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) in {
                    "self",
                    "cls",
                }:
                    found[target.attr] = inner
    return found | definitions(node.body)


def api_identifier(file: str, symbol: str | None, kind: str) -> str:
    """The API entry that shows the source of an anchor.

    Attributes and constants have no source of their own: they lead to their class or
    module.
    """
    parts = [Path(file).with_suffix("").as_posix().replace("/", ".")]
    parts[0] = parts[0].removesuffix(".__init__")
    if symbol and kind != "constant":
        parts.append(symbol.rpartition(".")[0] if kind == "attribute" else symbol)
    return ".".join(parts)


class _CodeAnchor(InlineProcessor):
    """A backticked anchor into the package becomes a reference to its API entry."""

    def __init__(self, pattern: str, md: Markdown, root: Path) -> None:
        super().__init__(pattern, md)
        self.root = root

    def handleMatch(self, m: re.Match[str], data: str):
        kind = resolve_anchor(self.root, m["file"], m["symbol"])
        code = ElementTree.Element("code", title=m[0].strip("`"))
        code.text = m["symbol"] or m["file"]
        if not m["file"].startswith("mamba3lite/"):
            code.text = code.text.rpartition("::")[2]  # its title has the class
            return _breakable(code), m.start(0), m.end(0)
        identifier = api_identifier(m["file"], m["symbol"], kind)
        link = ElementTree.Element("autoref", identifier=identifier)
        link.append(code)
        return link, m.start(0), m.end(0)


def _breakable(code: ElementTree.Element) -> ElementTree.Element:
    """Let a long test name break after its underscores, and nowhere else."""
    code.text, *words = re.split(r"(?<=_)(?=[^_])", code.text)
    for word in words:
        ElementTree.SubElement(code, "wbr").tail = word
    return code


class SiteMarkdown(Extension):
    """Formulas and code anchors for Python-Markdown.

    Args:
        root: the working tree that code anchors point into.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def extendMarkdown(self, md: Markdown) -> None:
        # After fenced code (25) is put away, before raw HTML (20).
        md.preprocessors.register(_DisplayMath(md), "site-display-math", 22)
        # Between backticks (190) and escapes (180).
        anchor = _CodeAnchor(rf"(?<!`)`{ANCHOR.pattern}`(?!`)", md, self.root)
        md.inlinePatterns.register(anchor, "site-code-anchor", 195)
        math = _InlineMath(INLINE_MATH, md)
        md.inlinePatterns.register(math, "site-inline-math", 185)


# ---------------------------------------------------------------- notebooks

TITLE_CALLS = {"set_title", "title", "suptitle"}
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class NotebookError(PluginError):
    """A notebook that cannot become a page."""


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """One executed notebook as Markdown, with the figures it shows.

    Args:
        path: an executed `.ipynb`.

    Returns:
        The page's Markdown, and the bytes of each figure by file name. Figures are
        referred to as `<notebook stem>_files/<file name>`.

    Raises:
        NotebookError: if it does not open with a title, holds an error output, an
            attachment, or an output of a kind that has no place on a page.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    figures: dict[str, bytes] = {}
    home_module, heading, parts = None, path.stem, []
    for index, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        tags = cell.get("metadata", {}).get("tags", [])
        home_module = home_module or _tagged(tags, "module:")
        if cell["cell_type"] == "markdown":
            if cell.get("attachments"):
                raise NotebookError(f"{path.name}, cell {index}: attachment")
            found = re.findall(r"^#+\s+(.+)$", source, re.MULTILINE)
            heading = found[-1] if found else heading
            parts.append(_page_markdown(source))
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(_code_block(source, _exported_to(tags, home_module)))
            alt = _figure_titles(source) or heading
            for output in cell["outputs"]:
                where = f"{path.name}, cell {index}"
                parts.append(_output(output, where, path.stem, alt, figures))
    page = "\n\n".join(part for part in parts if part)
    title, newline, rest = page.partition("\n")
    if not title.startswith("# "):
        raise NotebookError(f"{path.name}: the first line must be its title, `# ...`")
    return f"{title}\n\n{_how_to_open(path.name)}\n{newline}{rest}\n", figures


def _tagged(tags: list[str], prefix: str) -> str | None:
    found = (tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix))
    return next(found, None)


def _exported_to(tags: list[str], home_module: str | None) -> str | None:
    module = _tagged(tags, "export:") or ("export" in tags and home_module) or None
    return module and f"mamba3lite/models/{module}.py"


def _how_to_open(name: str) -> str:
    return (
        f'!!! notebook "This page is a notebook"\n\n'
        f"    Download [{name}]({name}), or open it in a clone of the repository, in\n"
        f"    the JupyterLab that this starts:\n\n"
        f"    ```console\n    make lab\n    ```"
    )


def _fence(text: str, info: str) -> str:
    ticks = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"{ticks}{info}\n{text.rstrip()}\n{ticks}"


def _code_block(source: str, module: str | None) -> str:
    title = f' title="exported to {module}"' if module else ""
    return _fence(source, f"python{title}")


def _page_markdown(source: str) -> str:
    """A Markdown cell with its links turned to pages and its lists set apart.

    Jupyter starts a list right under a paragraph; Python-Markdown wants a blank line.
    """
    source = re.sub(r"(\]\((?:\w+_)*\w+)\.ipynb(#[^)]*)?\)", r"\1.md\2)", source)
    source = source.replace("](../docs/", "](../")
    lines: list[str] = []
    fenced = False
    for line in source.split("\n"):
        fenced ^= line.lstrip().startswith(("```", "~~~"))
        is_item = re.match(r"([-*+]|\d+\.)\s", line)
        before = lines[-1] if lines else ""
        in_list = re.match(r"([-*+]|\d+\.)\s|\s", before)
        if is_item and before.strip() and not in_list and not fenced:
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _figure_titles(source: str) -> str:
    """The titles that a cell gives its figure: what the picture says, as alt text."""
    titles = []
    python = re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE)
    for node in ast.walk(ast.parse(python)):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = node.args[:1] if called in TITLE_CALLS else []
            given += [word.value for word in node.keywords if word.arg == "title"]
            titles += [(node.lineno, _constant_text(value)) for value in given]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "titles":
            titles.append((node.lineno, _constant_text(node.value, ". ")))
    text = ". ".join(text for _, text in sorted(titles) if text)
    return re.sub(r"\s+", " ", text.replace("$", "").replace("\\", ""))


def _constant_text(node: ast.expr, between: str = "") -> str:
    pieces = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return between.join(piece for piece in pieces if isinstance(piece, str))


def _output(
    output: dict, where: str, stem: str, alt: str, figures: dict[str, bytes]
) -> str:
    """Markdown of one output; a picture is added to `figures`."""
    if output["output_type"] == "error":
        raise NotebookError(f"{where}: {output['ename']}: {output['evalue']}")
    if output["output_type"] == "stream":
        return _text_output("".join(output["text"]))
    data = {kind: "".join(v) for kind, v in output["data"].items() if kind != "json"}
    for kind, suffix in (("image/svg+xml", "svg"), ("image/png", "png")):
        if kind in data:
            raw = data[kind]
            name = f"figure_{len(figures) + 1:02}.{suffix}"
            figures[name] = raw.encode() if suffix == "svg" else base64.b64decode(raw)
            own = re.search(r"<title>([^<]+)</title>", raw) if suffix == "svg" else None
            alt = re.sub(r"[\[\]\"]", "", own[1] if own else alt)
            return f"![{alt}]({stem}_files/{name}){{ .figure }}"
    if "text/markdown" in data:
        return _page_markdown(data["text/markdown"])
    if "text/html" in data:
        return f'<div class="output">\n{data["text/html"]}\n</div>'
    if "text/plain" in data:
        return _text_output(data["text/plain"])
    raise NotebookError(f"{where}: no way to show {sorted(data)}")


def _text_output(text: str) -> str:
    text = ANSI.sub("", text)
    return _fence(text, " { .text .output }") if text.strip() else ""


# ---------------------------------------------------------------- docstrings


class InlineSections(griffe.Extension):
    """Docstring sections written on their label's own line, `Raises: KeyError ...`.

    Griffe reads `Raises:` with an indented block under it; this makes a paragraph of
    the other form, so that neither runs into the lines before it.
    """

    pattern = re.compile(
        r"^(Args|Attributes|Returns|Yields|Raises|Shapes|Source): "
        r"(.+(?:\n[ \t]*\S.*)*?)(?=\n\s*\n|\n[A-Z]\w+:|\Z)",
        re.MULTILINE,
    )

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = self.pattern.sub(self._paragraph, obj.docstring.value)

    def _paragraph(self, match: re.Match[str]) -> str:
        text = " ".join(line.strip() for line in match[2].split("\n"))
        return f"\n**{match[1]}:** {text}\n"


# ---------------------------------------------------------------- benchmarks

BENCHMARK = re.compile(r"^<!-- benchmark ([\w.-]+\.json) -->$", re.MULTILINE)
PARTS = {
    "per_chunk": "The inside of the chunks",
    "scan": "The whole scan",
    "block_fp32": "The scan of a block, projection in float32",
    "block_bf16": "The scan of a block, projection in bfloat16",
}
PASSES = ("forward", "forward_backward")
BEST = 3  # launches of a fused kernel that are shown


def benchmark_markdown(report: dict, name: str) -> str:
    """One benchmark file as Markdown: where it comes from, then its tables.

    Args:
        report: what `mamba3lite bench --json` or `mamba3lite.scaling` wrote; older
            files lack some sections.
        name: its file name, for the link; the file lies beside the page.
    """
    report = _inert(report)
    if report.get("kind") == "scaling":
        return scaling_markdown(report, name)
    blocks = [_provenance(report, name)]
    if "decode" in report:
        return "\n\n".join([*blocks, *_decode_tables(report)])
    heads = ["version", "forward, ms", "with backward, ms", "peak, MB", "largest error"]
    for part, title in PARTS.items():
        rows = [_row_cells(row) for row in report["rows"] if row["part"] == part]
        if rows:
            blocks += [f"**{title}**", _table(heads, rows)]
    if report["ratios"]:
        heads = ["times as fast", "forward", "with backward"]
        rows = [
            [_ratio_name(ratio, report["rows"])]
            + [f"{ratio[name]:.2f}" for name in PASSES]
            for ratio in report["ratios"]
        ]
        blocks += ["**The kernel against the others**", _table(heads, rows)]
    for peer, reason in report.get("refused", {}).items():
        blocks.append(f"`{peer}` was installed and not measured. It said: {reason}")
    if report.get("model"):
        title = "**Training steps of a whole model**"
        blocks += [title, _model_table(report["model"])]
    if report.get("launches"):
        title = "**Forward of the per-chunk kernel alone, by launch**"
        blocks += [title, _launch_table(report["launches"])]
    if report.get("fused_launches"):
        title = "**The fused scan, by launch of one of its kernels**"
        blocks += [title, _fused_launches(report["fused_launches"])]
    return "\n\n".join(blocks)


MARKUP = re.compile(r"[^\w .,:;/()+='%-]")
VERBATIM = {"command", "said"}  # shown in a fence


def _inert(value: object) -> object:
    """A report whose strings are text: what Markdown or HTML would read, an entity."""
    if isinstance(value, dict):
        return {
            _inert(key): inner if key in VERBATIM else _inert(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_inert(inner) for inner in value]
    if isinstance(value, str):
        return MARKUP.sub(lambda found: f"&#{ord(found[0])};", value)
    return value


def _provenance(report: dict, name: str) -> str:
    origin = _origin(report, name, report["device"]["name"])
    if not any(report.get(section) for section in ("rows", "model", "decode")):
        return origin  # nothing was timed
    copied = report["ceilings"]["copy_tb_s"]
    products = ", ".join(
        f"{rate:.3g} TFLOP/s in {kind.removesuffix('_tflop_s')}"
        for kind, rate in report["ceilings"].items()
        if kind.endswith("_tflop_s")
    )
    return (
        f"{origin}\n\n"
        f"{_sizes(report)}The device copies {copied:.3g} TB/s and multiplies "
        f"{products}. Times are medians; below them stand the 10th and the 90th "
        "percentile, and the floor."
    )


def _sizes(report: dict) -> str:
    """The shapes of a scan's rows; steps of a model have none but its own."""
    if not report.get("rows"):
        return ""
    shape, error_shape = (
        ", ".join(f"{'C' if key == 'chunk' else key} = {n}" for key, n in sizes.items())
        for sizes in (report["shape"], report["error_shape"])
    )
    return f"Times at {shape}; errors at {error_shape}. "


def _origin(report: dict, name: str, device: str) -> str:
    """Device, date, software and file, and the command below them."""
    software = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v)
    return (
        f"*Measured* on {device}, {report['date']}, with {software}: "
        f"[{name}]({name}).\n\n{_fence(str(report['command']), 'console')}"
    )


def _decode_tables(report: dict) -> list[str]:
    """Time of a step, what a sequence takes, and which bits differ, where measured."""
    heads = ["mode", "sequences", "ms a step", "tokens/s", "with sampling, ms"]
    rows = []
    for row in report["decode"]:
        step, floor = row["step_ms"], _short(row["floor_ms"])
        spread = f"{_short(step['low'])} to {_short(step['high'])}; floor {floor}"
        cells = [f"`{row['mode']}`,&nbsp;{row['dtype']}", f"{row['batch']}"]
        cells += [_two_lines(_short(step["median"]), spread)]
        cells += [f"{row['tokens_per_s']:,.0f}", _short(row["round_ms"]["median"])]
        rows.append(cells)
    blocks = ["**A step of decoding**", _table(heads, rows)] if rows else []
    for row in report["decode_memory"]:
        text = f"A sequence in mode `{row['mode']}` takes {row['slot_bytes']:,} bytes."
        for length, held in row["held_bytes"].items():
            text += f" After {int(length):,} tokens the device holds {held:,} bytes."
        blocks.append(text)
    if bits := report.get("decode_bits"):
        blocks += ["**Against one full forward, bit by bit**", _bits_table(bits)]
    return blocks


def _bits_table(rows: list[dict]) -> str:
    """Rows of logits that differ, by precision of the scan and seed."""
    heads = ["scan", "seed", "rate of decay", "`exact`, batch", "`exact`, alone"]
    heads += ["`recurrent`", "row kernels launched"]
    lines = []
    for row in rows:
        exact, alone, recurrent = row["exact"], row["alone"], row["recurrent"]
        apart = f"log p by up to {recurrent['largest_log_prob']:.2g}"
        share = f"{recurrent['differ']} of {row['rows']} differ"
        lines.append(
            [
                row["precision"],
                f"{row['seed']}",
                f"x {row['decay']:g}",
                f"{exact['differ']} of {row['rows']} differ",
                f"{alone['differ']} of {alone['rows']} differ",
                _two_lines(share, apart),
                f"{sum(row['launches'].values()):,}",
            ]
        )
    return _table(heads, lines)


def _row_cells(row: dict) -> list[str]:
    cells = [f"`{row['version']}`,&nbsp;{row['precision']}"]
    for name in PASSES:
        time = row[f"{name}_ms"]
        median, low, high = (_short(time[of]) for of in ("median", "low", "high"))
        floor = _short(row[f"{name}_floor_ms"])
        cells.append(_two_lines(median, f"{low} to {high}; floor {floor}"))
    worst = max(row["errors"], key=row["errors"].__getitem__)
    peak = f"{row['peak_mb']:.0f}" if "peak_mb" in row else "-"
    return [*cells, peak, _two_lines(f"{row['errors'][worst]:.1e}", f"`{worst}`")]


def _two_lines(above: str, below: str) -> str:
    return f"{above}<br><small>{below}</small>"


def _ratio_name(ratio: dict, rows: list[dict]) -> str:
    """`fused` as `pytorch`, tf32: the whole scan."""
    versions = {row["version"] for row in rows if row["part"] == ratio["part"]}
    kernel = "fused" if "fused" in versions else "triton"
    part = PARTS[ratio["part"]]
    part = part[0].lower() + part[1:]
    return f"`{kernel}` as `{ratio['against']}`, {ratio['precision']}: {part}"


def _model_table(rows: list[dict]) -> str:
    """One line a dispatch, eager or compiled."""
    heads = ["dispatch", "ms a step", "tokens/s", "MFU", "peak, GB", "loss"]
    lines = []
    for row in rows:
        how = "compiled" if row["compiled"] else "eager"
        lines.append(
            [
                f"`{row['dispatch']}`,&nbsp;{how}",
                _short(row["step_ms"]),
                f"{row['tokens_per_s']:,.0f}",
                "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
                f"{row['peak_gb']:.1f}",
                f"{row['first_loss']:.2f} to {row['last_loss']:.2f}",
            ]
        )
    return _table(heads, lines)


def _fused_launches(rows: list[dict]) -> str:
    """The fastest launches of each kernel and precision, and how many did not fit."""
    kernels = dict.fromkeys((row["kernel"], row["precision"]) for row in rows)
    lines = []
    for kernel, precision in kernels:
        ran = [
            row
            for row in rows
            if (row["kernel"], row["precision"]) == (kernel, precision) and "ms" in row
        ]
        ran.sort(key=lambda row: row["ms"]["median"])
        for row in ran[:BEST]:
            channels, states, warps, stages, registers = row["launch"]
            tile = f"{channels} x {states}" if channels else f"{states}"
            cells = [tile, f"{warps}", f"{stages}", f"{registers or 'free'}"]
            cells.append(_short(row["ms"]["median"]))
            lines.append([f"`{kernel}`,&nbsp;{precision}", *cells])
    table = _table(["kernel", "tile", "warps", "stages", "registers", "ms"], lines)
    unfit = sum("fault" in row for row in rows)
    return (
        f"{table}\n\nThe {BEST} fastest of each, of {len(rows)} launches that were "
        f"tried; {unfit} of them did not fit this device. A tile is channels x states, "
        "or states of all channels. The time is that of the whole scan: forward, and "
        "for `backward` forward and backward."
    )


def _launch_table(launches: list[dict]) -> str:
    """Warps and stages down, precisions across, the fastest of each in bold."""
    precisions = list(dict.fromkeys(row["precision"] for row in launches))
    times = {
        (row["warps"], row["stages"], row["precision"]): row["forward_ms"]["median"]
        for row in launches
    }
    best = {p: min(t for key, t in times.items() if key[2] == p) for p in precisions}
    rows = []
    for warps, stages in dict.fromkeys(key[:2] for key in times):
        cells = [f"{warps} warps, {stages} {'stage' if stages == 1 else 'stages'}"]
        for p in precisions:
            time = times[warps, stages, p]
            mark = "**" if time == best[p] else ""
            cells.append(f"{mark}{_short(time)}{mark}")
        rows.append(cells)
    return _table(["launch", *(f"{p}, ms" for p in precisions)], rows)


def _short(number: float) -> str:
    """A positive number to three digits that count."""
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: names at the left, numbers right-aligned."""
    rule = ["---", *["--:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, rule, *rows])


# ---------------------------------------------------------------- several GPUs


def scaling_markdown(report: dict, name: str) -> str:
    """A file of `mamba3lite.scaling` as Markdown: what was run, and what was not."""
    device, plan = report["device"], report["plan"]
    blocks = [
        _origin(report, name, f"{device['gpus']} x {device['name']}"),
        f"`{plan['config']}`, {plan['rows']} rows a GPU and step; medians of the steps "
        f"{plan['warm_up'] + 1} to {plan['steps']}, in small type the 10th and the "
        "90th percentile.",
        _speed_table(report["rows"]),
    ]
    if report["exchanges"]:
        blocks += ["**An all-reduce alone**", _exchange_table(report["exchanges"])]
    if report["checkpoints"]:
        blocks += ["**Checkpoints**", _checkpoint_table(report["checkpoints"])]
    if compared := _compared_rows(report):
        heads = ["against one GPU", "steps", "largest difference", "at step", "limit"]
        blocks += ["**The same losses**", _table(heads, compared)]
    if dead := report["dead_rank"]:
        blocks += ["**A rank is killed in a step**", _dead_rank(dead)]
    if report["not_run"]:
        missing = [f"- {row['part']}: {row['reason']}" for row in report["not_run"]]
        blocks += ["**Not run**", "\n".join(missing)]
    return "\n\n".join([*blocks, *_communication(report)])


def _speed_table(rows: list[dict]) -> str:
    heads = ["GPUs", "tokens/s", "efficiency", "ms a step", "MFU", "peak, GB"]
    heads.append("collectives, ms")
    lines = []
    for row in rows:
        spread = f"{_short(row['step_ms_low'])} to {_short(row['step_ms_high'])}"
        lines.append(
            [
                f"{row['gpus']},&nbsp;`{row['parallel']}`",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['efficiency']:.1%}" if "efficiency" in row else "-",
                _two_lines(_short(row["step_ms"]), spread),
                "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
                f"{row['peak_gb']:.1f}",
                _collectives(row["collectives"]),
            ]
        )
    return _table(heads, lines)


def _collectives(seen: dict | None) -> str:
    if seen is None:
        return "-"
    exposed = f"{seen['exposed_ms']:.1f} exposed"
    return _two_lines(f"{seen['collective_ms']:.1f}", exposed)


def _exchange_table(rows: list[dict]) -> str:
    heads = ["GPUs", "2<sup>20</sup> bytes", "ms", "bus bandwidth, GB/s"]
    keys = ("gpus", "mb", "ms", "bus_gb_s")
    lines = [[f"{row[k]:.4g}" for k in keys] for row in rows]
    return _table(heads, lines)


def _checkpoint_table(rows: list[dict]) -> str:
    heads = ["GPUs", "GB", "save, s", "find and verify, s", "load, s"]
    lines = [
        [f"{row['gpus']},&nbsp;`{row['parallel']}`"]
        + [f"{row['checkpoint_bytes'] / 1e9:.2f}"]
        + [f"{row[key]:.1f}" for key in ("save_s", "find_s", "load_s")]
        for row in rows
    ]
    return _table(heads, lines)


def _compared_rows(report: dict) -> list[list[str]]:
    """Losses of several GPUs, and of the run that changed their number."""
    rows = [(f"{r['gpus']} GPUs", r) for r in report["same_loss"]]
    if resumed := report["resumed"]:
        names = " to ".join(str(n) for n in resumed["gpus"])
        rows.append((f"resumed: {names} GPUs", resumed))
    return [
        [
            f"{name}, `{row['parallel']}`, {row['precision']}, `{row['config']}`",
            f"{row['steps']}",
            f"{row['largest']:.1e}",
            f"{row['at_step']}",
            f"{row['limit']:.0e}",
        ]
        for name, row in rows
    ]


def _dead_rank(found: dict) -> str:
    faults = "; ".join(found["faults"]) or "no faults"
    return (
        f"Of {found['gpus']} ranks, number {found['killed_rank']} was killed with "
        f"SIGKILL, at `training.dist_timeout_s={found['dist_timeout_s']}`. The others "
        f"were gone after {found['others_gone_s']:.1f} s, torchrun ended with exit "
        f"code {found['torchrun_exit_code']}, and `verify` found "
        f"{found['sound_checkpoints']} sound checkpoints and {faults}. What they "
        f"said:\n\n{_fence(str(found['said']), ' { .text .message }')}"
    )


def _communication(report: dict) -> list[str]:
    """The table of what was not run, derived from the step of one GPU."""
    from mamba3lite.communication import table_of

    heads = ["GPUs, slowest link", "GB sent", "exchange, ms", "of the step"]
    heads += ["efficiency one by one", "overlapped"]
    lines = [
        [
            _two_lines(f"{row.gpus},&nbsp;`{row.parallel}`", row.link),
            f"{row.sent_gb:.2f}",
            f"{row.exchange_ms:.1f}",
            *(f"{n:.1%}" for n in (row.ratio, row.one_by_one, row.overlapped)),
        ]
        for row in table_of(report)
    ]
    if not lines:
        return []
    title = "**Communication against compute on more GPUs** (*derived*, not run)"
    return [title, _table(heads, lines)]


# ---------------------------------------------------------------- settings

SETTINGS = re.compile(r"^<!-- settings (\w+) -->$", re.MULTILINE)
WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
KINDS = {bool: "true or false", int: "integer", float: "number", str: "text"}


class Setting(NamedTuple):
    """One key of a configuration: its default as YAML, and what it may be."""

    default: str
    allowed: str


def with_settings(markdown: str, root: Path) -> str:
    """A page with the table of a section in the place of each of its markers.

    Raises:
        PluginError: a setting without a meaning in tools/settings.yaml, or the reverse.
    """
    if not SETTINGS.search(markdown):
        return markdown
    text = (root / "tools/settings.yaml").read_text(encoding="utf-8")
    sections, meanings = settings(), yaml.safe_load(text)
    return SETTINGS.sub(
        lambda match: settings_table(
            match[1], sections[match[1]], meanings.get(match[1], {})
        ),
        markdown,
    )


def settings() -> dict[str, dict[str, Setting]]:
    """Every setting of every section, read from the schema of the package itself."""
    from mamba3lite.training import config  # imports torch, which few builds need

    pages = {"training": config.TrainingConfig, "data": config.DataConfig}
    found = {
        name: {key: _setting(field) for key, field in page.model_fields.items()}
        for name, page in pages.items()
    }
    model = config.ModelConfig
    found["model"] = {
        field.name: Setting(_yaml(field.default), _allowed_in_model(field, config))
        for field in dataclasses.fields(model)
    }
    return found


def _setting(field: FieldInfo) -> Setting:
    """The row of a pydantic field: `int | None = Field(None, ge=1)`."""
    kinds = get_args(field.annotation) or (field.annotation,)
    if get_origin(field.annotation) is Literal:
        return Setting(_yaml(field.default), ", ".join(f"`{kind}`" for kind in kinds))
    bounds = [
        f"{word} {_power(getattr(bound, name))}"
        for bound in field.metadata
        for name, word in WORDS.items()
        if hasattr(bound, name)
    ]
    named = "not empty" if any(hasattr(m, "min_length") for m in field.metadata) else ""
    return Setting(_yaml(field.default), _joined(KINDS[kinds[0]], named, *bounds))


def _allowed_in_model(field: dataclasses.Field, config: ModuleType) -> str:
    """ModelConfig is a plain dataclass, which checks by the type of the default."""
    model, kind = config.ModelConfig, type(field.default)
    if field.name in model._CHOICES:
        return ", ".join(f"`{choice}`" for choice in model._CHOICES[field.name])
    if kind is bool:
        values = [v for v in (True, False) if _accepted(model, {field.name: v})]
        return " or ".join(_yaml(value) for value in values)
    most = config.MOST_BY_SETTING.get(field.name)
    bounds = [f"at most {_power(most)}"] if most else []
    return _joined(KINDS[kind], "at least 1" if kind is int else "above 0", *bounds)


def _accepted(model: type, fields: dict[str, object]) -> bool:
    try:
        model(**fields)
    except ValueError:
        return False
    return True


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _yaml(value: object) -> str:
    """A default as one writes it in a file; `none` for a setting that is left out."""
    if value is None:
        return "none"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"e-0(\d)", r"e-\1", text)


def _power(value: float) -> str:
    """Large powers of two as such."""
    exponent = round(math.log2(value)) if value > 2**16 else 0
    power = exponent and value == 2**exponent
    return f"2<sup>{exponent}</sup>" if power else f"{value}"


def settings_table(
    section: str, found: dict[str, Setting], meanings: dict[str, str]
) -> str:
    """The settings of a section, each with an anchor `#section-key`.

    Raises:
        PluginError: the keys of the two are not the same.
    """
    if missing := [key for key in found if key not in meanings]:
        raise PluginError(f"tools/settings.yaml: {section}.{missing[0]} has no meaning")
    if invented := [key for key in meanings if key not in found]:
        raise PluginError(
            f"tools/settings.yaml: {section}.{invented[0]} is not a setting"
        )
    rows = [
        f"| `{key}`{{ #{section}-{key} }} | {row.allowed} | {_code(row.default)} | "
        f"{' '.join(str(meanings[key]).split())} |"
        for key, row in found.items()
    ]
    heads = "| key | allowed | default | meaning |\n|---|---|---|---|"
    return "\n".join([heads, *rows])


def _code(default: str) -> str:
    return default if default == "none" else f"`{default}`"


# ---------------------------------------------------------------- MkDocs events


def notebooks(root: Path) -> list[Path]:
    """The numbered notebooks in reading order."""
    return sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Register the Markdown extension and list the notebooks in the navigation."""
    root = _root(config)
    config.markdown_extensions.append(SiteMarkdown(root))
    section = next(item["Notebooks"] for item in config.nav if "Notebooks" in item)
    section += [f"notebooks/{path.stem}.md" for path in notebooks(root)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each notebook's page, figures and download to the files of the site."""
    for file in _notebook_files(config):
        files.append(file)
    return files


def _notebook_files(config: MkDocsConfig) -> Iterator[File]:
    for path in notebooks(_root(config)):
        page, figures = notebook_page(path)
        yield File.generated(config, f"notebooks/{path.stem}.md", content=page)
        yield File.generated(
            config, f"notebooks/{path.name}", abs_src_path=str(path.resolve())
        )
        for name, content in figures.items():
            uri = f"notebooks/{path.stem}_files/{name}"
            yield File.generated(config, uri, content=content)


def on_page_markdown(markdown: str, page, config: MkDocsConfig, **_: object) -> str:
    """Put the tables of measurements and settings in the place of their markers."""
    folder = Path(config.docs_dir, page.file.src_uri).parent

    def tables(match: re.Match[str]) -> str:
        path = folder / match[1]
        if not path.is_file():
            raise PluginError(f"{page.file.src_uri}: there is no {match[1]} beside it")
        report = json.loads(path.read_text(encoding="utf-8"))
        return benchmark_markdown(report, match[1])

    # What a report holds is not looked through for markers again.
    return BENCHMARK.sub(tables, with_settings(markdown, _root(config)))


def on_page_content(html: str, page, **_: object) -> str:
    """Warn, which fails a strict build, where a dollar sign was left undrawn."""
    text = re.sub(r"<(pre|code|math|svg|script)\b.*?</\1>", "", html, flags=re.DOTALL)
    if left := re.search(r".{0,40}\$.{0,40}", re.sub(r"<[^>]+>", "", text)):
        log.warning(f"{page.file.src_uri}: a formula was not drawn: {left[0]!r}")
    return html
