"""Configuration: what is read, and the one line that each mistake prints."""

import math
import re
import time

import pytest
from trainer_cases import tiny_model

from mamba3lite.training.config import (
    ConfigError,
    check_config,
    dump_config,
    edit_distance,
    load_config,
    nearest,
    parameter_count,
    parse_yaml,
    shipped_configs,
)

BASE = """\
model: {vocab_size: 257, d_model: 16, n_layers: 1, max_seq_len: 32}
training: {micro_batch_size: 4, total_steps: 10}
data: {source: stdlib}
"""


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(BASE)
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("true", True),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2026-01-31", "2026-01-31"),
        ("~", None),
        ("'1'", "1"),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    got = parse_yaml(text)
    assert got == value and type(got) is type(value)


# One row a mistake: the file, and how the line goes on after the file's name.
MISTAKES = [
    ("training: {learnin_rate: 1}", "training.learnin_rate is not a setting; did "
     "you mean training.lr? (settings: micro_batch_size, "),
    ("training: {batch_size: 1}", "training.batch_size is not a setting; did you "
     "mean training.micro_batch_size? (settings: "),
    ("training: {max_steps: 1}", "training.max_steps is not a setting; did you "
     "mean training.total_steps? (settings: "),
    ("training: {warmup_step: 1}", "training.warmup_step is not a setting; did you "
     "mean training.warmup_steps? (settings: "),
    ("training: {zzzzzzzz: 1}", "training.zzzzzzzz is not a setting (settings: "),
    ("model: {d_modl: 1}", "model.d_modl is not a setting; did you mean "
     "model.d_model? (settings: vocab_size, "),
    ("model: {lr: 1}", "model.lr is not a setting; did you mean training.lr? "),
    ("data: {sorce: x}", "data.sorce is not a setting; did you mean data.source? "
     "(settings: train_data_path, source, tokenizer, val_fraction)"),
    ("trainin: {}", "trainin is not a section; did you mean training? (sections: "
     "model, training, data)"),
    ("learning_rate: 1", "learning_rate is not a section; did you mean "
     "training.lr? (sections: "),
    ("training: {lr: fast, total_steps: 1}", 'training.lr: got "fast", should be a '
     "valid number"),
    ("training: {lr: -1, total_steps: 1}", "training.lr: got -1, should be greater "
     "than 0"),
    ("training: {lr: .nan, total_steps: 1}", "training.lr: got NaN, should be a "
     "finite number"),
    ("training: {lr: .inf, total_steps: 1}", "training.lr: got Infinity, should be "
     "a finite number"),
    ("training: {total_steps: true}", "training.total_steps: got true, should be a "
     "valid integer"),
    ("training: {total_steps: 16.0}", "training.total_steps: got 16.0, should be a "
     "valid integer"),
    ("training: {total_steps: 1, compile: yes}", 'training.compile: got "yes", '
     "should be true or false"),
    ("model: {weight_tying: 1}", "model.weight_tying: got 1, should be true or false"),
    ("training: {total_steps: 1, keep_last: 1}", "training.keep_last: got 1, "
     "should be greater than or equal to 2"),
    ("training: {total_steps: 1, schedule: wds}", 'training.schedule: got "wds", '
     "should be 'cosine' or 'wsd'"),
    ("training: {total_steps: 9, schedule: wsd, warmup_steps: 8}",
     "training.decay_fraction: 8 steps of warm-up and 2 of decay, should be at most "
     "the 9 steps of the run"),
    ("training: {total_steps: 9, decay_fraction: 0}", "training.decay_fraction: got "
     "0, should be greater than 0"),
    ("training: {lr_scheduler: wsd}", "training.lr_scheduler is not a setting; did "
     "you mean training.schedule? (settings: "),
    ("training: {total_steps: 9, save_interval: 4, keep_every: 6}",
     "training.keep_every: got 6, should be a multiple of training.save_interval, 4"),
    ("training: {total_steps: 9, memory_snapshot: true}", "training.memory_snapshot: "
     "got true, should come with training.profile_start, the step at which it begins"),
    ("training: {total_steps: 9, profile_start: 10}", "training.profile_start: got "
     "10, should be at most the 9 steps of the run"),
    ("training: {total_steps: 9, max_rollbacks: -1}", "training.max_rollbacks: got "
     "-1, should be greater than or equal to 0"),
    ("training: {total_steps: 9, spike_zscore: 0}", "training.spike_zscore: got 0, "
     "should be greater than 0"),
    ("training: {total_steps: 1, precision: fp16}", 'training.precision: got '
     "\"fp16\", should be 'auto', 'fp32' or 'bf16'"),
    ("training: {lr: 1}", "training.total_steps: give exactly one of "
     "training.total_steps and training.total_tokens"),
    ("training: {total_steps: 1, total_tokens: 1}", "training.total_steps: give "
     "exactly one of training.total_steps and training.total_tokens"),
    ("training: {total_steps: 5, warmup_steps: 6}", "training.warmup_steps: got 6, "
     "should be at most the 5 steps of the run, such as training.warmup_steps=0"),
    ("data: {source: x, train_data_path: y}", "data.source: data.train_data_path "
     "names a folder that is already prepared; give one of the two"),
    ("training: [1]", "training: got [1], should be a mapping"),
    ("training:", "training: got null, should be a mapping"),
    ("model:", "model: got null, should be a mapping"),
    ("data: {source: ''}", 'data.source: got "", should not be empty'),
    ("training: {save_dir: ''}", 'training.save_dir: got "", should not be empty'),
    ('training: {total_steps: 1, save_dir: "a\\0b"}', "training.save_dir: should not "
     "hold a null byte"),
    ('training: {save_dir: "\\ud800"}', "not YAML text: a lone surrogate"),
    ("training: {total_steps: 0, lr: " + "1" * 5000 + "}", "line 1: got '"
     + "1" * 59 + "...', an integer of 5000 characters, should be at most 40"),
    ("training: {lr: 0x" + "f" * 5000 + "}", "line 1: got '0x" + "f" * 57
     + "...', an integer of 5002 characters, should be at most 40"),
    ("training: {total_steps: 1, seed: " + "1" * 30 + "}", "training.seed: got "),
    ("training: {total_steps: 9223372036854775808}", "training.total_steps: got "
     "9223372036854775808, should be less than 9223372036854775808"),
    ("training: {total_steps: !!int x}", "line 1: got 'x', which is no int"),
    ("training: {lr: !!float x}", "line 1: got 'x', which is no float"),
    ("training: {compile: !!bool x}", "line 1: got 'x', which is no bool"),
    ("training: !!timestamp x", "line 1, column 11: not YAML: "),
    ("training: {lr: " + "[" * 3000, "nested too deeply to be a configuration"),
    ("training: {lr: " + "[" * 205 + "]" * 205 + "}", "nested too deeply to be a "
     "configuration"),
    ("training: {lr: &a [*a]}", "line 1: an alias, *a; write out what it is"),
    ("training: {schedule: " + "x" * 500 + "}", 'training.schedule: got "' + "x" * 59
     + "..., should be 'cosine' or 'wsd'"),
    ("training: {" + "x" * 500 + ": 1}", "training." + "x" * 60 + "... is not a "),
    ("x" * 500 + ": 1", "x" * 60 + "... is not a section "),
    ("model: {a_init: " + "x" * 500 + "}\ntraining: {total_steps: 1}",
     "model.a_init is '" + "x" * 60 + "...'; wanted one of decay, spectrum"),
    ("model: {d_model: 0}\ntraining: {total_steps: 1}", "model.d_model is 0; "
     "wanted an integer, at least 1"),
    ("model: {d_model: true}", "model.d_model: got true, should be a valid integer"),
    ("model: {state_dim: 3}\ntraining: {total_steps: 1}", "model.state_dim is 3; "
     "it must be even"),
    ("model: {batch_invariant: true, ssd_dispatch: triton}\n"
     "training: {total_steps: 1}", "model.batch_invariant is True; "),
    ("training: {lr: 1, lr: 2}", "line 1: key 'lr' is given twice"),
    ("model: {}\ntraining: {}\nmodel: {}", "line 3: key 'model' is given twice"),
    ("1: {}", "line 1: key 1 should be a string"),
    ("", "got nothing, should be a mapping with the sections model, training, data"),
    ("just words", "got str, should be a mapping with the sections "),
    ("training: {lr: [}", "line 1, column 17: not YAML: "),
    ("training: {lr: fast, total_steps: x}", 'training.total_steps: got "x", '
     "should be a valid integer (and 1 more)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), MISTAKES)
def test_a_mistake_in_a_file_is_one_line(tmp_path, monkeypatch, text, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config("a.yaml")
    assert str(error.value).startswith(f"a.yaml: {line}")
    assert "\n" not in str(error.value)


TEN = ", ".join(["{}"] * 10)
BOMB = "a: &a [0]\n" + "".join(
    f"{name}: &{name} [{TEN.replace('{}', f'*{before}')}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
# Small to write and large to read, and how the line goes on after the file's name.
BOMBS = {
    "a billion nodes by aliases": (BOMB, "line 2: an alias, *a; write out what it is"),
    "an alias of a long name": (f"a: &{'x' * 99} 1\nb: *{'x' * 99}",
                                f"line 2: an alias, *{'x' * 59}...; write out what"),
    "30,000 unknown keys": ("training:\n" + "".join(f"  key_{i}: 1\n" for i in
                            range(30_000)), "more than 65,536 characters, too many "),
    "1,100 unknown keys": ("training:\n" + "".join(f"  key_{i}: 1\n" for i in
                           range(1100)), "line 500: more than 1,000 values, too many"),
    "400 unknown keys": ("training:\n" + "".join(f"  key_{i}: 1\n" for i in range(400)),
                         "training.key_0 is not a setting (settings: micro_batch_size"),
    "a key of 60,000 letters": (f"? {'x' * 60_000}\n: 1", f"{'x' * 60}... is not a "),
    "50 MB of comments": ("#\n" * 25_000_000, "more than 65,536 characters, too "),
    "60,000 sequences, nested": ("- " * 30_000, "nested too deeply to be a "),
}  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", BOMBS)
def test_a_file_is_bounded_before_anything_in_it_is_expanded(tmp_path, kind):
    text, line = BOMBS[kind]
    (tmp_path / "a.yaml").write_text(text)
    begin = time.process_time()
    with pytest.raises(ConfigError) as error:
        load_config(str(tmp_path / "a.yaml"))
    assert time.process_time() - begin < 1
    assert str(error.value).startswith(f"{tmp_path / 'a.yaml'}: {line}")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("override", [
    "x" * 100_000, f"training.{'x' * 100_000}=1", f"{'x' * 100_000}.lr=1",
    f"training.lr={'[' * 100_000}", f"training.lr={'- ' * 50_000}",
    f"training.lr={'a,' * 50_000}", "training.lr=&a [*a]",
])  # fmt: skip
def test_an_override_is_bounded_too(base, override):
    begin = time.process_time()
    with pytest.raises(ConfigError) as error:
        load_config(str(base), [override])
    assert time.process_time() - begin < 1
    assert str(error.value).startswith("--set: ") and len(str(error.value)) < 2000


TOGETHER = [
    "training: {lr: 1}",
    "training: {lr: 1, warmup_steps: 2000, profile_start: 3000}",
    "training: {total_steps: 1, total_tokens: 1}",
    "training: {total_tokens: 120000, warmup_steps: 200}",
    "training: {total_steps: 5, warmup_steps: 6}",
    "training: {total_steps: 5, warmup_steps: 6, schedule: wsd, decay_fraction: 1.0}",
    "training: {total_steps: 9, warmup_steps: 8, schedule: wsd}",
    "training: {total_steps: 9, save_interval: 4, keep_every: 6}",
    "training: {total_steps: 9, save_interval: 40, keep_every: 6}",
    "training: {total_steps: 9, memory_snapshot: true}",
    "training: {total_steps: 9, profile_start: 10}",
]


@pytest.mark.parametrize("text", TOGETHER)
def test_settings_that_do_not_go_together_name_a_value_that_works(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(str(path))
    (value,) = re.findall(r"such as (?:with )?(training\.\w+=\d+)$", str(error.value))
    load_config(str(path), [value])


def test_a_step_of_too_many_tokens_names_what_works(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("training: {total_steps: 9, micro_batch_size: 1000000000}")
    with pytest.raises(ConfigError) as error:
        load_config(str(path))
    values = re.findall(r"(\w+=1) ", str(error.value))
    assert values == ["micro_batch_size=1", "gradient_accumulation_steps=1"]
    load_config(str(path), [f"training.{value}" for value in values])


OVERRIDES = [
    ("training.learning_rate=1", "training.learning_rate is not a setting; did you "
     "mean training.lr? (settings: "),
    ("training.lr=fast", 'training.lr: got "fast", should be a valid number'),
    ("training.lr=", "got 'training.lr=', with nothing behind the =; null unsets a"),
    ("training.lr=null", "training.lr: got null, should be a valid number"),
    ("model.d_model=0", "model.d_model is 0; wanted an integer, at least 1"),
    ("training.warmup_steps=11", "training.warmup_steps: got 11, should be at most the "
     "10 steps of the run"),
    ("lr=1", "got 'lr=1', should be section.key=value, such as training.lr=1e-3; did "
     "you mean training.lr?"),
    ("training.lr", "got 'training.lr', should be section.key=value, such as "
     "training.lr=1e-3"),
    ("optim.lr=1", "optim is not a section (sections: model, training, data)"),
    ("model=3", "got 'model=3', but model is a section; name one of its settings, "
     "model.KEY=value (settings: vocab_size, d_model, "),
    ("training.=3", "got 'training.=3', but training is a section; name one of its "),
    ("data", "got 'data', but data is a section; name one of its settings, "),
    ("training.total_steps=" + "1" * 5000, "training.total_steps: got '" + "1" * 59
     + "...', an integer of 5000 characters, should be at most 40"),
    ("training.lr=0x" + "f" * 5000, "training.lr: got '0xffff"),
    ("training.lr=" + "[" * 3000, 'training.lr: got "' + "[" * 59 + "..., should be "),
    ("training.lr=!!int x", 'training.lr: got "!!int x", should be a valid number'),
    ("training.save_dir=a\0b", "training.save_dir: should not hold a null byte"),
    ("training.save_dir=\udcff", "got 'training.save_dir=\\udcff', which is not UTF-8"),
    ('data.source=""', 'data.source: got "", should not be empty'),
    ("training.compile=yes", 'training.compile: got "yes", should be true or false'),
    ("x" * 500, "got '" + "x" * 59 + "...', should be section.key=value, "),
    # By hand, times d_model: SwiGLU 3 x 2048, in_proj 16 x (64 + 4 x 64 + 1), out_proj
    # 1024, three norms, 257 bytes: 12564; and alone: the head mixer 1024^2, A 16.
    ("model.d_model=100000000", "model: 1,256,401,048,592 parameters (vocab_size 257, "
     "d_model 100000000, n_layers 1, n_heads 16, head_dim 64, state_dim 64, ffn_dim "
     "2048), should be at most 1,000,000,000,000"),
    ("model.d_model=99999999999999999999", "model: 1,256"),
    ("model.n_heads=4611686018427387904", "model: "),
    ("model.n_layers=1000000", "model: "),
    ("model.n_layers=1025", "model.n_layers: got 1025, should be at most 1024"),
    ("model.chunk_size=10000000", "model.chunk_size: got 10000000, should be at most "),
    ("training.micro_batch_size=1000000000", "training.micro_batch_size: a step of "
     "32,000,000,000 tokens "),
]  # fmt: skip


@pytest.mark.parametrize(("override", "line"), OVERRIDES)
def test_a_mistake_in_an_override_names_set(base, override, line):
    with pytest.raises(ConfigError) as error:
        load_config(str(base), [override])
    assert str(error.value).startswith(f"--set: {line}")


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_layers": 3}, {"weight_tying": False}, {"n_heads": 3, "head_dim": 6},
     {"state_dim": 10}, {"ffn_dim": 7}, {"vocab_size": 11, "d_model": 20}],
)  # fmt: skip
def test_parameters_are_counted_without_building(changes):
    model = tiny_model(**changes)
    assert parameter_count(model.cfg) == sum(p.numel() for p in model.parameters())


def test_the_large_model_has_its_stated_parameters():
    assert parameter_count(load_config("pretrain_434m").model) == 433_662_400


def test_a_path_that_the_disk_refuses_is_one_line():
    with pytest.raises(ConfigError) as error:
        load_config("x" * 5000)
    name = "x" * 59
    assert str(error.value) == f"--config '{name}...': File name too long"


def test_a_file_that_is_not_text_is_one_line(tmp_path):
    path = tmp_path / "b.yaml"
    path.write_bytes(b"\xff\xfe\x00training")
    with pytest.raises(ConfigError, match=r"b\.yaml: not YAML text"):
        load_config(str(path))
    path.write_bytes(b"training: \x00")
    with pytest.raises(ConfigError, match=r"b\.yaml: not YAML text"):
        load_config(str(path))


def test_an_unknown_name_lists_the_shipped_ones():
    with pytest.raises(ConfigError) as error:
        load_config("tinny")
    assert str(error.value) == (
        "--config tinny: no such file, nor a shipped configuration; did you mean tiny? "
        "(shipped: pretrain_434m, small_gpu, tiny)"
    )


def test_overrides_use_the_same_scalars(base):
    config = load_config(
        str(base), ["training.lr=3e-4", "training.save_dir=on", "model.d_model=0x20"]
    )
    assert config.training.lr == 3e-4
    assert config.training.save_dir == "on"
    assert config.model.d_model == 32


@pytest.mark.parametrize("name", ["a\nb", "x #y", " b ", "a  b", "50%", "x: y"])
def test_a_word_is_taken_as_it_was_typed(base, name):
    """A folder of that name is meant, not what a file would fold or cut it to."""
    config = load_config(base, [f"training.save_dir={name}"])
    assert config.training.save_dir == name
    quoted = load_config(base, ['training.save_dir="a b"']).training.save_dir
    assert quoted == "a b"


def test_a_sign_of_a_comment_is_a_name_like_another(base):
    assert load_config(base, ["training.save_dir=#mine"]).training.save_dir == "#mine"


def test_nothing_behind_the_equals_sign_is_refused(base):
    """`--set training.save_dir=$OUT` with OUT unset must not mean another run."""
    with pytest.raises(
        ConfigError, match=r"^--set: got 'training.save_dir=', with noth"
    ):
        load_config(base, ["training.save_dir="])


@pytest.mark.parametrize(
    "path", ["training.save_dir", "data.train_data_path", "data.source"]
)
def test_a_path_may_begin_with_the_home_folder(base, monkeypatch, path):
    """No shell expands ~ behind an equals sign."""
    monkeypatch.setenv("HOME", "/somewhere")
    config = load_config(base, [f"{path}=~/x"])
    section, key = path.split(".")
    assert getattr(getattr(config, section), key) == "/somewhere/x"


def test_letters_swapped_are_one_mistake():
    assert nearest("modle", ["model", "training", "data"]) == "model"
    assert edit_distance("modle", "model") == edit_distance("ab", "ba") == 1
    assert edit_distance("abc", "cab") == 2


def test_an_override_replaces_the_other_of_an_exclusive_pair(base):
    config = load_config(str(base), ["training.total_tokens=1000"])
    assert config.training.total_steps is None
    assert config.total_steps == 8  # ceil(1000 / (4 * 32))
    config = load_config(str(base), ["data.train_data_path=x"])
    assert config.data.source is None and config.data.train_data_path == "x"


def test_two_overrides_of_an_exclusive_pair_are_refused(base):
    both = ["training.total_tokens=1000", "training.total_steps=3"]
    with pytest.raises(ConfigError, match="give exactly one of"):
        load_config(str(base), both)


def test_save_dir_defaults_to_the_name_of_the_file(base):
    assert load_config(str(base)).training.save_dir == "runs/a"


def test_the_resolved_config_reads_back_equal(base, tmp_path):
    config = load_config(str(base), ["training.lr=1e-5", "training.save_dir=3e-4x"])
    odd = config.training.model_copy(update={"save_dir": "3e-4"})
    config = config.model_copy(update={"training": odd})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "config.yaml")) == config


@pytest.mark.parametrize("name", ["tiny", "small_gpu", "pretrain_434m"])
def test_shipped_configs_are_valid(name):
    assert name in shipped_configs()
    assert load_config(name).total_steps > 0


def test_the_large_config_has_its_stated_budget():
    config = load_config("pretrain_434m")
    assert config.tokens_per_step == 65_536
    assert config.total_steps == 122_071
    training = config.training
    assert (training.lr, training.min_lr_ratio, training.warmup_steps) == (
        3e-4,
        0.05,
        2000,
    )
    assert (training.beta1, training.beta2, training.weight_decay) == (0.9, 0.95, 0.1)


def test_tiny_stays_within_its_token_budget():
    config = load_config("tiny")
    assert config.total_steps * config.tokens_per_step <= 3_000_000
    assert config.model.ssd_dispatch == "pytorch"


def test_training_turns_checkpointing_on_in_a_copy_of_the_model_section():
    raw = {"training": {"total_steps": 1, "grad_checkpoint": True}}
    config = check_config(raw, "test")
    assert config.model_fields_of_run()["grad_checkpoint"] is True
    assert config.model.grad_checkpoint is False


def test_edit_distance_by_hand():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == 3
    assert edit_distance("lr", "lr") == 0
