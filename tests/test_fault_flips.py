"""Random bit flips over every file of a run folder and of a data folder.

What a flip may cost: a checkpoint gives way to the next older, a side file is set
aside, data are refused. It never changes a weight or a token, and never ends in
anything but an exit code and a line. The places are random, and the same each time.
"""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_cases import copy_of, on_cpu
from matplotlib.figure import Figure
from trainer_cases import StopsAfter, new_run, prepare_corpus, run_config, write_config

from mamba3lite.training.checkpoint import checkpoints_of, step_of
from mamba3lite.training.pretrain import Pretrainer, run_training
from mamba3lite.verify import verify_folder

pytestmark = [on_cpu, pytest.mark.slow]

OFTEN = {"eval_interval": 2, "sample_interval": 2}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """Data, and runs on them: one stopped after step 5, one taken to its end."""
    base = tmp_path_factory.mktemp("honest")
    prepare_corpus(base)
    for name, kind in (("stopped", StopsAfter), ("finished", Pretrainer)):
        new_run(run_config(base / "tokens", base / name, **OFTEN), kind).run()
    return base


@pytest.fixture
def stub_pictures(monkeypatch):
    """Curves are read and laid out, and not drawn: 0.3 s a run."""

    def savefig(figure, file, **options):
        (Path(file).write_bytes if isinstance(file, str | Path) else file.write)(b"PNG")

    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.setattr(Pretrainer, "sample_tokens", 5)
    monkeypatch.setattr(Pretrainer, "final_sample_tokens", 5)


def flips(folder: Path, each: int) -> Iterator[tuple[Path, int, int]]:
    """File, relative to the folder, byte and bit: some of every file."""
    draw = random.Random(0)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        for _ in range(each):
            place = draw.randrange(path.stat().st_size or 1)
            yield path.relative_to(folder), place, draw.randrange(8)


def flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[place] ^= 1 << bit
    path.write_bytes(data)


def trained(run_dir: Path) -> tuple[int, str]:
    """Step, weights and moments of the newest checkpoint."""
    newest = checkpoints_of(run_dir)[-1]
    digest = hashlib.sha256()
    for name in ("model.safetensors", "optimizer.safetensors"):
        digest.update((newest / name).read_bytes())
    return step_of(newest), digest.hexdigest()


@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_a_flip_in_a_run_folder_changes_no_weight_and_stops_no_run(
    honest, tmp_path, capsys, stub_pictures, state
):
    names = set()
    for number, (file, place, bit) in enumerate(flips(honest / state, each=2)):
        run_dir = copy_of(honest / state, tmp_path / str(number))
        flip(run_dir / file, place, bit)
        config = tmp_path / "config.yaml"
        write_config(config, honest / "tokens", run_dir, **OFTEN)
        code = run_training(str(config))
        captured = capsys.readouterr()
        case = file, place, bit, captured
        assert code == 0 and captured.err == "", case
        assert trained(run_dir) == trained(honest / "finished"), case
        faults = verify_folder(run_dir, lambda line: None)
        assert all(str(run_dir / file.parent) in fault for fault in faults), case
        names.add(file.name)
    expected = {"metrics.jsonl", "samples.txt", "curves.png", "config.yaml", "run.lock"}
    assert names > expected | {"model.safetensors", "state.json", "manifest.json"}


def test_a_flip_in_a_data_folder_is_named_or_changes_no_weight(
    honest, tmp_path, capsys, stub_pictures
):
    refused = 0
    for number, (file, place, bit) in enumerate(flips(honest / "tokens", each=6)):
        folder = copy_of(honest / "tokens", tmp_path / f"tokens{number}")
        run_dir = copy_of(honest / "stopped", tmp_path / f"run{number}")
        flip(folder / file, place, bit)
        config = tmp_path / "config.yaml"
        write_config(config, folder, run_dir, **OFTEN)
        code = run_training(str(config))
        captured = capsys.readouterr()
        faults = verify_folder(folder, lambda line: None)
        case = file, place, bit, captured, faults
        assert code == (2 if faults else 0), case
        if faults:
            refused += 1
            assert len(faults) == 1 and str(folder / file) in faults[0], case
            assert captured.err.count("\n") == 1, case
            assert str(folder / file) in captured.err, case
        else:
            assert trained(run_dir) == trained(honest / "finished"), case
    assert refused > number // 2
