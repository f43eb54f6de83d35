"""The tables of the configuration reference say what the schema really does.

Each row is read as a reader of the page does, and the statement in it is put to
`check_config`: the bounds are accepted and what lies beyond is not, the choices are
all there are, and a default is what a run gets that leaves the setting out.
"""

import copy
import html
import importlib.util
import math
import re
from functools import cache
from pathlib import Path

import pytest
from mkdocs.exceptions import PluginError

from mamba3lite.training.config import (
    SECTIONS,
    ConfigError,
    RunConfig,
    check_config,
    parse_yaml,
)

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("site_hook", ROOT / "tools/site_hook.py")
site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site)

PAGE = ROOT / "docs/references/config-reference.md"


def rows_of(page: str) -> dict[str, tuple[str, str]]:
    """`section.key` -> (allowed, default) as the rendered page states them."""
    found, section = {}, ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif row := re.match(
            r"\| `(\w+)`\{ #(\S+) \} \| (.*?) \| (.*?) \| .+ \|$", line
        ):
            key, anchor, allowed, default = row.groups()
            assert anchor == f"{section}-{key}"
            found[f"{section}.{key}"] = (html.unescape(allowed), default.strip("`"))
    return found


@cache
def rows() -> dict[str, tuple[str, str]]:
    """The rows of the page as the site shows it."""
    return rows_of(site.with_settings(PAGE.read_text(), ROOT))


KEYS = [f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys]

# A run in which each setting can be changed alone.
BASE = {
    "model": {"state_dim": 2, "head_dim": 2, "n_layers": 2, "d_model": 8},
    "training": {"total_steps": 10, "save_interval": 1, "micro_batch_size": 1},
    "data": {},
}
NEEDS = {
    "training.total_tokens": {"training.total_steps": None},
    "training.memory_snapshot": {"training.profile_start": 1},
}


def checked(changes: dict[str, object]) -> RunConfig:
    """The base with some settings changed; None leaves a setting out.

    Raises: ConfigError.
    """
    raw = copy.deepcopy(BASE)
    for path, value in changes.items():
        section, _, key = path.partition(".")
        raw[section][key] = value
    kept = {s: {k: v for k, v in raw[s].items() if v is not None} for s in raw}
    return check_config(kept, "test")


def accepts(path: str, value: object) -> bool:
    try:
        checked(NEEDS.get(path, {}) | {path: value})
    except ConfigError as error:
        assert path in str(error) or "model: " in str(error), error
        return False
    return True


def number(text: str) -> float:
    power = re.fullmatch(r"2<sup>(\d+)</sup>", text)
    return 2 ** int(power[1]) if power else float(text)


def test_every_setting_has_its_row_and_every_row_its_setting():
    assert sorted(rows()) == sorted(KEYS)


@pytest.mark.parametrize("path", KEYS)
def test_what_is_allowed_is_accepted_and_nothing_else(path):
    allowed, _ = rows()[path]
    kind, *bounds = allowed.split(", ")
    if allowed in ("true or false", "false"):
        inside, outside = [False], [0, "no", *([True] if allowed == "false" else [])]
        inside += [True] if allowed == "true or false" else []
    elif allowed.startswith("`"):
        inside = [choice.strip("`") for choice in allowed.split(", ")]
        outside = ["other", "", 1, True]
    elif kind == "text":
        assert bounds == ["not empty"]
        inside, outside = ["a"], ["", 1]
    else:
        inside, outside = around(kind, bounds)
        outside += ["1", True, *([1.5, 2.0] if kind == "integer" else [])]
        if path == "model.state_dim":  # the row says even as well
            inside, outside = [value + 1 for value in inside], [*outside, 3]
    assert [value for value in inside if not accepts(path, value)] == []
    assert [value for value in outside if accepts(path, value)] == []


def around(kind: str, bounds: list[str]) -> tuple[list, list]:
    """Values at the bounds and just inside them, and values just outside."""
    assert kind in ("integer", "number") and bounds
    step = 1 if kind == "integer" else 1e-9
    inside, outside = [], []
    for bound in bounds:
        word, _, text = bound.rpartition(" ")
        value = number(text)
        value = int(value) if kind == "integer" else value
        up = step if word in ("at least", "above") else -step
        is_open = word in ("above", "below")
        inside.append(value + up if is_open else value)
        outside.append(value if is_open else value - up)
    return inside, outside


@pytest.mark.parametrize("path", KEYS)
def test_a_default_is_what_a_run_gets_that_leaves_the_setting_out(path):
    _, default = rows()[path]
    section, _, key = path.partition(".")
    changes = {path: None}
    if path == "training.total_steps":  # a budget there must be
        changes["training.total_tokens"] = 4096
    got = getattr(getattr(checked(changes), section), key)
    stated = None if default == "none" else parse_yaml(default)
    assert stated == got and isinstance(stated, bool) == isinstance(got, bool)
    assert not isinstance(stated, float) or math.isfinite(stated)


def test_a_setting_without_a_meaning_or_the_reverse_stops_the_build():
    found = {"lr": site.Setting("1.0", "number"), "seed": site.Setting("0", "integer")}
    table = site.settings_table("training", found, {"lr": "the rate", "seed": "a\n b"})
    assert table.splitlines()[-1].endswith("| integer | `0` | a b |")
    with pytest.raises(PluginError, match=r"training\.seed has no meaning"):
        site.settings_table("training", found, {"lr": "the rate"})
    with pytest.raises(PluginError, match=r"training\.lrr is not a setting"):
        site.settings_table("training", found, {"lr": "", "seed": "", "lrr": ""})
