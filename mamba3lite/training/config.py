"""Run configuration: YAML with three sections, checked before anything else runs.

A mistake in a file or in a ``--set`` override is one line that names where it is,
what was got and what is allowed. Scalars follow the YAML 1.2 core schema: ``3e-4`` is
a float, ``yes`` and ``on`` are strings, and a key given twice is an error.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mamba3lite.models.config import ModelConfig

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class ConfigError(ValueError):
    """A configuration mistake: one line with place, value and what is allowed."""


class TrainingConfig(BaseModel):
    """The ``training`` section; lengths are in optimizer steps unless named tokens."""

    model_config = STRICT

    micro_batch_size: int = Field(16, ge=1)
    gradient_accumulation_steps: int = Field(1, ge=1)
    total_steps: int | None = Field(None, ge=1)
    total_tokens: int | None = Field(None, ge=1)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_fraction: float = Field(0.2, gt=0, le=1)
    lr: float = Field(3e-4, gt=0)
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    weight_decay: float = Field(0.1, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    grad_clip: float = Field(1.0, gt=0)
    grad_checkpoint: bool = False
    compile: bool = False
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    tf32: bool = True
    eval_interval: int = Field(250, ge=1)
    eval_windows: int = Field(64, ge=1)
    sample_interval: int = Field(1000, ge=1)
    save_interval: int = Field(500, ge=1)
    log_interval: int = Field(10, ge=1)
    keep_last: int = Field(3, ge=2)
    keep_every: int | None = Field(None, ge=1)
    nan_guard: bool = True
    nan_guard_max_consecutive: int = Field(5, ge=1)
    max_rollbacks: int = Field(3, ge=0)
    spike_zscore: float | None = Field(None, gt=0)
    spike_window: int = Field(100, ge=2, le=100_000)
    seed: int = Field(0, ge=0, lt=2**63)
    save_dir: str | None = Field(None, min_length=1)
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = Field("mamba3lite", min_length=1)
    profile_start: int | None = Field(None, ge=1)
    profile_steps: int = Field(3, ge=1)
    memory_snapshot: bool = False
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    dist_timeout_s: int = Field(600, ge=1, lt=10**6)

    def decay_steps(self, total_steps: int) -> int:
        """Steps at the end of a wsd schedule in which the learning rate falls."""
        return max(1, round(self.decay_fraction * total_steps))


class DataConfig(BaseModel):
    """The ``data`` section: a prepared folder, or a source that is prepared first."""

    model_config = STRICT

    train_data_path: str | None = Field(None, min_length=1)
    source: str | None = Field(None, min_length=1)
    tokenizer: Literal["byte", "gpt2"] = "byte"
    val_fraction: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def _one_origin(self) -> "DataConfig":
        for key in ("source", "val_fraction"):
            if self.train_data_path is not None and getattr(self, key) is not None:
                raise ValueError(
                    f"data.{key}: data.train_data_path names a folder that is already "
                    "prepared; give one of the two"
                )
        return self


class RunConfig(BaseModel):
    """A whole run: the model, how it is trained, and on what."""

    model_config = STRICT

    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    data: DataConfig = Field(default_factory=DataConfig)

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        training = self.training
        refuse_absurd_sizes(self.model)
        for name, section in (("training", training), ("data", self.data)):
            for key, value in section:
                if isinstance(value, str) and "\0" in value:
                    raise ValueError(f"{name}.{key}: should not hold a null byte")
                if isinstance(value, int) and value >= 2**63:
                    raise ValueError(
                        f"{name}.{key}: got {value}, should be less than {2**63}"
                    )
        if (training.total_steps is None) == (training.total_tokens is None):
            least = max(training.warmup_steps, training.profile_start or 0)
            raise ValueError(
                "training.total_steps: give exactly one of training.total_steps and "
                f"training.total_tokens, such as training.total_steps="
                f"{max(1000, 10 * least)}"
            )
        if self.tokens_per_step > MOST_TOKENS_PER_STEP:
            raise ValueError(
                f"training.micro_batch_size: a step of {self.tokens_per_step:,} tokens "
                "(micro_batch_size x gradient_accumulation_steps x max_seq_len), "
                f"should be at most {MOST_TOKENS_PER_STEP:,}; with micro_batch_size=1 "
                "and gradient_accumulation_steps=1 it has "
                f"{self.model.max_seq_len:,}"
            )
        _refuse_misfits(training, self.total_steps)
        return self

    def model_fields_of_run(self) -> dict[str, Any]:
        """A copy of the model section, with what the training section changes in it."""
        fields = dataclasses.asdict(self.model)
        fields["grad_checkpoint"] |= self.training.grad_checkpoint
        return fields

    @property
    def global_rows(self) -> int:
        """Rows of max_seq_len tokens in one optimizer step."""
        training = self.training
        return training.micro_batch_size * training.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.global_rows * self.model.max_seq_len

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run; a token budget is rounded up to whole steps."""
        if self.training.total_steps is not None:
            return self.training.total_steps
        return math.ceil(self.training.total_tokens / self.tokens_per_step)


# Beyond these a number is a slip of the keyboard, and building such a model would hang.
MOST_PARAMETERS = 10**12
MOST_BY_SETTING = {"n_layers": 1024, "chunk_size": 2**20}
MOST_TOKENS_PER_STEP = 10**8


def parameter_count(model: ModelConfig) -> int:
    """Parameters of a model that is not built, a complex number counted once."""
    d, heads = model.d_model, model.n_heads
    inner = heads * model.head_dim
    in_proj = d * (inner + 4 * heads * model.state_dim + heads)
    mixer = in_proj + heads + inner**2 + inner * d  # with A and the head mixer
    layer = mixer + 3 * d * model.ffn_dim + 2 * d  # with SwiGLU and two norms
    embeddings = 1 if model.weight_tying else 2
    return model.n_layers * layer + embeddings * model.vocab_size * d + d


def refuse_absurd_sizes(model: ModelConfig) -> None:
    """Raises: ValueError for sizes that no run could hold."""
    if (asked := parameter_count(model)) > MOST_PARAMETERS:
        sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "head_dim")
        sizes += ("state_dim", "ffn_dim")
        given = ", ".join(f"{name} {getattr(model, name)}" for name in sizes)
        raise ValueError(
            f"model: {asked:,} parameters ({given}), should be at most "
            f"{MOST_PARAMETERS:,}"
        )
    for key, most in MOST_BY_SETTING.items():
        if (got := getattr(model, key)) > most:
            raise ValueError(f"model.{key}: got {got}, should be at most {most}")


def _refuse_misfits(training: TrainingConfig, total_steps: int) -> None:
    """Raises: ValueError for settings that are sound alone but not together."""
    falling = training.decay_steps(total_steps)
    steady = training.schedule != "wsd"
    warm_up = min(total_steps // 10, total_steps if steady else total_steps - falling)
    if training.warmup_steps > total_steps:
        raise ValueError(
            f"training.warmup_steps: got {training.warmup_steps}, should be at most "
            f"the {total_steps} steps of the run, such as "
            f"training.warmup_steps={warm_up}"
        )
    if not steady and training.warmup_steps + falling > total_steps:
        raise ValueError(
            f"training.decay_fraction: {training.warmup_steps} steps of warm-up and "
            f"{falling} of decay, should be at most the {total_steps} steps of the "
            f"run, such as with training.warmup_steps={warm_up}"
        )
    if training.keep_every and training.keep_every % training.save_interval:
        near = max(1, round(training.keep_every / training.save_interval))
        raise ValueError(
            f"training.keep_every: got {training.keep_every}, should be a multiple of "
            f"training.save_interval, {training.save_interval}, such as "
            f"training.keep_every={near * training.save_interval}"
        )
    if training.profile_start is None and training.memory_snapshot:
        raise ValueError(
            "training.memory_snapshot: got true, should come with "
            "training.profile_start, the step at which it begins, such as "
            f"training.profile_start={min(10, total_steps)}"
        )
    if (training.profile_start or 0) > total_steps:
        raise ValueError(
            f"training.profile_start: got {training.profile_start}, should be at most "
            f"the {total_steps} steps of the run, such as "
            f"training.profile_start={min(10, total_steps)}"
        )


SECTIONS: dict[str, tuple[str, ...]] = {
    "model": tuple(field.name for field in dataclasses.fields(ModelConfig)),
    "training": tuple(TrainingConfig.model_fields),
    "data": tuple(DataConfig.model_fields),
}

# What other trainers call the same thing.
ALIASES = {
    "learning_rate": "training.lr",
    "max_lr": "training.lr",
    "min_lr": "training.min_lr_ratio",
    "batch_size": "training.micro_batch_size",
    "per_device_train_batch_size": "training.micro_batch_size",
    "grad_accum": "training.gradient_accumulation_steps",
    "accumulation_steps": "training.gradient_accumulation_steps",
    "max_steps": "training.total_steps",
    "steps": "training.total_steps",
    "num_steps": "training.total_steps",
    "train_steps": "training.total_steps",
    "max_iters": "training.total_steps",
    "max_tokens": "training.total_tokens",
    "warmup": "training.warmup_steps",
    "warmup_iters": "training.warmup_steps",
    "lr_schedule": "training.schedule",
    "lr_scheduler": "training.schedule",
    "lr_scheduler_type": "training.schedule",
    "cooldown_fraction": "training.decay_fraction",
    "decay_ratio": "training.decay_fraction",
    "max_grad_norm": "training.grad_clip",
    "clip_grad": "training.grad_clip",
    "wd": "training.weight_decay",
    "activation_checkpointing": "training.grad_checkpoint",
    "gradient_checkpointing": "training.grad_checkpoint",
    "dtype": "training.precision",
    "mixed_precision": "training.precision",
    "eval_every": "training.eval_interval",
    "eval_steps": "training.eval_interval",
    "save_every": "training.save_interval",
    "save_steps": "training.save_interval",
    "logging_steps": "training.log_interval",
    "save_total_limit": "training.keep_last",
    "keep_period": "training.keep_every",
    "max_bad_steps": "training.nan_guard_max_consecutive",
    "spike_threshold": "training.spike_zscore",
    "use_tensorboard": "training.tensorboard",
    "use_wandb": "training.wandb",
    "project": "training.wandb_project",
    "profile_length": "training.profile_steps",
    "strategy": "training.parallel",
    "distributed": "training.parallel",
    "ddp_timeout": "training.dist_timeout_s",
    "output_dir": "training.save_dir",
    "out_dir": "training.save_dir",
    "random_seed": "training.seed",
    "hidden_size": "model.d_model",
    "dim": "model.d_model",
    "num_layers": "model.n_layers",
    "n_layer": "model.n_layers",
    "depth": "model.n_layers",
    "num_heads": "model.n_heads",
    "d_state": "model.state_dim",
    "intermediate_size": "model.ffn_dim",
    "seq_len": "model.max_seq_len",
    "context_length": "model.max_seq_len",
    "block_size": "model.max_seq_len",
    "tie_word_embeddings": "model.weight_tying",
    "data_path": "data.train_data_path",
    "dataset": "data.source",
    "corpus": "data.source",
    "val_split": "data.val_fraction",
}

PATHS = ("training.save_dir", "data.train_data_path", "data.source")

# Of each pair a run has one: an override of either replaces the other in the file.
EXCLUSIVE = {
    "training.total_steps": ("training.total_tokens",),
    "training.total_tokens": ("training.total_steps",),
    "data.train_data_path": ("data.source", "data.val_fraction"),
    "data.source": ("data.train_data_path",),
}


# --------------------------------------------------------------------------------------
# YAML 1.2 core schema

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_SCALARS = [
    ("null", re.compile(r"~|null|Null|NULL|")),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE")),
    ("int", _INT),
    ("float", _FLOAT),
]
_CORE_RESOLVERS = {
    None: [
        (f"tag:yaml.org,2002:{name}", re.compile(rf"(?:{pattern.pattern})\Z"))
        for name, pattern in _SCALARS
    ]
}


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2 and no key given twice."""

    yaml_implicit_resolvers = _CORE_RESOLVERS
    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As PyYAML's; what could grow beyond its file is refused before it does."""
        line = self.peek_event().start_mark.line + 1
        if self.check_event(yaml.AliasEvent):
            name = _cut(f"*{self.peek_event().anchor}", quote=False)
            raise ConfigError(f"line {line}: an alias, {name}; write out what it is")
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise ConfigError(
                f"line {line}: more than {MOST_NODES:,} values, too many for a "
                "configuration"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"line {line}: key {_cut(key)} should be a string")
            if key in mapping:
                raise ConfigError(f"line {line}: key {_cut(key)} is given twice")
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping

    def construct_core_map(self, node: yaml.MappingNode) -> dict:
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"line {node.start_mark.line + 1}: wants a mapping")
        return self.construct_mapping(node, deep=True)


def _integer(text: str) -> int:
    """Raises: ConfigError for more digits than any setting could need."""
    if len(text) > _MOST_DIGITS:
        raise ConfigError(
            f"got {_cut(text)}, an integer of {len(text)} characters, should be at "
            f"most {_MOST_DIGITS}"
        )
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_MOST_DIGITS = 40
_CONVERT = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _integer,
    "float": _float,
}


def _core_scalar(name: str, pattern: re.Pattern[str]) -> Callable[..., Any]:
    """The constructor of one scalar type; a tag (``!!int x``) may ask for it too."""

    def construct(loader: _CoreLoader, node: yaml.ScalarNode) -> Any:
        text = loader.construct_scalar(node)
        where = f"line {node.start_mark.line + 1}"
        if not pattern.fullmatch(text):
            raise ConfigError(f"{where}: got {_cut(text)}, which is no {name}")
        try:
            return _CONVERT[name](text)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    return construct


# Only the types of the core schema; any other tag is refused by name.
_CoreLoader.yaml_constructors = {
    f"tag:yaml.org,2002:{name}": yaml.SafeLoader.yaml_constructors[
        f"tag:yaml.org,2002:{name}"
    ]
    for name in ("str", "seq")
} | {None: yaml.SafeLoader.yaml_constructors[None]}
for _name, _pattern in _SCALARS:
    _tag = f"tag:yaml.org,2002:{_name}"
    _CoreLoader.add_constructor(_tag, _core_scalar(_name, _pattern))
_CoreLoader.add_constructor("tag:yaml.org,2002:map", _CoreLoader.construct_core_map)


class _CoreDumper(yaml.SafeDumper):
    """Quotes exactly the strings that the core schema would read as something else."""

    yaml_implicit_resolvers = _CORE_RESOLVERS


MOST_CHARACTERS, MOST_NODES = 2**16, 1000  # all settings together are 80


def parse_yaml(text: str) -> Any:
    """Read one YAML document with YAML 1.2 core scalars, and without aliases.

    Raises: ConfigError with the line of a syntax error or of a key given twice, or for
    what is too large to be a configuration.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"more than {MOST_CHARACTERS:,} characters, too many for a configuration"
        )
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"not YAML text: {reason}") from None
    except RecursionError:
        raise ConfigError(_TOO_DEEP) from None


_TOO_DEEP = "nested too deeply to be a configuration"


def dump_config(config: RunConfig | dict[str, dict]) -> str:
    """The resolved configuration as YAML that ``load_config`` reads back equal.

    Args: config: also as the sections that a checkpoint has stored.
    """
    raw = config if isinstance(config, dict) else config.model_dump(mode="json")
    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in raw.items()
    }
    return yaml.dump(given, Dumper=_CoreDumper, sort_keys=False)


# --------------------------------------------------------------------------------------
# Finding, reading and checking


def shipped_configs() -> dict[str, Path]:
    """The configurations inside the package, by name."""
    folder = Path(str(resources.files("mamba3lite") / "configs"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_config(name: str) -> Path:
    """A shipped configuration by name, or a file by path.

    Raises: ConfigError listing the shipped names when there is neither.
    """
    shipped = shipped_configs()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    try:
        if path.is_file():
            return path
        if path.exists():
            raise ConfigError(f"--config {name}: not a file")
    except OSError as error:
        raise ConfigError(f"--config {_cut(name)}: {error.strerror}") from None
    near = nearest(name, shipped)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(
        f"--config {name}: no such file, nor a shipped configuration{hint} "
        f"(shipped: {', '.join(shipped)})"
    )


def load_config(name: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a configuration, apply ``section.key=value`` overrides, check everything.

    Args: name: shipped name or path of a YAML file. overrides: as given to ``--set``.
    Returns: the checked configuration; ``training.save_dir`` is filled in with
    ``runs/NAME`` when the file leaves it out.
    Raises: ConfigError, one line, naming the file or ``--set``.
    """
    path = find_config(name)
    label = path.stem if name in shipped_configs() else name
    raw = _read_mapping(path, label)
    overridden: list[str] = []
    for override in overrides:
        overridden.append(_apply_override(raw, override, overridden))
    _expand_home(raw)
    config = check_config(raw, label, overridden)
    if config.training.save_dir is not None:
        return config
    training = config.training.model_copy(update={"save_dir": f"runs/{path.stem}"})
    return config.model_copy(update={"training": training})


def _expand_home(raw: dict) -> None:
    """Write the user's folder for ~, which no shell does behind a =."""
    for section, key in (path.split(".") for path in PATHS):
        values = raw.get(section)
        given = values.get(key) if isinstance(values, dict) else None
        if isinstance(given, str) and given.startswith("~"):
            values[key] = os.path.expanduser(given)


def check_config(raw: dict, label: str, overridden: Iterable[str] = ()) -> RunConfig:
    """Validate a mapping of sections; ``overridden`` paths are blamed on ``--set``."""
    try:
        text = json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{label}: not YAML text: a lone surrogate") from None
    except RecursionError:
        raise ConfigError(f"{label}: {_TOO_DEEP}") from None
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        first, others = error.errors()[0], error.error_count() - 1
        line, where = _explain(first), ".".join(map(str, first["loc"]))
    except TypeError as error:  # raised by ModelConfig itself
        line, others, where = f"model.{error}", 0, "model"
    blamed = any(
        path == where
        or re.match(rf"{re.escape(path)}\b", line)
        or line.startswith(f"{path.partition('.')[0]}: ")
        for path in overridden
    )
    more = f" (and {others:,} more)" if others else ""
    raise ConfigError(f"{'--set' if blamed else label}: {line}{more}")


def _read_mapping(path: Path, label: str) -> dict:
    try:
        with path.open(encoding="utf-8") as file:
            raw = parse_yaml(file.read(MOST_CHARACTERS + 1))
    except UnicodeDecodeError:
        raise ConfigError(f"{label}: not YAML text: not UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{label}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    if not isinstance(raw, dict):
        got = "nothing" if raw is None else type(raw).__name__
        raise ConfigError(
            f"{label}: got {got}, should be a mapping with the sections "
            f"{', '.join(SECTIONS)}"
        )
    return raw


def _apply_override(raw: dict, override: str, earlier: list[str]) -> str:
    """Write one ``section.key=value`` into the mapping; returns its dotted path."""
    try:
        override.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--set: got {_cut(override)}, which is not UTF-8") from None
    dotted, equals, text = override.partition("=")
    section, dot, key = dotted.partition(".")
    if section in SECTIONS and not key:
        settings = ", ".join(SECTIONS[section])
        raise ConfigError(
            f"--set: got {_cut(override)}, but {section} is a section; name one of its "
            f"settings, {section}.KEY=value (settings: {settings})"
        )
    if equals and not text:
        raise ConfigError(
            f"--set: got {_cut(override)}, with nothing behind the =; null unsets a "
            "setting"
        )
    if not (equals and dot and section and key):
        near = _suggestion("", dotted)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(
            f"--set: got {_cut(override)}, should be section.key=value, such as "
            f"training.lr=1e-3{hint}"
        )
    if section not in SECTIONS:
        raise ConfigError(f"--set: {_unknown_key(section)}")
    values = raw.setdefault(section, {})
    if not isinstance(values, dict):
        raise ConfigError(f"--set: {dotted}: the file's {section} is not a mapping")
    for other in EXCLUSIVE.get(dotted, ()):
        if other not in earlier:
            values.pop(other.removeprefix(f"{section}."), None)
    try:
        values[key] = _integer(text) if _INT.fullmatch(text) else _scalar(text)
    except ConfigError as error:
        raise ConfigError(f"--set: {_cut(dotted, quote=False)}: {error}") from None
    return dotted


def _scalar(text: str) -> Any:
    """One override value, by the same rules as a scalar in a file.

    But for what only a file needs: a word without quotes is taken as it was typed, with
    its line ends, spaces and signs of a comment.
    """
    try:
        value = parse_yaml(text)
    except ConfigError:
        return text
    if value is None and text not in ("null", "Null", "NULL", "~"):
        return text  # nothing but the sign of a comment and what follows
    quoted = text[:1] in ("'", '"', "!")
    return text if isinstance(value, dict | list | str) and not quoted else value


def _explain(error: dict) -> str:
    """One pydantic error as 'path: what was got, what is allowed'."""
    path = ".".join(str(part) for part in error["loc"])
    kind, message = error["type"], error["msg"]
    if kind == "json_invalid":  # the validator's limit on nesting
        return _TOO_DEEP
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown_key(*(str(part) for part in error["loc"]))
    if kind == "value_error":
        message = re.sub(r"'([^']{60})[^']+'", r"'\1...'", str(error["ctx"]["error"]))
        inside_model = path == "model" and not message.startswith("model")
        return f"model.{message}" if inside_model else message
    message = message.replace("Input should be", "should be")
    message = _PLAIN.get(kind, message)
    got = json.dumps(error["input"])
    got = got if len(got) <= 60 else f"{got[:60]}..."
    return f"{path}: got {got}, {message}"


# Where the validator speaks of types and the reader of a file does not.
_PLAIN = {
    "bool_type": "should be true or false",
    "model_type": "should be a mapping",
    "dataclass_type": "should be a mapping",
    "string_too_short": "should not be empty",
}


def _cut(value: Any, quote: bool = True) -> str:
    """A value for a message: quoted, and cut after about 60 characters."""
    text = repr(value) if quote else str(value)
    return text if len(text) <= 64 else f"{text[:60]}...{text[-1] if quote else ''}"


def _unknown_key(section: str, key: str = "") -> str:
    if not key:
        near = _suggestion("", section)
        hint = f"; did you mean {near}?" if near else ""
        section = _cut(section, quote=False)
        return f"{section} is not a section{hint} (sections: {', '.join(SECTIONS)})"
    near = _suggestion(section, key)
    hint = f"; did you mean {near}?" if near else ""
    settings = ", ".join(SECTIONS[section])
    key = _cut(key, quote=False)
    return f"{section}.{key} is not a setting{hint} (settings: {settings})"


def _suggestion(section: str, key: str) -> str | None:
    """The setting that was probably meant: other names first, then nearest key."""
    alias = nearest(key, ALIASES)
    if alias:
        return ALIASES[alias]
    own_first = sorted(SECTIONS, key=lambda name: name != section)
    for name in own_first:
        if key in SECTIONS[name]:
            return f"{name}.{key}"
    if not section and (near := nearest(key, SECTIONS)):
        return near
    for name in own_first:
        if near := nearest(key, SECTIONS[name]):
            return f"{name}.{near}"
    return None


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The closest of some words, if at most a third of its letters need changing."""
    word = word.lower()
    changes = {
        other: edit_distance(word, other)
        for other in words
        if abs(len(word) - len(other)) <= _most_changes(other)  # or it is farther
    }
    close = [other for other, n in changes.items() if n <= _most_changes(other)]
    return min(close, key=changes.__getitem__, default=None)


def _most_changes(word: str) -> int:
    return max(1, len(word) // 3)


def edit_distance(a: str, b: str) -> int:
    """Letters to insert, delete, change or swap to turn one word into the other."""
    above, row = [], list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        two_above, above, row = above, row, [i]
        for j, y in enumerate(b, 1):
            change = above[j - 1] + (x != y)
            row.append(min(above[j] + 1, row[j - 1] + 1, change))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                row[j] = min(row[j], two_above[j - 2] + 1)
    return row[-1]
