"""Faults 6 to 10: damaged checkpoints, full disks, folders that cannot be used."""

import json
import os
import re
import resource
import shutil

import pytest
from fault_cases import (
    command,
    contents,
    copy_of,
    finished,
    in_child,
    losses,
    on_cpu,
    one_line,
    results,
    saved_bytes,
    saved_steps,
)
from trainer_cases import (
    StopsAfter,
    assert_same_bits,
    new_run,
    prepare_corpus,
    run_config,
    write_config,
)

from mamba3lite.training.checkpoint import FILES, MANIFEST, list_checkpoints
from mamba3lite.training.pretrain import run_training

pytestmark = [on_cpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def uninterrupted(prepared, tmp_path_factory):
    return finished(prepared, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def stopped(prepared, tmp_path_factory):
    """A run folder with checkpoints of steps 3 and 5."""
    folder = tmp_path_factory.mktemp("stopped")
    part = new_run(run_config(prepared, folder), StopsAfter)
    assert part.run() is False
    return folder


def assert_the_older_one_is_used(prepared, folder, whole, capsys) -> str:
    """The run goes on from step 3 and ends with the same bits; returns what it said."""
    run = new_run(run_config(prepared, folder))
    assert run.run() is True
    out = capsys.readouterr().out
    assert f"Continuing from {folder / 'checkpoints' / 'step_00000003'}\n" in out
    assert losses(folder) == losses(whole.run_dir)
    assert_same_bits(results(run), results(whole))
    aside = folder / "checkpoints" / "aside_step_00000005"
    assert aside.is_dir(), "what is damaged is put away, not deleted"
    return out


# --------------------------------------------------------------------------------------
# 6: one flipped bit


@pytest.mark.parametrize("place", [0, 0.5, -1])
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_fault_06_one_flipped_bit(
    stopped, prepared, tmp_path, uninterrupted, capsys, name, place
):
    folder = copy_of(stopped, tmp_path / "run")
    newest = folder / "checkpoints" / "step_00000005"
    data = bytearray((newest / name).read_bytes())
    data[int(len(data) * place) if place > 0 else place] ^= 1
    (newest / name).write_bytes(data)
    out = assert_the_older_one_is_used(prepared, folder, uninterrupted, capsys)
    (warning,) = [line for line in out.splitlines() if line.startswith("[warn] bad")]
    assert str(newest) in warning


# --------------------------------------------------------------------------------------
# 7: files that are not what they were


def future(path) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format": 99}))


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}
CASES = [(name, damage) for name in (*FILES, MANIFEST) for damage in DAMAGE]


@pytest.mark.parametrize(("name", "damage"), [*CASES, (MANIFEST, "future")])
def test_fault_07_files_that_are_not_what_they_were(
    stopped, prepared, tmp_path, uninterrupted, capsys, name, damage
):
    folder = copy_of(stopped, tmp_path / "run")
    newest = folder / "checkpoints" / "step_00000005"
    (DAMAGE | {"future": future})[damage](newest / name)
    out = assert_the_older_one_is_used(prepared, folder, uninterrupted, capsys)
    (warning,) = [line for line in out.splitlines() if line.startswith("[warn] bad")]
    assert str(newest) in warning and name in warning
    if damage == "future":
        assert "has format 99, this version reads 1" in warning


def test_fault_07_none_intact_is_an_error_and_never_a_restart(
    stopped, prepared, tmp_path, capsys
):
    folder = copy_of(stopped, tmp_path / "run")
    for path in list_checkpoints(folder / "checkpoints"):
        (path / "state.json").unlink()
    config = write_config(tmp_path / "a.yaml", prepared, folder)
    before = contents(folder)
    assert run_training(str(config)) == 2
    assert capsys.readouterr().err == (
        f"mamba3lite train: {folder / 'checkpoints'}: none of its 2 checkpoints can "
        "be used, for the reasons above; a run that starts anew wants another folder\n"
    )
    assert contents(folder) == before


def test_fault_07_a_checkpoint_under_another_name(
    stopped, prepared, tmp_path, uninterrupted, capsys
):
    """One that is named after a later step would stand in the way of that step."""
    folder = copy_of(stopped, tmp_path / "run")
    checkpoints = folder / "checkpoints"
    (checkpoints / "step_00000005").rename(checkpoints / "step_00000007")
    run = new_run(run_config(prepared, folder))
    assert run.run() is True
    out = capsys.readouterr().out
    assert "step_00000007: renamed, it holds step 5; its name was step_00000005" in out
    assert f"Continuing from {checkpoints / 'step_00000003'}\n" in out
    assert_same_bits(results(run), results(uninterrupted))


# --------------------------------------------------------------------------------------
# 8: disk full during a save


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_fault_08_a_full_disk_costs_the_steps_since_the_last_save(
    stopped, prepared, tmp_path, uninterrupted, name
):
    folder = copy_of(stopped, tmp_path / "run")
    size = (folder / "checkpoints" / "step_00000005" / name).stat().st_size
    config = write_config(tmp_path / "a.yaml", prepared, folder)
    before = saved_bytes(folder)

    def starved() -> int:
        # No file may grow beyond this; the kernel refuses like a disk that is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, size - 1000))
        return command(config)()

    ended = in_child(starved)
    assert one_line(ended, 1) == (
        f"step 6 was not saved: {folder / 'checkpoints'}: File too large; the older "
        "checkpoints are as they were, and the same command continues from them"
    )
    assert saved_bytes(folder) == before
    assert not list((folder / "checkpoints").glob(".tmp-*"))
    ended = in_child(command(config))
    assert ended.code == 0, ended
    assert losses(folder) == losses(uninterrupted.run_dir)
    newest = "checkpoints/step_00000008"
    for file in ("model.safetensors", "optimizer.safetensors"):
        whole = (uninterrupted.run_dir / newest / file).read_bytes()
        assert (folder / newest / file).read_bytes() == whole


def test_fault_08_a_disk_full_at_the_start_says_so_before_training(prepared, tmp_path):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")

    def starved() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        return command(config)()

    line = one_line(in_child(starved), 1)
    assert line.startswith("step 0 was not saved: ") and "File too large" in line
    assert saved_steps(tmp_path / "run") == []


# --------------------------------------------------------------------------------------
# 9: too little free space at the start


def test_fault_09_too_little_space_for_what_a_run_will_keep(prepared, tmp_path):
    lengths = {"total_steps": 10**9, "save_interval": 1, "keep_last": 10**9}
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **lengths)
    free = shutil.disk_usage(tmp_path).free
    ended = in_child(command(config))
    line = one_line(ended, 2)
    told = re.fullmatch(
        re.escape(f"{tmp_path / 'run' / 'checkpoints'}: ")
        + r"([0-9.]+) GB free, the checkpoints of this run need ([0-9.]+) GB; lower "
        r"training\.keep_last or choose another training\.save_dir",
        line,
    )
    assert float(told[1]) == pytest.approx(free / 1e9, abs=2)
    assert float(told[2]) > float(told[1])
    assert "loss" not in ended.out, "nothing was trained"
    assert saved_steps(tmp_path / "run") == []


# --------------------------------------------------------------------------------------
# 10: an output path that cannot be used


def as_nobody(action):
    """The action without the rights of root, to whom no folder is read-only."""

    def unprivileged() -> int:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        return action()

    return unprivileged


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("fault", ["read-only", "below a read-only", "file", "under"])
def test_fault_10_output_paths_that_cannot_be_used(prepared, tmp_path, fault, dry):
    place = tmp_path / "place"
    run, reason = {
        "read-only": (place, f"{place} cannot be written"),
        "below a read-only": (place / "a" / "run", f"{place} cannot be written"),
        "file": (place, f"{place} is not a folder"),
        "under": (place / "run", f"{place} is not a folder"),
    }[fault]
    if "read-only" in fault:
        place.mkdir(mode=0o555)
    else:
        place.write_text("in the way")
    config = write_config(tmp_path / "a.yaml", prepared, run)
    for folder in (tmp_path, *tmp_path.parents, prepared.parent):
        if folder.stat().st_mode & 0o5 != 0o5:
            folder.chmod(0o755)  # so that nobody may look inside
    before = contents(tmp_path)
    ended = in_child(as_nobody(command(config, dry_run=dry)))
    assert one_line(ended, 2) == (
        f"training.save_dir: {run}: {reason}; wanted a folder that can be made and "
        "written"
    )
    assert contents(tmp_path) == before


def test_fault_10_a_missing_folder_is_made_with_its_parents(prepared, tmp_path):
    run = tmp_path / "not" / "yet" / "there"
    config = write_config(tmp_path / "a.yaml", prepared, run, total_steps=2)
    assert in_child(command(config)).code == 0
    assert saved_steps(run) == [0, 2]
