"""Before the first step: where data and run lie, and what is refused in time."""

import os
import shutil
import subprocess
import sys
import types

import pytest
import torch
from trainer_cases import (
    new_run,
    prepare_corpus,
    run_config,
    write_config,
    write_corpus,
)
from typer.testing import CliRunner

import mamba3lite.training.pretrain as pretrain
import mamba3lite.training.run as run
from mamba3lite.cli import app
from mamba3lite.data.prepare import prepare
from mamba3lite.training import profiling
from mamba3lite.training.checkpoint import (
    list_checkpoints,
    read_run_state,
    read_state,
)
from mamba3lite.training.config import DataConfig
from mamba3lite.training.estimate import memory_of_step, setting_of
from mamba3lite.training.metrics import read_metrics
from mamba3lite.training.pretrain import Pretrainer, data_folder
from mamba3lite.training.recovery import RunError, require_run_folder, run_lock


def train(*arguments):
    return CliRunner().invoke(app, ["train", *(str(a) for a in arguments)])


def contents(folder) -> dict:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def by_source(tmp_path, monkeypatch):
    """A configuration without data, and two different files called text.txt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pretrainer, "final_sample_tokens", 4)
    for name in "ab":
        (tmp_path / name).mkdir()
        lines = [f"{name} line {number}\n" for number in range(20_000)]
        (tmp_path / name / "text.txt").write_text("".join(lines))
    path = write_config(tmp_path / "c.yaml", "unused", "run", total_steps=2)
    common = ["--config", path, "--set", "data.val_fraction=0.3"]
    return lambda source: [*common, "--set", f"data.source={source}"]


# --------------------------------------------------------------------------------------
# Prepared data


def test_a_path_decides_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def name(source, **more):
        return data_folder(DataConfig(source=source, **more)).name

    assert name(None) == name("stdlib") == "stdlib-byte"
    assert name("a/text.txt") != name("b/text.txt")
    assert name("a/text.txt") == name("b/../a/text.txt")
    assert name("a/text.txt") == name(str(tmp_path / "a" / "text.txt"))
    assert name("./stdlib") != "stdlib-byte"
    close = [name("a", val_fraction=f) for f in (0.2, 0.2000000001)]
    assert close[0] != close[1]


def test_a_dry_run_leaves_prepared_data_alone(tmp_path, by_source):
    assert train(*by_source("a/text.txt")).exit_code == 0
    before = contents(tmp_path)
    other_run = ["--set", "training.save_dir=other", "--dry-run"]
    assert train(*by_source("b/text.txt"), *other_run).exit_code == 0
    assert train(*by_source("a/text.txt"), *other_run).exit_code == 0
    assert contents(tmp_path) == before
    source = tmp_path / "a" / "text.txt"
    source.write_text(source.read_text() + "edited\n")
    before = contents(tmp_path)
    dry = train(*by_source("a/text.txt"), *other_run)
    assert dry.exit_code == 0, dry.output
    assert "Dry run: nothing was written" in dry.stdout
    assert contents(tmp_path) == before
    again = train(*by_source("a/text.txt"), "--dry-run")
    assert again.exit_code == 0, again.output
    assert "changed since it was prepared; continuing on" in again.stdout
    assert contents(tmp_path) == before


def test_an_edited_source_leaves_the_data_of_the_older_run(tmp_path, by_source):
    """A new run gets a folder beside it; both go on, each with its own tokens."""
    how, source = by_source("a/text.txt"), tmp_path / "a" / "text.txt"
    assert train(*how).exit_code == 0
    (older,) = (tmp_path / "data").iterdir()
    before = contents(older)
    source.write_text(source.read_text() + "edited\n")
    newer = ["--set", "training.save_dir=newer"]
    result = train(*how, *newer)
    assert result.exit_code == 0, result.output
    (beside,) = set((tmp_path / "data").iterdir()) - {older}
    assert beside.name.startswith(f"{older.name}-")
    told = f"data/{older.name} holds other data; this text goes to data/{beside.name}\n"
    assert told in result.stderr
    assert contents(older) == before
    stored = read_run_state(list_checkpoints(tmp_path / "newer" / "checkpoints")[-1])
    assert stored["data"]["folder"] == f"data/{beside.name}"
    longer = ["--set", "training.total_steps=3"]
    for where, note in (([], True), (newer, False)):
        again = train(*how, *where, *longer)
        assert again.exit_code == 0, again.output
        folder = beside if where else older
        assert f"Data: data/{folder.name}, as before" in again.stdout
        assert ("changed since it was prepared" in again.stdout) is note
    third = train(*how, "--set", "training.save_dir=third", "--dry-run")
    assert third.exit_code == 0 and "writing" not in third.stderr
    source.write_text(source.read_text() + "edited again\n")
    again = train(*how, *newer, "--set", "training.total_steps=4")
    assert again.exit_code == 0, again.output
    assert "changed since it was prepared; continuing on" in again.stdout
    assert len(list((tmp_path / "data").iterdir())) == 2
    assert contents(older) == before


def test_a_given_folder_is_never_exchanged_for_one_beside_it(tmp_path, prepared):
    """The newest checkpoint names the folder of its data, which lies beside it."""
    one, other = tmp_path / "tokens", tmp_path / "tokens-1234abcd"
    shutil.copytree(prepared, other)
    texts = write_corpus(tmp_path / "texts", documents=30)
    prepare(texts, "byte", one, val_fraction=0.2, progress=lambda *_: None)
    config = write_config(tmp_path / "a.yaml", other, tmp_path / "run", total_steps=2)
    assert train("--config", config).exit_code == 0
    longer = ["--set", "training.total_steps=3"]
    given = ["--set", f"data.train_data_path={one}"]
    result = train("--config", config, *longer, *given)
    assert result.exit_code == 2 and f"but {one} is " in result.stderr


def test_another_source_of_the_same_name_is_refused(tmp_path, by_source):
    assert train(*by_source("a/text.txt")).exit_code == 0
    for how in ([], ["--dry-run"]):
        other = train(*by_source("b/text.txt"), *how)
        assert other.exit_code == 2, other.output
        line = other.stderr.splitlines()[-1]
        assert line.startswith("mamba3lite train: run/checkpoints/step_00000002: ")
        assert "trained on data " in line
        assert "(data.source: a/text.txt -> b/text.txt)" in line
    back = train(*by_source("a/text.txt"), "--set", "training.total_steps=3")
    assert back.exit_code == 0, back.output


# --------------------------------------------------------------------------------------
# The run folder


def in_the_way(tmp_path):
    (tmp_path / "run").write_text("in the way")
    return tmp_path / "run", "run is not a folder"


def below_a_file(tmp_path):
    (tmp_path / "file").write_text("in the way")
    return tmp_path / "file" / "run", "file is not a folder"


def a_long_name(tmp_path):
    return tmp_path / ("x" * 300), "File name too long"


@pytest.mark.parametrize("fault", [in_the_way, below_a_file, a_long_name])
@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_a_run_folder_that_cannot_be_is_one_line(prepared, tmp_path, fault, how):
    run, reason = fault(tmp_path)
    config = write_config(tmp_path / "a.yaml", prepared, run)
    result = train("--config", config, *how)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"mamba3lite train: training.save_dir: {run}: ")
    assert result.stderr.endswith(
        f"{reason}; wanted a folder that can be made and written\n"
    )
    assert result.stderr.count("\n") == 1


def test_a_file_system_that_refuses_is_one_line(prepared):
    # The root user may write anywhere by the mode bits; /proc refuses all the same.
    run = new_run(run_config(prepared, "/proc/mamba3lite/run"))
    with pytest.raises(RunError, match=r"^training\.save_dir: /proc/mamba3lite/run: "):
        run.run()


def test_a_folder_without_write_permission_is_refused(tmp_path, monkeypatch):
    # For the root user every folder is writable, so the kernel's answer is replaced.
    require_run_folder(tmp_path / "run")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(RunError, match=f"run: {tmp_path} cannot be written; wanted"):
        require_run_folder(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_a_locked_run_folder_is_one_line(prepared, tmp_path, how):
    (tmp_path / "run").mkdir()
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    with run_lock(tmp_path / "run", print):
        result = train("--config", config, *how)
    assert result.exit_code == 2, result.output
    assert "another trainer is working in this folder" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_a_model_that_no_memory_holds_is_refused(prepared, tmp_path, monkeypatch, how):
    """Twice what is there is a slip of the keyboard; less may be worth a try."""
    config = run_config(prepared, tmp_path / "run")
    setting = setting_of(config, torch.cuda.is_available())
    peak = memory_of_step(config.model, setting).peak
    path = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    monkeypatch.setattr(run, "memory_of", lambda device: (peak - 1) // 2)
    result = train("--config", path, *how)
    assert result.exit_code == 2
    assert "a step needs" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(run, "memory_of", lambda device: (peak + 1) // 2)
    assert train("--config", path, "--dry-run").exit_code == 0


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_a_run_folder_inside_its_source_is_refused(by_source, tmp_path, how):
    """Its checkpoints would be text of the next run."""
    run = ["--set", "training.save_dir=a/run"]
    result = train(*by_source("a"), *run, *how)
    assert result.exit_code == 2
    assert "a/run: it lies inside the source a" in result.stderr
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["text.txt"]


def test_a_file_in_the_place_of_the_checkpoints_is_named(prepared, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("mine")
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    result = train("--config", config)
    assert result.exit_code == 2
    assert "run: checkpoints is not a folder" in result.stderr


def test_what_lies_in_the_place_of_the_lock_is_named(prepared, tmp_path):
    (tmp_path / "run" / "run.lock").mkdir(parents=True)
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    result = train("--config", config)
    assert result.exit_code == 2
    assert f"{tmp_path}/run: run.lock: Is a directory" in result.stderr


def test_a_dry_run_looks_at_the_space_too(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "checkpoint_bytes", lambda model: 10**18)
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    result = train("--config", config, "--dry-run")
    assert result.exit_code == 2
    assert "the checkpoints of this run need" in result.stderr
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------
# The budget, and the end


def test_a_shorter_budget_than_the_run_has_is_refused(prepared, tmp_path):
    run = new_run(run_config(prepared, tmp_path / "run"))
    run.run()
    before = contents(tmp_path)
    shorter = new_run(run_config(prepared, tmp_path / "run", total_steps=5))
    with pytest.raises(RunError, match=r"already at step 8, but the run asked for has"):
        shorter.run()
    assert contents(tmp_path) == before


def test_tokens_are_those_that_were_trained_on(prepared, tmp_path):
    new_run(run_config(prepared, tmp_path, total_steps=2)).run()
    changes = {"total_steps": 3, "gradient_accumulation_steps": 2}
    longer = new_run(run_config(prepared, tmp_path, **changes))
    longer.run()
    assert longer.tokens == (2 + 2) * 4 * 32
    rows = [row for row in read_metrics(longer.metrics.path) if "loss" in row]
    assert [row["tokens"] for row in rows] == [128, 256, 512]
    newest = read_state(list_checkpoints(tmp_path / "checkpoints")[-1])
    assert newest["tokens"] == 512


def test_the_final_evaluation_says_how_far_it_is(prepared, tmp_path, capsys):
    run = new_run(run_config(prepared, tmp_path, total_steps=2))
    run.seconds_between_lines = 0.0
    run.run()
    out = capsys.readouterr().out
    n = run.val_data.n_eval_windows
    assert n > 4
    assert f"evaluated 4 of {n} windows\n" in out
    assert f"evaluated {n} of {n} windows\n" in out


# --------------------------------------------------------------------------------------
# Messages


def test_the_command_for_a_missing_folder_works(tmp_path, monkeypatch):
    config = write_config(tmp_path / "a.yaml", tmp_path / "no data", tmp_path / "run")
    result = train("--config", config)
    assert result.exit_code == 2
    command = f"`mamba3lite prepare --source stdlib --out '{tmp_path}/no data'`"
    assert command in result.stderr


def test_the_script_explains_each_option(capsys):
    with pytest.raises(SystemExit):
        pretrain.main(["--help"])
    text = capsys.readouterr().out
    assert "Train a state-space language model" in text
    lines = text.split("options:\n")[1].splitlines()
    options = [n for n, line in enumerate(lines) if line.startswith("  -")]
    assert len(options) == 9
    for begin, end in zip(options, [*options[1:], len(lines)], strict=True):
        told = " ".join(lines[begin:end]).split("  ", 2)[-1].strip()
        assert "  " in " ".join(lines[begin:end]).strip() and len(told) > 10


# --------------------------------------------------------------------------------------
# Other systems

ELSEWHERE = """
import os, signal, sys
import psutil  # which has a part for each system, and here the one that wants resource
sys.modules["fcntl"] = sys.modules["resource"] = None
del signal.SIGHUP
import torch
from mamba3lite.training.pretrain import run_training
from mamba3lite.training.profiling import peak_memory
import mamba3lite.data.prepare, mamba3lite.generate
here = peak_memory(torch.device("cpu"))
assert 5e7 < here < 5e9, here
sys.exit(run_training(sys.argv[1]))
"""


def test_a_system_without_fcntl_resource_and_sighup(prepared, tmp_path):
    """As Windows is; what no other system can show is left out."""
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    quiet = "ignore:only soft file lock"  # Windows has one that it knows
    ended = subprocess.run(
        [sys.executable, "-W", quiet, "-c", ELSEWHERE, str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    assert ended.stdout.count("no locks on this file system") == 1
    assert "peak memory  0." in ended.stdout


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_bytes(monkeypatch, platform, unit):
    """getrusage counts kibibytes on Linux, bytes on macOS."""
    usage = types.SimpleNamespace(ru_maxrss=3 * 2**20)
    monkeypatch.setattr(profiling.resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(sys, "platform", platform)
    assert profiling.peak_memory(torch.device("cpu")) == 3 * 2**20 * unit
