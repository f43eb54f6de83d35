"""A small prepared corpus and a model to match, for the tests of the trainer."""

import copy
import random
from pathlib import Path

import torch
import yaml

from mamba3lite.data.prepare import prepare
from mamba3lite.models.transformer import Mamba3Transformer
from mamba3lite.training.config import RunConfig, check_config
from mamba3lite.training.metrics import Display
from mamba3lite.training.pretrain import Pretrainer

MODEL = {
    "vocab_size": 257,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 2,
    "head_dim": 8,
    "state_dim": 4,
    "chunk_size": 16,
    "ffn_dim": 24,
    "max_seq_len": 32,
    "a_init": "spectrum",
}
TRAINING = {
    "micro_batch_size": 4,
    "total_steps": 8,
    "warmup_steps": 2,
    "lr": 1e-2,
    "eval_interval": 100,
    "eval_windows": 3,
    "sample_interval": 100,
    "save_interval": 3,
    "log_interval": 1,
    "keep_last": 2,
}
WORDS = ("def", "return", "self", "value", "for", "in", "range", "(", ")", "=", "é")


def write_corpus(folder: Path, documents: int = 40, words: int = 120) -> Path:
    """Documents of words drawn with a fixed seed, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for number in range(documents):
        text = " ".join(draw.choices(WORDS, k=words))
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def prepare_corpus(base: Path) -> Path:
    """A prepared folder with a training and a validation split."""
    source = write_corpus(base / "text")
    prepare(source, "byte", base / "tokens", val_fraction=0.2, progress=lambda *_: None)
    return base / "tokens"


def raw_config(prepared: Path, run_dir: Path, **training) -> dict:
    """The three sections of a run that takes a fraction of a second."""
    raw = {"model": MODEL, "training": TRAINING | training, "data": {}}
    raw = copy.deepcopy(raw)
    raw["training"]["save_dir"] = str(run_dir)
    raw["data"]["train_data_path"] = str(prepared)
    return raw


def run_config(prepared: Path, run_dir: Path, **training) -> RunConfig:
    """The same, checked."""
    return check_config(raw_config(prepared, run_dir, **training), "test")


def write_config(path: Path, prepared: Path, run_dir: Path, **training) -> Path:
    """The same, as a YAML file."""
    path.write_text(yaml.safe_dump(raw_config(prepared, run_dir, **training)))
    return path


def new_run(config: RunConfig, kind: type[Pretrainer] = Pretrainer) -> Pretrainer:
    """A run that has not begun."""
    display = Display(config.total_steps)
    run = kind(config, Path(config.data.train_data_path), display)
    run.sample_tokens = run.final_sample_tokens = 5
    return run


class StopsAfter(Pretrainer):
    """A run that gets a stop signal during one of its steps."""

    at_step = 5

    def next_step(self):
        result = super().next_step()
        if self.step == self.at_step:
            self.stop.received = 15
        return result


def tiny_model(seed: int = 0, **changes) -> Mamba3Transformer:
    """A model with random weights, large enough that outputs differ clearly."""
    torch.manual_seed(seed)
    model = Mamba3Transformer(MODEL | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tensors_of(run: Pretrainer) -> dict[str, torch.Tensor]:
    """Every tensor that training changes: weights and AdamW's moments."""
    tensors = {n: p.detach() for n, p in run.model.named_parameters()}
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = value
    return tensors


def assert_same_bits(left: dict, right: dict) -> None:
    """Equal names, dtypes and bits."""
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name
