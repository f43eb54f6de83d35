"""Checkpoints: exact copies, whole or absent, and never a silent restart."""

import errno
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_cases import (
    assert_same_bits,
    new_run,
    prepare_corpus,
    run_config,
    tiny_model,
)
from typer.testing import CliRunner

from mamba3lite.cli import app
from mamba3lite.models.transformer import ModelConfig
from mamba3lite.training import checkpoint as module
from mamba3lite.training.checkpoint import (
    FILES,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    CheckpointError,
    best_checkpoint,
    find_checkpoint,
    list_checkpoints,
    load_model,
    load_optimizer,
    newest_checkpoint,
    read_moments,
    read_run_state,
    read_state,
    read_weights,
    remove_temporary,
    restore_rng,
    rng_state,
    rotate,
    save_checkpoint,
    set_aside,
    verify_checkpoint,
)
from mamba3lite.training.config import TrainingConfig
from mamba3lite.training.optim import build_optimizer
from mamba3lite.training.parallel import Ranks
from mamba3lite.training.pretrain import train_step
from mamba3lite.verify import verify_folder

TRAINING = TrainingConfig(total_steps=10, lr=1e-2)


def batch():
    tokens = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:], torch.zeros(2, 16, dtype=torch.int64)


def trained(seed: int = 0, **changes):
    """A model and its optimizer after two steps."""
    model = tiny_model(seed, **changes)
    optimizer = build_optimizer(model, TRAINING)
    for _ in range(2):
        assert train_step(model, optimizer, [batch()]).problem is None
    return model, optimizer


@pytest.fixture
def three(tmp_path):
    """Three checkpoints of different weights; returns their folder."""
    for step in (1, 2, 3):
        model, optimizer = trained(seed=step)
        save_checkpoint(tmp_path, model, optimizer, {"step": step})
    return tmp_path


def steps(root) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(root)]


# --------------------------------------------------------------------------------------
# Exact copies


@pytest.mark.parametrize("tied", [True, False])
def test_every_bit_comes_back(tmp_path, tied):
    model, optimizer = trained(weight_tying=tied)
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 2, "note": "x"})
    other = tiny_model(seed=9, weight_tying=tied)
    restored = build_optimizer(other, TRAINING)
    load_model(path, other)
    load_optimizer(path, other, restored)
    assert path.name == "step_00000002"
    assert read_state(path) == {"format": 2, "step": 2, "note": "x"}
    assert_same_bits(model.state_dict(), other.state_dict())
    for name, parameter in model.named_parameters():
        twin = other.get_parameter(name)
        assert_same_bits(optimizer.state[parameter], restored.state[twin])
    assert (other.lm_head.weight is other.embed.weight) is tied


def test_the_next_step_is_the_same_after_loading(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 2})
    other = tiny_model(seed=9)
    restored = build_optimizer(other, TRAINING)
    load_model(path, other)
    load_optimizer(path, other, restored)
    first = train_step(model, optimizer, [batch()])
    assert train_step(other, restored, [batch()]) == first
    assert_same_bits(model.state_dict(), other.state_dict())


def test_tied_storage_is_written_once(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 2})
    stored = load_file(path / MODEL)
    assert set(stored) == set(model.state_dict()) - {"lm_head.weight"}
    assert stored["layers.0.A"].dtype == torch.complex64
    assert len(load_file(path / OPTIMIZER)) == 3 * len(list(model.parameters()))


def test_the_default_model_has_226_tensors():
    state = tiny_model(n_layers=ModelConfig().n_layers).state_dict()
    unique, ties = module.split_tied(state)
    assert len(state) == 227 and len(unique) == 226
    assert ties == {"lm_head.weight": "embed.weight"}


def test_an_optimizer_that_has_not_stepped_is_saved_too(tmp_path):
    model = tiny_model()
    optimizer = build_optimizer(model, TRAINING)
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 0})
    restored = build_optimizer(model, TRAINING)
    load_optimizer(path, model, restored)
    assert not restored.state


def test_random_numbers_continue():
    states = json.loads(json.dumps(rng_state()))
    expected = torch.rand(5)
    restore_rng(states)
    assert torch.equal(torch.rand(5), expected)


# --------------------------------------------------------------------------------------
# Damage


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped bit": flip_a_bit,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(three, name, damage):
    newest = three / "step_00000003"
    DAMAGE[damage](newest / name)
    lines = []
    assert newest_checkpoint(three, lines.append) == three / "step_00000002"
    assert len(lines) == 1 and str(newest) in lines[0]
    with pytest.raises(CheckpointError, match="step_00000003"):
        verify_checkpoint(newest)


@pytest.mark.parametrize(
    "entry",
    [5, None, [], {}, {"bytes": 5}, {"bytes": "5", "sha256": "x"},
     {"bytes": 5, "sha256": 5}, {"bytes": True, "sha256": "x"}],
)  # fmt: skip
def test_a_manifest_of_other_types_is_damage_too(three, entry):
    manifest = three / "step_00000003" / MANIFEST
    whole = json.loads(manifest.read_text())
    whole["files"][MODEL] = entry
    manifest.write_text(json.dumps(whole))
    lines = []
    assert newest_checkpoint(three, lines.append) == three / "step_00000002"
    fault = f"{manifest.parent}: {MANIFEST} should give bytes and sha256 of {MODEL}"
    assert len(lines) == 1 and lines[0].endswith(fault)


def test_a_manifest_nested_too_deeply_is_damage_too(three):
    (three / "step_00000003" / MANIFEST).write_text("[" * 100_000)
    assert newest_checkpoint(three, lambda line: None) == three / "step_00000002"


def test_the_reason_names_the_file(three):
    newest = three / "step_00000003"
    flip_a_bit(newest / MODEL)
    with pytest.raises(CheckpointError) as error:
        verify_checkpoint(newest)
    assert str(error.value) == f"{newest}: {MODEL} does not have its SHA-256"


def test_a_future_format_is_refused(three):
    path = three / "step_00000003" / MANIFEST
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    told = "has format 3, this version reads 1 and 2"
    with pytest.raises(CheckpointError, match=told):
        verify_checkpoint(path.parent)


def test_none_intact_is_an_error_not_a_restart(three):
    for path in list_checkpoints(three):
        (path / STATE).unlink()
    with pytest.raises(CheckpointError, match="none of its 3 checkpoints can be used"):
        newest_checkpoint(three, lambda line: None)


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path):
    assert newest_checkpoint(tmp_path / "nowhere", print) is None


# --------------------------------------------------------------------------------------
# A stranger's checkpoint: every hash is right, and what it says is not


def sign(folder):
    """Write a manifest that fits the files."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in FILES:
        data = (folder / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        manifest["files"][name] = {"bytes": len(data), "sha256": digest}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def change_tensor(path, name, change):
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path)
    sign(path.parent)


@pytest.mark.parametrize("dtype", ["int64", "bool", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("key", ["", ".exp_avg", ".exp_avg_sq", ".step"])
def test_a_tensor_of_another_dtype_is_refused_by_name(three, dtype, key):
    newest = three / "step_00000003"
    file, name = newest / (OPTIMIZER if key else MODEL), f"norm_f.weight{key}"
    change_tensor(file, name, lambda t: t.to(getattr(torch, dtype)))
    verify_checkpoint(newest)
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        Ranks().load(newest, model, build_optimizer(model, TRAINING))
    shape = "()" if key == ".step" else "(16,)"
    assert str(error.value) == (
        f"{file}: does not fit this model: {name}: stored {shape} {dtype}, model "
        f"{shape} float32"
    )
    if not key:
        assert_same_bits(model.state_dict(), before)


@pytest.mark.parametrize("read", [read_weights, load_model])
def test_a_real_decay_rate_is_refused(three, read):
    path = three / "step_00000003" / MODEL
    change_tensor(path, "layers.0.A", lambda t: t.real.contiguous())
    told = r"layers\.0\.A: stored \(2,\) float32, model \(2,\) complex64$"
    with pytest.raises(CheckpointError, match=told):
        read(path.parent, tiny_model())


def test_no_moments_after_the_first_update_are_refused(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 13})
    save_file({}, path / OPTIMIZER)
    sign(path)
    verify_checkpoint(path)
    for read in (read_moments, lambda p, m: load_optimizer(p, m, optimizer)):
        with pytest.raises(CheckpointError, match="exp_avg: stored nothing, model "):
            read(path, model)


def many_tensors(path):
    """A header of a million names, and not one byte of data."""
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    entries = ",".join(f'"{number}":{entry}' for number in range(1_000_000))
    a_header("{" + entries + "}")(path)


def a_header(text):
    data = text.encode()
    return lambda path: path.write_bytes(len(data).to_bytes(8, "little") + data)


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (many_tensors, r"a header of [0-9,]+ bytes, wanted 8,388,608 or less"),
        (lambda p: p.write_bytes(b"\xff" * 100), r"a header of [0-9,]+ bytes, wanted"),
        (lambda p: p.write_bytes(b""), "header: not JSON"),
        (a_header("[" * 100_000), "header: not JSON .nested too deeply"),
        (a_header("[]"), "header: wants a JSON object"),
        (a_header('{"a": 1}'), "header: wants shape and dtype of all"),
        (a_header('{"a": {}, "a": {}}'), "header: not JSON .a key twice"),
        (a_header('{"a": {"shape": 5, "dtype": "F32"}}'), "wants shape and dtype"),
        (a_header('{"a": {"shape": [1], "dtype": []}}'), "header: .*expected string"),
        (a_header('{"a": {"shape": [1], "dtype": "F32", "data_offsets": [0, 4]}}'),
         "header: .*incomplete metadata"),
        (lambda p: save_file({"\x1b]0;x\n": torch.zeros(1)}, p),
         r"model: \\x1b\]0;x\\n: stored \(1,\) float32, model nothing, embed"),
    ],
)  # fmt: skip
def test_a_file_of_tensors_that_is_none_is_one_line(three, write, told):
    path = three / "step_00000003" / MODEL
    write(path)
    sign(path.parent)
    begin = time.process_time()
    with pytest.raises(CheckpointError, match=told) as error:
        verify_checkpoint(path.parent)
        load_model(path.parent, tiny_model())
    assert "\n" not in str(error.value)
    assert time.process_time() - begin < 1


def test_every_file_of_a_checkpoint_may_be_read_by_who_may_read_one(tmp_path):
    """By the umask, as of any other file: a group that shares runs shares weights."""
    before = os.umask(0o027)
    try:
        model = tiny_model()
        path = save_checkpoint(
            tmp_path, model, build_optimizer(model, TRAINING), {"step": 0}
        )
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


def test_verify_compares_the_tensors_with_the_model_of_the_state(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / saved.name)
    for file, name in ((MODEL, "norm_f.weight"), (OPTIMIZER, "norm_f.weight.exp_avg")):
        change_tensor(path / file, name, lambda t: t.half())
        (fault,) = verify_folder(path, pytest.fail)
        assert fault == (
            f"{path / file}: does not fit this model: {name}: stored (16,) float16, "
            "model (16,) float32"
        )
        change_tensor(path / file, name, lambda t: t.float())


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def a_folder(path):
    path.unlink()
    path.mkdir()


def a_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def a_link_outside(path):
    os.rename(path, path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def a_loop(path):
    path.unlink()
    path.symlink_to(path.name)


NOT_PLAIN = {
    a_pipe: "not a plain file",
    a_folder: "not a plain file",
    a_device: "a link that leads out of its folder",
    a_link_outside: "a link that leads out of its folder",
    a_loop: "Too many levels of symbolic links",
}


@pytest.mark.parametrize("change", NOT_PLAIN)
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_what_is_no_plain_file_of_the_folder_is_not_read(three, name, change):
    newest = three / "step_00000003"
    change(newest / name)
    lines = []
    assert newest_checkpoint(three, lines.append) == three / "step_00000002"
    (line,) = lines
    assert line.endswith(f"{newest / name}: {NOT_PLAIN[change]}")


def test_a_link_inside_the_folder_is_followed(three):
    path = three / "step_00000003" / MODEL
    os.rename(path, path.with_name("weights"))
    path.symlink_to("weights")
    verify_checkpoint(path.parent)


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_file_without_end_is_not_read_to_its_end(three, name):
    newest = three / "step_00000003"
    os.truncate(newest / name, 1 << 40)  # takes no room on the disk
    if name == STATE:
        with pytest.raises(CheckpointError, match="larger than 16,777,216 bytes"):
            read_state(newest)
    with pytest.raises(CheckpointError, match=r"larger than|has 1099511627776 bytes"):
        verify_checkpoint(newest)


@pytest.fixture
def nobody():
    """A folder of everybody's, in which the root user has no more rights than others.

    The root user reads files of any mode, so the test gives its rights up for a while.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)


@pytest.mark.parametrize("name", [*FILES, MANIFEST, "."])
def test_what_cannot_be_read_is_bad_and_the_older_one_used(nobody, name):
    model, optimizer = trained()
    for step in (1, 2):
        save_checkpoint(nobody, model, optimizer, {"step": step})
    newest = nobody / "step_00000002"
    os.chmod(newest / name, 0)
    lines = []
    assert newest_checkpoint(nobody, lines.append) == nobody / "step_00000001"
    (line,) = lines
    file = MANIFEST if name == "." else name
    assert line.endswith(f"older: {newest / file}: Permission denied")
    os.chmod(newest / name, 0o700)


def test_a_folder_that_cannot_be_listed_is_no_fresh_start(nobody):
    model, optimizer = trained()
    root = nobody / "checkpoints"
    save_checkpoint(root, model, optimizer, {"step": 1})
    os.chmod(root, 0o300)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied"):
        newest_checkpoint(root, pytest.fail)
    fault = f"{root}: cannot be read (Permission denied)"
    assert verify_folder(nobody, pytest.fail) == [fault]
    os.chmod(root, 0o700)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two steps; returns its checkpoint."""
    base = tmp_path_factory.mktemp("saved")
    run = new_run(run_config(prepare_corpus(base), base / "run", total_steps=2))
    run.run()
    return list_checkpoints(base / "run" / "checkpoints")[-1]


def test_the_state_of_a_run_is_read_as_it_was_written(saved):
    assert read_run_state(saved) == json.loads((saved / STATE).read_text())


STATES = {  # where, what, and what is said of it
    "n_layers": ("config.model.n_layers", 10_000_000,
                 "config.model: model.n_layers: got 10000000, should be at most 1024"),
    "too wide": ("config.model.d_model", 4096, "describes a model of 2,"),
    "absurd": ("config.model.d_model", 10**10, "config.model: model: [0-9,]+ param"),
    "a float": ("config.model.d_model", 16.0, "config.model: d_model is 16.0; wanted"),
    "a list": ("config.model.chunk_size", [], r"chunk_size is \[\]; wanted"),
    "an unknown field": ("config.model.rope", 1, "config.model: .*'rope'"),
    "a dispatch": ("config.model.ssd_dispatch", "x", "ssd_dispatch is 'x'; wanted one"),
    "a vocabulary": ("config.model.vocab_size", 256,
                     "a model of 256 tokens, but the tokenizer byte has 257"),
    "no model": ("config.model", None, "config.model: got None, should be"),
    "no config": ("config", [], r"config: got \[\], should be a valid dict"),
    "rows": ("config.training.micro_batch_size", 0,
             "micro_batch_size: got 0, should be greater than or equal to 1"),
    "a setting": ("config.training.lr", [1], "config.training.lr.*: got "),
    "a setting of the data": ("config.data.source", {}, "config.data.source.*: got "),
    "a long setting": ("config.data.source", "x" * 5000, "data.source.*: got 'xxx"),
    "a long folder": ("data.folder", "x" * 5000, "data.folder: got 'xxx.*4096 charac"),
    "a loss": ("losses", [1e300], "losses.0: got 1e"),
    "threads": ("threads", 1_000_000,
                "threads: got 1000000, should be less than or equal to 1024"),
    "no threads": ("threads", None, "threads: got None, should be a valid integer"),
    "a thread": ("threads", True, "threads: got True, should be a valid integer"),
    "a step before the first": ("step", -1, "step: got -1, should be greater than"),
    "a step of text": ("step", "2", "step: got '2', should be a valid integer"),
    "half a step": ("step", 2.5, "step: got 2.5, should be a valid integer"),
    "a step without end": ("step", 10**30, "step: got 10+, should be less than or"),
    "skipped": ("skipped", -3, "skipped: got -3, should be greater than"),
    "sampled": ("sampled", -1, "sampled: got -1, should be greater than or equal"),
    "windows": ("windows", None, "windows: got None, should be a valid integer"),
    "tokens": ("tokens", {}, r"tokens: got \{\}, should be a valid integer"),
    "losses": ("losses", [1.0, "2"], "losses.1: got '2', should be a valid number"),
    "validation": ("validation", 3, "validation: got 3, should be a valid dict"),
    "a score": ("validation", {"step": 1, "val_bpb": "x"}, "val_bpb: got 'x'"),
    "time": ("elapsed_s", -1, "elapsed_s: got -1, should be greater than"),
    "rng": ("rng", {}, "rng.cpu is missing"),
    "rng of other length": ("rng.cpu", "AAAA", "rng.cpu: Expected a CPUGenerator"),
    "rng of zeros": ("rng.cpu", "A" * 6740 + "AA==", "rng.cpu: Invalid mt19937 state"),
    "rng that is no base64": ("rng.cpu", "*", "rng.cpu: "),
    "tokenizer": ("data.tokenizer", "bytes",
                  "data: tokenizer: got 'bytes', allowed are 'byte' and 'gpt2'"),
    "another tokenizer": ("data.tokenizer_fingerprint", "0" * 64,
                          "data: tokenizer byte: has fingerprint '000000000000..., "
                          "that of this version is '5035.*; its ids stand for other"),
    "fingerprint": ("data.fingerprint", 7, "data.fingerprint: got 7, should be"),
    "another fingerprint": ("data.fingerprint", "x", "fingerprint: got 'x', String"),
    "processes": ("world_size", 0, "world_size: got 0, should be greater than"),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_no_run_wrote_is_one_line(saved, tmp_path, case):
    place, value, told = STATES[case]
    path = shutil.copytree(saved, tmp_path / saved.name)
    state = json.loads((path / STATE).read_text())
    *outer, key = place.split(".")
    inner = state
    for name in outer:
        inner = inner[name]
    inner[key] = value
    (path / STATE).write_text(json.dumps(state))
    sign(path)
    with pytest.raises(CheckpointError, match=told) as error:
        read_run_state(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    result = CliRunner().invoke(app, ["generate", "--checkpoint", str(path)])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"mamba3lite generate: {error.value}"
    assert verify_folder(path, lambda line: None) == [str(error.value)]


def test_more_windows_than_64_bits_hold_are_one_line(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / saved.name)
    state = json.loads((path / STATE).read_text())
    state["skipped"] = 10**15
    state["config"]["training"]["micro_batch_size"] = 10**10
    (path / STATE).write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"10,000,[0-9,]+ windows behind it"):
        read_run_state(path)


def test_a_state_lacks_nothing(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / saved.name)
    whole = json.loads((path / STATE).read_text())
    wanted = {"step", "skipped", "tokens", "consecutive_bad", "elapsed_s", "rng",
              "config", "data", "threads", "world_size"}  # fmt: skip
    for key in wanted:
        rest = {name: value for name, value in whole.items() if name != key}
        (path / STATE).write_text(json.dumps(rest))
        with pytest.raises(CheckpointError, match=f"{STATE}: {key} is missing"):
            read_run_state(path)


def test_a_state_of_json_with_tricks_is_refused(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / saved.name)
    whole = (path / STATE).read_text()
    for text, told in {
        whole.replace('"step"', '"step": 1, "step"', 1): "a key twice",
        whole.replace('"elapsed_s":', '"elapsed_s": NaN, "x":'): "NaN is no number",
        whole.replace('"skipped":', '"x": 1e999, "skipped":'): None,
        whole.replace('"elapsed_s":', '"elapsed_s": 1e999, "x":'): "a finite number",
        whole.replace('"skipped":', f'"skipped": {"9" * 5000}, "x":'): "not JSON",
        whole.replace('"skipped":', f'"x": {"[" * 10**6}, "skipped":'): "too deeply",
        whole + "{}": "not JSON",
        "\ufeff\ufeff" + whole: "not JSON",
        "null": "wants a JSON object",
    }.items():
        (path / STATE).write_text(text)
        if told is None:
            read_run_state(path)
            continue
        with pytest.raises(CheckpointError, match=told) as error:
            read_run_state(path)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_any_flipped_bit_is_one_line_or_changes_nothing(saved, tmp_path):
    """500 of them, anywhere in the four files; what still loads, loads the same."""
    path = shutil.copytree(saved, tmp_path / saved.name)
    model = tiny_model()
    wanted = read_weights(path, model) | read_moments(path, model)
    state = read_run_state(path)
    draw, refused = random.Random(0), 0
    for _ in range(500):
        file = path / draw.choice([*FILES, MANIFEST])
        whole = file.read_bytes()
        data, bit = bytearray(whole), draw.randrange(8 * len(whole))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        try:
            verify_checkpoint(path)
            stored = read_weights(path, model) | read_moments(path, model)
            assert_same_bits(stored, wanted)
            assert read_run_state(path) == state
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error), error
        file.write_bytes(whole)
    assert refused > 400


# --------------------------------------------------------------------------------------
# Crashes


@pytest.mark.parametrize("writes", range(8))
def test_a_save_that_fails_leaves_the_older_ones(three, monkeypatch, writes):
    model, optimizer = trained()
    before = {p: p.read_bytes() for p in three.rglob("*") if p.is_file()}
    calls = []

    def full_disk(descriptor):
        calls.append(descriptor)
        if len(calls) > writes:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    if writes >= 6:  # files, manifest, folder and parent were all flushed
        save_checkpoint(three, model, optimizer, {"step": 4})
        assert steps(three) == [1, 2, 3, 4]
    else:
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(three, model, optimizer, {"step": 4})
    assert not list(three.glob(".tmp-*"))
    assert all(path.read_bytes() == data for path, data in before.items())


def test_what_a_killed_save_leaves_is_no_checkpoint(three):
    names = (".tmp-step_00000004", ".tmp-step_00000004-0a1b2c3d",
             ".tmp-deleted-step_00000001-0a1b2c3d")  # fmt: skip
    for name in (*names, ".tmp-mine"):
        shutil.copytree(three / "step_00000003", three / name)
    assert steps(three) == [1, 2, 3]
    remove_temporary(three, pytest.fail)
    assert not any((three / name).exists() for name in names)
    assert (three / ".tmp-mine" / MODEL).exists() and steps(three) == [1, 2, 3]


def test_what_was_written_wrongly_is_noticed_at_once(tmp_path, monkeypatch):
    model, optimizer = trained()
    rename = os.rename

    def corrupting_rename(source, target):
        rename(source, target)
        flip_a_bit(target / OPTIMIZER)

    monkeypatch.setattr(module.os, "rename", corrupting_rename)
    with pytest.raises(CheckpointError, match=OPTIMIZER):
        save_checkpoint(tmp_path, model, optimizer, {"step": 1})


def test_rotation_keeps_the_newest(three):
    rotate(three, 2, None, pytest.fail)
    assert sorted(path.name for path in three.iterdir()) == [
        *("step_00000002", "step_00000003")
    ]
    rotate(three, 2, None, pytest.fail)
    assert steps(three) == [2, 3]


def deletion_refused(monkeypatch, name):
    """Let the system keep every file of this name, as `chattr +i` does."""
    unlink = os.unlink

    def refusing(path, *arguments, **options):
        if os.path.basename(path) == name:
            raise OSError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, *arguments, **options)

    monkeypatch.setattr(os, "unlink", refusing)


def test_a_rotation_that_the_system_refuses_is_a_warning_and_tried_again(
    three, monkeypatch
):
    lines = []
    with monkeypatch.context() as patch:
        deletion_refused(patch, STATE)
        for _ in range(2):
            rotate(three, 2, None, lines.append)
        remove_temporary(three, lines.append)  # as a run that starts again
        (grave,) = three.glob(".tmp-*")
        assert [path.name for path in grave.iterdir()] == [STATE]
    assert set(lines) == {
        f"[warn] {grave}: cannot be deleted (Operation not permitted); it is tried "
        "again at the next save"
    }
    assert steps(three) == [2, 3]
    rotate(three, 2, None, pytest.fail)
    assert not grave.exists()


def test_a_run_says_once_what_it_cannot_delete(tmp_path, monkeypatch, capsys):
    deletion_refused(monkeypatch, MODEL)
    tokens = prepare_corpus(tmp_path)
    settings = {"save_interval": 1, "total_steps": 6}
    run = new_run(run_config(tokens, tmp_path / "run", **settings))
    assert run.run() is True
    monkeypatch.undo()
    settings["total_steps"] = 7
    assert new_run(run_config(tokens, tmp_path / "run", **settings)).run() is True
    said = [line for line in capsys.readouterr().out.splitlines() if "deleted" in line]
    assert len(said) == len(set(said)) == 5  # of steps 0 to 4
    assert steps(tmp_path / "run" / "checkpoints") == [6, 7]
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))


def test_nothing_is_written_through_a_planted_link(three):
    """The names of unfinished saves could be guessed."""
    target = three / "precious"
    shutil.copytree(three / "step_00000001", target)
    before = {p: p.read_bytes() for p in target.iterdir()}
    (three / ".tmp-step_00000004").symlink_to(target)
    model, optimizer = trained()
    save_checkpoint(three, model, optimizer, {"step": 4})
    assert {p: p.read_bytes() for p in target.iterdir()} == before
    assert steps(three) == [1, 2, 3, 4]


def test_rotation_keeps_milestones_and_the_best(tmp_path):
    model, optimizer = trained()
    scores = {0: None, 2: 3.0, 4: 3.0, 6: 9.0, 8: None, 10: 8.0, 12: 7.0}
    for step, score in scores.items():
        validation = None if score is None else {"step": step, "val_bpb": score}
        state = {"step": step, "validation": validation}
        save_checkpoint(tmp_path, model, optimizer, state)
    assert best_checkpoint(list_checkpoints(tmp_path)) == tmp_path / "step_00000002"
    rotate(tmp_path, 2, 4, pytest.fail)
    # 2 is the best (the older of two alike), 4, 8 and 12 are multiples; 0 is not one.
    assert steps(tmp_path) == [2, 4, 8, 10, 12]
    (tmp_path / "step_00000002" / STATE).write_text("{")
    assert best_checkpoint(list_checkpoints(tmp_path)) == tmp_path / "step_00000004"
    assert best_checkpoint([]) is None


def test_names_sort_like_numbers(tmp_path):
    others = ("step_x", "aside_step_00000001", "step_²", "step_٣", "step_" + "1" * 200)
    for name in ("step_100000000", "step_00000009", *others):
        (tmp_path / name).mkdir()
    assert steps(tmp_path) == [9, 100000000]


def test_set_aside_never_overwrites(three):
    first = set_aside(three / "step_00000003")
    shutil.copytree(three / "step_00000002", three / "step_00000003")
    second = set_aside(three / "step_00000003")
    assert first != second and first.exists() and second.exists()
    assert steps(three) == [1, 2]


# --------------------------------------------------------------------------------------
# Finding and fitting


def test_a_checkpoint_is_found_from_each_level(three, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(three, run / "checkpoints", ignore=lambda *_: ["run"])
    newest = run / "checkpoints" / "step_00000003"
    for path in (run, run / "checkpoints", newest):
        assert find_checkpoint(path, print) == newest
    older = run / "checkpoints" / "step_00000001"
    assert find_checkpoint(older, print) == older


def test_finding_nothing_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        find_checkpoint(tmp_path / "nowhere", print)
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"text\.txt: is a file, wants a folder"):
        find_checkpoint(tmp_path / "text.txt", print)
    with pytest.raises(CheckpointError, match="no checkpoint here; wants"):
        find_checkpoint(tmp_path, print)


def test_another_shape_is_refused_by_name(three):
    path = three / "step_00000003"
    with pytest.raises(CheckpointError) as error:
        load_model(path, tiny_model(ffn_dim=32))
    assert str(error.value) == (
        f"{path / MODEL}: does not fit this model: layers.0.ffn_down.weight: stored "
        "(16, 24) float32, model (16, 32) float32, layers.0.ffn_gate_up.weight: stored "
        "(48, 16) float32, model (64, 16) float32, layers.1.ffn_down.weight: stored "
        "(16, 24) float32, model (16, 32) float32 and 1 more"
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: stored nothing"):
        load_model(path, tiny_model(weight_tying=False))
    other = tiny_model(n_layers=1)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_optimizer(path, other, build_optimizer(other, TRAINING))
