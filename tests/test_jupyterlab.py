"""`make lab` in a real browser: a notebook is opened, run, saved, and git is clean."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed (apt-get)"),
]


class Lab:
    """The server of `make lab` on a committed copy of this repository."""

    def __init__(self, root: Path, home: Path) -> None:
        self.root, self.log = root, home / "log"
        self.notebooks = sorted((root / "notebooks").glob("*.ipynb"))
        # `make test` calls this, and a make inside another one talks of folders.
        alone = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        printed = subprocess.check_output(
            ["make", "-n", "lab"], cwd=root, text=True, env=alone
        )
        program, *arguments = shlex.split(printed.splitlines()[-1])
        token = secrets.token_hex()
        arguments += ["--no-browser", "--port=0", f"--IdentityProvider.token={token}"]
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [Path(sys.executable).parent / Path(program).name, *arguments],
                cwd=root,
                env={**os.environ, "HOME": str(home), "PYTHONPATH": str(root)},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self.url = self.wait_for(r"http://127\.0\.0\.1:\S+").replace("...", token)

    def wait_for(self, pattern: str, times: int = 1) -> str:
        """What the log says, once it says it that many times."""
        for _ in range(300):
            found = re.findall(pattern, self.log.read_text())
            if len(found) >= times:
                return found[-1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        pytest.fail(f"never said {pattern!r}:\n{self.log.read_text()}")

    def wait_for_save(self, notebook: Path) -> None:
        """Return after the next save of this pair has ended."""
        pattern = rf"Saving {notebook.stem}\.py in format"
        self.wait_for(pattern, len(re.findall(pattern, self.log.read_text())) + 1)
        time.sleep(0.2)

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        return done.stdout + done.stderr

    def check(self, task: str) -> str:
        names = [path.stem for path in self.notebooks[:2]]
        return self.ask(sys.executable, "tools/notebooks.py", task, *names)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    root, home = tmp_path / "repository", tmp_path / "home"
    leave_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".venv")
    for name in ("notebooks", "tools", "mamba3lite"):
        shutil.copytree(ROOT / name, root / name, ignore=leave_out)
    for name in ("Makefile", ".gitignore", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    for command in (
        "init -q",
        "add .",
        "-c user.name=a -c user.email=a@example.org commit -q -m all",
    ):
        subprocess.run(["git", *command.split()], cwd=root, check=True)
    settings = home / ".jupyter/lab/user-settings/@jupyterlab/docmanager-extension"
    settings.mkdir(parents=True)
    (settings / "plugin.jupyterlab-settings").write_text('{"autosaveInterval": 8}')
    server = Lab(root, home)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)


@pytest.fixture
def page() -> Iterator[Page]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", NO_NETWORK],
        )
        yield browser.new_page(viewport={"width": 1300, "height": 900})
        browser.close()


def wait_until_idle(page: Page) -> None:
    """Return when the kernel of the notebook in front has nothing to do."""
    page.locator(
        ".jp-NotebookPanel:not(.lm-mod-hidden) "
        '.jp-Notebook-ExecutionIndicator[data-status="idle"]'
    ).wait_for(timeout=60_000)


def test_only_an_edited_cell_changes_the_checkout(lab, page):
    first, second = lab.notebooks[:2]
    page.goto(lab.url)
    page.locator(".jp-Notebook .jp-Cell h1").first.wait_for()
    assert first.name in page.url
    lab.wait_for_save(first)  # by itself, untouched
    wait_until_idle(page)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.locator('.jp-Notebook-ExecutionIndicator[data-status="busy"]').wait_for()
    wait_until_idle(page)
    page.keyboard.press("Control+s")
    lab.wait_for_save(first)
    page.locator(".jp-DirListing-item", has_text=second.name).dblclick()
    lab.wait_for_save(second)
    assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0, "a pop-up"
    assert lab.ask("git", "status", "--porcelain") == ""
    assert lab.check("--check") == "2 notebooks agree with their sources\n"

    editor = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell").first
    editor.locator(".cm-content").click()
    page.keyboard.press("Control+End")
    page.keyboard.type("  # edited")
    page.keyboard.press("Control+s")
    lab.wait_for_save(second)
    pair = [f"notebooks/{second.stem}.{kind}" for kind in ("ipynb", "py")]
    changed = lab.ask("git", "status", "--porcelain").splitlines()
    assert changed == [f" M {name}" for name in pair]
    lines = lab.ask("git", "diff", "--numstat", pair[1]).split()
    assert lines[:2] == ["1", "1"]
    assert "  # edited\n" in lab.ask("git", "diff", pair[1])
    assert lab.check("--check") == "2 notebooks agree with their sources\n"
    assert "was not executed in order; run `make notebooks`" in (
        lab.check("--check-outputs")
    )
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+s")
    lab.wait_for_save(second)
    assert lab.ask("git", "status", "--porcelain") == ""
