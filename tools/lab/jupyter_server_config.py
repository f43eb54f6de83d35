"""What `make lab` starts: JupyterLab on the notebooks, which leaves the checkout clean.

A save writes each file of a pair in its normal form (tools/pairs.py), and keeps the
stored outputs of the cells whose source did not change: git shows what was edited and
nothing else. `make notebooks` is what executes and stores.
"""

import json
import sys
import warnings
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NOTEBOOKS = ROOT / "notebooks"
sys.path.insert(0, str(ROOT / "tools"))

from pairs import PERCENT, as_saved, jupytext_config, keep_outputs  # noqa: E402

from mamba3lite.threads import spin_briefly  # noqa: E402

spin_briefly()  # kernels inherit it


def write_normal_form(model: dict, path: str, **_) -> None:
    """Before a save: bring the .ipynb or the .py of a notebook into its normal form."""
    place = NOTEBOOKS / path
    if not all(place.with_suffix(kind).exists() for kind in (".py", ".ipynb")):
        return
    if model["type"] == "notebook":
        saved = nbformat.reads(json.dumps(model["content"]), as_version=4)
        model["content"] = keep_outputs(saved, place.with_suffix(".py"), ROOT)
    elif place.suffix == ".py":
        config = jupytext_config(ROOT)
        notebook = jupytext.reads(model["content"], fmt=PERCENT, config=config)
        model["content"] = as_saved(notebook, ROOT)


c = get_config()
c.ServerApp.root_dir = str(NOTEBOOKS)
c.ServerApp.allow_root = True  # in a container there may be nobody else
# Jupyter applies a configuration twice and then warns about itself.
warnings.filterwarnings("ignore", "Overriding existing pre_save_hook")
c.FileContentsManager.pre_save_hook = write_normal_form
c.LabApp.default_url = f"/lab/tree/{min(NOTEBOOKS.glob('[0-9]*.ipynb')).name}"
# With page_config.json: no news, newer version, build or language server is looked for.
c.LabApp.app_settings_dir = str(HERE)
c.LanguageServerManager.autodetect = False
