"""Faults 15, 19 and 20: bad configurations, loggers, memory, compiler, kernels."""

import io
import os
import resource
import shlex
import shutil
import subprocess
import sys
import types

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
    saved_bytes,
    saved_steps,
)
from trainer_cases import (
    StopsAfter,
    assert_same_bits,
    new_run,
    prepare_corpus,
    run_config,
    tensors_of,
    write_config,
    write_corpus,
)

import mamba3lite.models
from mamba3lite.training import pretrain
from mamba3lite.training.metrics import Display, read_metrics
from mamba3lite.training.pretrain import Pretrainer, run_training
from mamba3lite.training.side_files import MetricsLog
from mamba3lite.training.trackers import Trackers

pytestmark = [on_cpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def uninterrupted(prepared, tmp_path_factory):
    return finished(prepared, tmp_path_factory.mktemp("whole"), eval_interval=4)


@pytest.fixture(scope="module")
def stopped(prepared, tmp_path_factory):
    """A run folder with checkpoints of steps 3 and 5."""
    folder = tmp_path_factory.mktemp("stopped")
    part = new_run(run_config(prepared, folder), StopsAfter)
    assert part.run() is False
    return folder


# --------------------------------------------------------------------------------------
# 15: bad configurations

GOOD = "model: {vocab_size: 257}\ntraining: {total_steps: 9}\n"
BAD = {
    "unknown section": (GOOD + "trainin: {}", "trainin is not a section; did you "),
    "unknown in model": ("model: {d_modl: 1}", "model.d_modl is not a setting; did "),
    "unknown in training": ("training: {learning_rate: 1}", "training.learning_rate "
                            "is not a setting; did you mean training.lr? (settings: "),
    "unknown in data": ("data: {sorce: x}", "data.sorce is not a setting; did you "),
    "wrong type": ("training: {lr: fast, total_steps: 1}", 'training.lr: got "fast", '),
    "negative lr": ("training: {lr: -1, total_steps: 1}", "training.lr: got -1, "),
    "long warm-up": ("training: {warmup_steps: 9, total_steps: 5}",
                     "training.warmup_steps: got 9, should be at most the 5 steps"),
    "NaN": ("training: {lr: .nan, total_steps: 1}", "training.lr: got NaN, should "),
    "bool for int": ("training: {total_steps: true}", "training.total_steps: got true"),
    "int for bool": ("training: {total_steps: 1, compile: 1}", "training.compile: got"),
    "duplicate key": ("training: {lr: 1, lr: 2}", "line 1: key 'lr' is given twice"),
    "empty": ("", "got nothing, should be a mapping with the sections model, "),
    "binary": (b"\xff\xfe\x00\x01", "not YAML text: not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
@pytest.mark.parametrize("fault", BAD)
def test_fault_15_a_bad_configuration_is_one_line(
    tmp_path, monkeypatch, capsys, fault, how
):
    monkeypatch.chdir(tmp_path)
    text, told = BAD[fault]
    (tmp_path / "a.yaml").write_bytes(text if fault == "binary" else text.encode())
    before = contents(tmp_path)
    assert run_training("a.yaml", dry_run=bool(how)) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"mamba3lite train: a.yaml: {told}"), err
    assert err.count("\n") == 1
    assert contents(tmp_path) == before and not list(tmp_path.glob("*/"))


def test_fault_15_a_bad_override_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(GOOD)
    assert run_training("a.yaml", ["training.batch_size=4"]) == 2
    assert capsys.readouterr().err.startswith(
        "mamba3lite train: --set: training.batch_size is not a setting; did you mean "
        "training.micro_batch_size? (settings: "
    )
    assert run_training("a.yaml", ["training.total_steps=true"]) == 2
    assert "--set: training.total_steps: got true, should be a valid integer" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("dry_run", [False, True])
def test_fault_15_tokens_that_the_model_lacks_are_never_made(
    tmp_path, monkeypatch, capsys, dry_run
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(GOOD)
    overrides = ["data.source=stdlib", "data.tokenizer=gpt2"]
    assert run_training("a.yaml", overrides, dry_run=dry_run) == 2
    assert capsys.readouterr().err == (
        "mamba3lite train: model.vocab_size: got 257, should be 50257, the vocabulary "
        "of data.tokenizer=gpt2\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["a.yaml"]


# --------------------------------------------------------------------------------------
# 19: loggers


def test_fault_19_lines_that_nobody_takes(prepared, tmp_path, uninterrupted):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")

    def into_a_full_device() -> int:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        return command(config)()

    ended = in_child(into_a_full_device)
    assert ended.code == 0, ended
    assert ended.err == (
        "[warn] stdout cannot be written (No space left on device); the run goes on "
        "without lines\n"
    )
    assert losses(tmp_path / "run") == losses(uninterrupted.run_dir)


def nobody_reads() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("how", ["unread", "closed"])
@pytest.mark.parametrize("streams", [(1,), (2,), (1, 2)])
def test_fault_19_nobody_listens(prepared, tmp_path, uninterrupted, streams, how):
    """A signal must find its note unread too; what was asked for is done."""
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")

    class Warns(Pretrainer):
        def next_step(self):
            print("a library warns", file=sys.stderr, flush=True)
            return super().next_step()

    kept = []

    def unheard() -> int:
        kept.extend([sys.stdout, sys.stderr])  # whose end would close the descriptors
        for number in streams:
            if how == "unread":
                os.dup2(nobody_reads(), number)
            else:
                os.close(number)
            stream = os.fdopen(number, "w", 1) if how == "unread" else None
            setattr(sys, {1: "stdout", 2: "stderr"}[number], stream)
        pretrain.Pretrainer = Warns
        return command(config)()

    ended = in_child(unheard)
    assert ended.code == 0, ended
    if streams == (1,) and how == "unread":
        assert ended.err.splitlines()[0] == (
            "[warn] stdout cannot be written (Broken pipe); the run goes on without "
            "lines"
        )
    assert ended.err.count("[warn]") <= 1
    assert losses(tmp_path / "run") == losses(uninterrupted.run_dir)
    assert saved_steps(tmp_path / "run")[-1] == 8


def test_fault_19_a_reader_that_leaves_after_a_line(prepared, tmp_path):
    """The whole process, which prepares its data: what is left in its buffers must not
    spoil the exit code."""
    write_corpus(tmp_path / "text")
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    script = f"{shlex.quote(sys.executable)} -m mamba3lite.training.pretrain"
    source = "--set data.source=text --set data.val_fraction=0.2"
    line = f"{script} --config {config.name} {source} 2>&1 | head -1"
    shell = ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"]
    options = {"capture_output": True, "text": True, "cwd": tmp_path}
    ended = subprocess.run(shell, check=False, **options)
    assert (ended.returncode, ended.stdout.count("\n"), ended.stderr) == (0, 1, "")
    assert saved_steps(tmp_path / "run")[-1] == 8


class Screen(io.StringIO):
    """A stream that says it is a terminal, or not."""

    def __init__(self, terminal: bool):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize(
    ("terminal", "environment"),
    [(True, {"TERM": "dumb"}), (True, {"TERM": "unknown"}),
     (False, {"TERM": "xterm", "FORCE_COLOR": "1"}), (False, {"TERM": "xterm"})],
)  # fmt: skip
def test_fault_19_lines_where_a_bar_cannot_be_redrawn(
    monkeypatch, terminal, environment
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Screen(terminal))
    row = {"step": 3, "loss": 1.0, "lr": 0.1, "grad_norm": 2.0, "tokens_per_s": 7.0}
    with Display(9) as display:
        display.line("begun")
        display.step(row | {"mfu": None}, 60)
    told = "step      3/9  loss 1.0000  lr 1.00e-01  grad norm 2.00  7 tokens/s  ETA "
    assert sys.stdout.getvalue() == f"begun\n{told}0:01:00\n"


@pytest.mark.parametrize("kind", ["dumb", "xterm"])
def test_fault_19_names_do_not_steer_a_terminal(monkeypatch, kind):
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setattr(sys, "stdout", Screen(True))
    Display(9).line("saved a\x1b]0;x\x07 [red]b :bug:\x9b")
    assert r"saved a\x1b]0;x\x07 [red]b :bug:\x9b" in sys.stdout.getvalue()


def test_fault_19_a_sample_that_the_terminal_cannot_show(prepared, tmp_path):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    shown = tmp_path / "shown"

    def in_ascii() -> int:
        sys.stdout = io.TextIOWrapper(shown.open("wb"), "ascii")
        Pretrainer.sample = lambda self, n: "caf\u00e9"
        return command(config)()

    ended = in_child(in_ascii)
    assert ended.code == 0 and ended.err == "", ended
    assert "caf\\xe9" in shown.read_text("ascii")


def test_fault_19_an_earlier_record_is_set_aside(stopped, prepared, tmp_path):
    """Without its checkpoints a run starts again; what it reported is kept."""
    folder = copy_of(stopped, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    (folder / "samples.txt").write_text("of another run")
    names = ("metrics.jsonl", "samples.txt")
    before = {name: (folder / name).read_bytes() for name in names}
    config = write_config(tmp_path / "a.yaml", prepared, folder)
    ended = in_child(command(config))
    assert ended.code == 0 and ended.err == "", ended
    for name in names:
        aside = f"earlier-1-{name}"
        assert (folder / aside).read_bytes() == before[name]
        line = f"[warn] {name}: of an earlier run; it is set aside as {aside}"
        assert line in ended.out.splitlines()


ON = {"tensorboard": "training.tensorboard=true", "wandb": "training.wandb=true"}


@pytest.mark.parametrize("package", ON)
def test_fault_19_a_missing_package_is_one_warning(prepared, tmp_path, package):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")

    def without() -> int:
        sys.modules[package] = None  # as if it were not installed
        return command(config, ON[package])()

    ended = in_child(without)
    assert ended.code == 0 and ended.err == "", ended
    (warning,) = [x for x in ended.out.splitlines() if x.startswith("[warn]")]
    assert warning.startswith(
        f"[warn] training.{package}: the package {package} is not installed (pip "
        f"install {package}); the run goes on without it"
    )
    assert set(losses(tmp_path / "run")) == set(range(1, 9))


def test_fault_19_a_tracker_that_breaks_is_one_warning(prepared, tmp_path, capsys):
    config = run_config(prepared, tmp_path, tensorboard=True)
    trackers = Trackers(config, tmp_path, 0, print)

    def broken(row):
        raise ConnectionError("no route\nto the host")

    trackers.working["tensorboard"].append = broken
    for step in (1, 2):
        trackers.append({"step": step, "loss": 1.0})
    trackers.close()
    assert capsys.readouterr().out == (
        "[warn] training.tensorboard: no route; the run goes on without it, "
        "metrics.jsonl has everything\n"
    )


def test_fault_19_tensorboard_has_each_step_once_after_a_resume(prepared, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"tensorboard": True, "eval_interval": 4}
    part = new_run(run_config(prepared, tmp_path, **settings), StopsAfter)
    part.at_step = 5
    part.run()
    finished(prepared, tmp_path, **settings)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    seen = {event.step: event.value for event in events.Scalars("loss")}
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
    assert seen == pytest.approx(losses(tmp_path), rel=1e-6)
    assert [event.step for event in events.Scalars("val_bpb")] == [4, 8]


def test_fault_19_wandb_gets_every_line(prepared, tmp_path, monkeypatch):
    sent, opened = [], []

    class Run:
        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def log(self, row):
            sent.append(row)

        def finish(self):
            sent.append("finished")

    def init(**options):
        opened.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    settings = {"wandb": True, "wandb_project": "mine"}
    part = new_run(run_config(prepared, tmp_path, **settings), StopsAfter)
    part.run()
    finished(prepared, tmp_path, **settings)
    assert [options["project"] for options in opened] == ["mine", "mine"]
    assert opened[0]["id"] == opened[1]["id"] and opened[1]["resume"] == "allow"
    assert sent.count("finished") == 2
    steps = [row["step"] for row in sent if "loss" in row]
    assert steps == list(range(1, 9))


def test_fault_19_a_torn_last_line_and_no_step_twice(prepared, tmp_path, uninterrupted):
    settings = {"eval_interval": 4}

    class Dies(Pretrainer):
        def next_step(self):
            if self.step == 5:
                raise ZeroDivisionError("like a kill: no last save")
            return super().next_step()

    with pytest.raises(ZeroDivisionError):
        new_run(run_config(prepared, tmp_path, **settings), Dies).run()
    metrics = tmp_path / "metrics.jsonl"
    assert read_metrics(metrics)[-1]["step"] == 5
    with metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    last = finished(prepared, tmp_path, **settings)
    assert losses(tmp_path) == losses(uninterrupted.run_dir)
    evaluated = [row["step"] for row in read_metrics(metrics) if "val_bpb" in row]
    assert evaluated == [4, 8]
    assert_same_bits(tensors_of(last), tensors_of(uninterrupted))


def test_fault_19_bad_steps_are_cut_by_their_count_too(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", print)
    rows = [{"step": 3, "loss": 1.0}]
    rows += [{"step": 3, "skipped": n, "problem": "x"} for n in (1, 2, 3)]
    rows += [{"step": 4, "loss": 1.0}]
    for row in rows:
        log.append(row)
    log.keep_until(3, 2)
    assert read_metrics(log.path) == rows[:3]


def test_fault_19_a_picture_that_cannot_be_drawn_is_a_warning(
    prepared, tmp_path, capsys
):
    (tmp_path / "curves.png").mkdir()
    finished(prepared, tmp_path, eval_interval=4)
    warnings = [x for x in capsys.readouterr().out.splitlines() if "curves" in x]
    told = (
        f"[warn] curves.png was not refreshed: {tmp_path / 'curves.png'}: is a folder"
    )
    assert len(warnings) == 2 and all(x.startswith(told) for x in warnings)


# --------------------------------------------------------------------------------------
# 20: memory, the compiler, the kernels


def starved_of_memory(action, extra: int = 300 * 2**20):
    """The action in an address space that hardly grows."""

    def starved() -> int:
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        most = pages * resource.getpagesize() + extra
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return action()

    return starved


@pytest.mark.parametrize("resumed", [False, True])
def test_fault_20_out_of_memory(stopped, prepared, tmp_path, resumed):
    folder = copy_of(stopped, tmp_path / "run") if resumed else tmp_path / "run"
    large = {"micro_batch_size": 20_000}
    config = write_config(tmp_path / "a.yaml", prepared, folder, **large)
    before = saved_bytes(folder)
    ended = in_child(starved_of_memory(command(config)))
    line = one_line(ended, 1)
    assert line.startswith("out of memory: "), line
    for wanted in ("training.micro_batch_size", "training.grad_checkpoint=true"):
        assert wanted in line
    assert "memory of a step in bytes on a CPU (derived from shapes)" in ended.out
    peak = next(x for x in ended.out.splitlines() if x.startswith("  peak "))
    assert int(peak.split()[-1].replace(",", "")) > 300 * 2**20
    assert saved_bytes(folder).items() >= before.items()
    assert saved_steps(folder) == ([3, 5] if resumed else [0])


def test_fault_20_torch_compile_fails(stopped, prepared, tmp_path):
    folder = copy_of(stopped, tmp_path / "run")
    config = write_config(tmp_path / "a.yaml", prepared, folder)
    before = saved_bytes(folder)

    def without_compiler() -> int:
        os.environ["PATH"] = str(tmp_path)  # where no compiler is
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
        return command(config, "training.compile=true")()

    line = one_line(in_child(without_compiler), 1)
    assert line.startswith("training.compile: torch.compile failed: "), line
    assert "set training.compile=false" in line
    assert saved_bytes(folder) == before
    assert in_child(command(config)).code == 0


@pytest.mark.parametrize("dispatch", ["triton", "fused"])
def test_fault_20_triton_is_missing(
    stopped, prepared, tmp_path, uninterrupted, dispatch
):
    folder = copy_of(stopped, tmp_path / "run")
    config = write_config(tmp_path / "a.yaml", prepared, folder)
    before = saved_bytes(folder)

    def without_triton() -> int:
        for name in [n for n in sys.modules if n.startswith("mamba3lite.models.ssd_")]:
            if name != "mamba3lite.models.ssd_complex":
                del sys.modules[name]  # and what the package remembers of it
                vars(mamba3lite.models).pop(name.rpartition(".")[2], None)
        sys.modules["triton"] = None
        os.environ["ENABLE_TRITON_KERNELS"] = "1"
        return command(config, f"model.ssd_dispatch={dispatch}")()

    ended = in_child(without_triton)
    assert ended.code == 0 and ended.err == "", ended
    (warning,) = [x for x in ended.out.splitlines() if x.startswith("[warn]")]
    assert warning.startswith(f"[warn] ssd_dispatch={dispatch!r} cannot run here (")
    assert "triton" in warning and warning.endswith("uses ssd_dispatch='pytorch'")
    kept = {p: data for p, data in before.items() if p.parent.is_dir()}
    assert {p: p.read_bytes() for p in kept} == kept
    assert losses(folder) == losses(uninterrupted.run_dir)


def test_fault_20_the_kernels_are_off_without_the_variable(prepared, tmp_path):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")

    def unset() -> int:
        os.environ.pop("ENABLE_TRITON_KERNELS", None)
        return command(config, "model.ssd_dispatch=fused", dry_run=True)()

    ended = in_child(unset)
    assert ended.code == 0, ended
    assert (
        "[warn] ssd_dispatch='fused' requires ENABLE_TRITON_KERNELS=1; forcing "
        "ssd_dispatch='pytorch' for this run.\n"
    ) in ended.out
    assert not (tmp_path / "run").exists()
