"""The command line: every command, its output, and one line for each mistake."""

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_cases import prepare_corpus, write_config, write_corpus
from typer.testing import CliRunner

import mamba3lite
from mamba3lite.cli import app, lines_of
from mamba3lite.training.checkpoint import list_checkpoints
from mamba3lite.training.metrics import read_metrics
from mamba3lite.training.pretrain import Pretrainer, main

PNG = b"\x89PNG\r\n"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(Pretrainer, "final_sample_tokens", 12)


@pytest.fixture(scope="module")
def finished(prepared, tmp_path_factory):
    """A finished run: its configuration file, run folder and output."""
    base = tmp_path_factory.mktemp("finished")
    config = write_config(base / "a.yaml", prepared, base / "run", eval_interval=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pretrainer, "final_sample_tokens", 12)
        result = invoke("train", "--config", config)
    assert result.exit_code == 0, result.output
    return config, base / "run", result.stdout


def test_help_and_version_do_not_wait_for_torch():
    script = (
        "import sys, mamba3lite.cli; "
        "heavy = {'torch', 'matplotlib', 'numpy', 'pydantic'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert invoke("--version").stdout == f"mamba3lite {mamba3lite.__version__}\n"
    for command in ("train", "prepare", "info", "plot", "generate"):
        assert invoke(command, "--help").exit_code == 0


# A door, what is typed, the exit code, and how the line begins.
SLIPS = [
    ("cli train", "--config tinny", 2, "mamba3lite train: --config tinny: no such "),
    ("cli train", "--set training.learnin_rate=1", 2, "mamba3lite train: --set: "),
    ("cli train", "--set training.lr=fast", 2, "mamba3lite train: --set: training.lr"),
    ("cli train", "--set model.vocab_size=300", 2, "mamba3lite train: model.vocab_s"),
    ("cli train", "--set data.source=gone", 2, "mamba3lite train: source: got 'gone'"),
    ("cli train", "--resume sometimes", 2, "mamba3lite train: --resume sometimes: "),
    ("training.pretrain", "--config tinny", 2, "python -m mamba3lite.training.pretrain"
     ": --config tinny: no such "),
    ("training.pretrain", "--data-path gone", 2, "python -m mamba3lite.training."
     "pretrain: data.train_data_path: gone does not exist"),
    ("training.pretrain", "--resume later", 2, "python -m mamba3lite.training."
     "pretrain: --resume later: later is no checkpoint (auto, never, must, a step "),
    ("cli info", "--config tinny", 2, "mamba3lite info: --config tinny: no such "),
    ("cli info", "--set model.d_model=0", 2, "mamba3lite info: --set: model.d_model "),
    ("cli generate", "--checkpoint gone", 2, "mamba3lite generate: gone: no such fol"),
    ("cli generate", "--checkpoint . --temperature -1", 2, "mamba3lite generate: temp"),
    ("cli generate", "--checkpoint . --top-k x", 2, "python -m mamba3lite.cli generate"
     ": Invalid value for '--top-k': "),
    ("cli generate", "--checkpoint . --mode fast", 2, "mamba3lite generate: mode: got"),
    ("cli generate", "--checkpoint . --seed -1", 2, "mamba3lite generate: seed: got "),
    ("cli generate", "--checkpoint . --prompt-file gone", 2, "mamba3lite generate: go"),
    ("cli prepare", "--source gone --out x", 2, "mamba3lite prepare: source: got 'gon"),
    ("cli prepare", "--source stdlib --out x --tokenizer gpt3", 2, "mamba3lite prepar"),
    ("cli plot", "gone", 2, "mamba3lite plot: gone: there is no folder gone; name tha"),
    ("cli verify", "gone", 2, "mamba3lite verify: gone: no such folder"),
    ("cli verify", "--deep", 2, "python -m mamba3lite.cli verify: No such option: "),
    ("cli doctor", "--deep", 2, "python -m mamba3lite.cli doctor: No such option: "),
    ("cli bench", "--model tinny", 2, "mamba3lite bench: Invalid value: --config tin"),
    ("cli bench", "--part blok", 2, "mamba3lite bench: Invalid value: --part blok: "),
    ("bench", "--model tinny", 2, "python -m mamba3lite.bench: Invalid value: --conf"),
    ("cli trian", "", 2, "python -m mamba3lite.cli: No such command 'trian'."),
]  # fmt: skip


@pytest.mark.parametrize(("door", "typed", "code", "line"), SLIPS)
def test_a_slip_is_answered_before_torch_loads(tmp_path, door, typed, code, line):
    used = processor_time_of_children()
    done = subprocess.run(
        [sys.executable, "-m", *f"mamba3lite.{door} {typed}".split()],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    used = processor_time_of_children() - used
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1
    assert used < 1, f"{used:.2f} s of processor time"


def processor_time_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


# --------------------------------------------------------------------------------------
# train


def test_train_says_where_everything_is(finished):
    _, run, out = finished
    final = read_metrics(run / "metrics.jsonl")[-1]
    assert f"{final['val_bpb']:.4f} bits per byte over all of it" in out
    assert f"(zlib -9: {final['zlib_bpb']:.4f} on the same text)" in out
    assert "trained on   1,024 tokens" in out
    assert "peak memory  " in out
    assert (run / "curves.png").read_bytes().startswith(PNG)
    sample = (run / "samples.txt").read_text().split("empty prompt =====\n")[1]
    assert f"Sample of seed 0, from the empty prompt:\n{sample}" in out
    for name in ("curves.png", "samples.txt", "checkpoints"):
        assert str(run / name) in out
    assert "seed: 0" in (run / "config.yaml").read_text()
    names = [path.name for path in list_checkpoints(run / "checkpoints")]
    assert names == ["step_00000006", "step_00000008"]


def test_train_again_says_that_it_is_finished(finished):
    config, run, _ = finished
    result = invoke("train", "--config", config)
    assert result.exit_code == 0
    assert f"{run}: this run is already finished" in result.stdout
    assert f"checkpoints  {run / 'checkpoints'}" in result.stdout


def test_a_dry_run_takes_a_step_and_writes_nothing(prepared, tmp_path):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    result = invoke("train", "--config", config, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "one step: loss 5." in result.stdout
    assert "kept for the backward pass" in result.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_of_a_run_in_progress_leaves_it_alone(finished):
    config, run, _ = finished
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    assert invoke("train", "--config", config, "--dry-run").exit_code == 0
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_a_source_is_prepared_first_and_kept_on_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "texts")
    config = write_config(tmp_path / "a.yaml", Path("unused"), Path("run"))
    train = ["train", "--config", config, "--set", "data.source=texts"]
    train += ["--set", "data.val_fraction=0.2", "--set", "training.total_steps=2"]
    dry = invoke(*train, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert not (tmp_path / "data").exists() and not (tmp_path / "run").exists()
    assert invoke(*train).exit_code == 0
    (folder,) = (tmp_path / "data").glob("texts-????????-byte-val0.2")
    index = (folder / "index.json").read_bytes()
    (tmp_path / "texts" / "new.txt").write_text("one more document")
    again = invoke(*train, "--set", "training.total_steps=4")
    assert again.exit_code == 0, again.output
    assert "as before" in again.stdout and "Continuing from" in again.stdout
    changed = "texts changed since it was prepared; continuing on the prepared data"
    assert changed in again.stdout
    assert (folder / "index.json").read_bytes() == index
    shutil.rmtree(tmp_path / "texts")
    gone = invoke(*train, "--set", "training.total_steps=5")
    assert gone.exit_code == 0, gone.output
    assert "texts cannot be prepared any more (source: got 'texts', " in gone.stdout


def test_the_plain_script_door_is_the_same_code(prepared, finished, tmp_path):
    _, run, _ = finished
    config = write_config(tmp_path / "a.yaml", Path("/nowhere"), Path("unused"))
    arguments = ["--config", str(config), "--data-path", str(prepared)]
    arguments += ["--checkpoint-dir", str(tmp_path / "run"), "--no-compile"]
    arguments += ["--no-grad-checkpoint", "--resume", "never"]
    assert main(arguments) == 0
    newest = "checkpoints/step_00000008/model.safetensors"
    assert (tmp_path / "run" / newest).read_bytes() == (run / newest).read_bytes()


MISTAKES = [
    (["--set", "training.learning_rate=1"],
     "--set: training.learning_rate is not a setting; did you mean training.lr? "),
    (["--set", "data.train_data_path=/does/not/exist"],
     "data.train_data_path: /does/not/exist does not exist; `mamba3lite prepare"),
    (["--set", "data.source=/does/not/exist"], None),
    (["--set", "model.vocab_size=300"],
     "model.vocab_size: got 300, should be 257, the vocabulary of "),
    (["--set", "data.train_data_path=null", "--set", "data.source=stdlib+"],
     "source: got 'stdlib+', wanted names or paths joined by +"),
    (["--set", "model.max_seq_len=1000000"], None),
    (["--resume", "must"], "--resume must: "),
    (["--resume", "7"], "--resume 7: "),
    (["--resume", "sometimes"], "--resume sometimes: "),
    (["--set", "training.LR=1"], "--set: training.LR is not a setting; did you mean "
     "training.lr? "),
    (["--resume", "²"], "--resume ²: ² is no checkpoint (auto, never, must, a step "),
    (["--config", "nosuch"], "--config nosuch: no such file, nor a shipped "),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "line"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(
    prepared, tmp_path, monkeypatch, arguments, line
):
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    result = invoke("train", "--config", config, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"mamba3lite train: {line or ''}")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_bad_launch_variable_is_one_line_and_exit_2(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("ENABLE_TRITON_KERNELS", "1")
    monkeypatch.setenv("TRITON_PER_CHUNK_NUM_WARPS", "abc")
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    choice = "model.ssd_dispatch=triton"
    result = invoke("train", "--config", config, "--set", choice, "--dry-run")
    assert result.exit_code == 2, result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("mamba3lite train: TRITON_PER_CHUNK_NUM_WARPS is 'abc'")


# --------------------------------------------------------------------------------------
# The other commands


def test_info_counts_the_large_model_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("info", "--config", "pretrain_434m")
    assert result.exit_code == 0, result.output
    rows = {line.split("  ")[1]: line.split()[-1] for line in result.stdout.splitlines()
            if line.startswith("  ")}  # fmt: skip
    assert rows["embed"] == "51,463,168"
    assert rows["layers x in_proj"] == "147,259,392"
    assert "433,662,400" in result.stdout
    assert "tokens per step  65,536 = 16 rows x 2 accumulated x 2048" in result.stdout
    assert "steps            122,071" in result.stdout
    assert result.stdout.count("derived") == 3
    assert list(tmp_path.iterdir()) == []


def test_plot_overlays_runs(finished, tmp_path):
    _, run, _ = finished
    other = tmp_path / "other"
    shutil.copytree(run, other)
    out = tmp_path / "both.png"
    result = invoke("plot", run, other, "--out", out)
    assert result.exit_code == 0 and result.stdout == f"{out}\n"
    assert out.read_bytes().startswith(PNG)
    result = invoke("plot", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == f"mamba3lite plot: {tmp_path}: no metrics.jsonl here\n"


def test_a_plot_that_cannot_be_written_leaves_nothing(finished, tmp_path):
    _, run, _ = finished
    folder, missing = tmp_path / "folder", tmp_path / "none" / "a.png"
    folder.mkdir()
    for out, line in [
        (folder, f"{folder}: is a folder; give the name of a PNG file"),
        (missing, f"{missing}: there is no folder {missing.parent}; make it first"),
        (tmp_path / ("x" * 300), f"{tmp_path / ('x' * 300)}: File name too long"),
    ]:
        result = invoke("plot", run, "--out", out)
        assert result.exit_code == 2, result.output
        assert result.stderr == f"mamba3lite plot: {line}\n"
    assert list(tmp_path.rglob("*")) == [folder]


def test_a_plot_of_damaged_metrics_is_one_line(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    for line in ("5", '{"loss": 1}', '{"step": 1, "loss": "low"}',
                 '{"step": 1, "val_windows": "all"}'):  # fmt: skip
        metrics.write_text(f"{line}\n")
        result = invoke("plot", tmp_path)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith(f"mamba3lite plot: {metrics}: line 1 ")
        assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [metrics]


def test_a_plot_of_extreme_numbers_and_of_none(tmp_path):
    rows = [
        '{"step": 0, "loss": 1e299, "lr": 0, "grad_norm": 0}',
        '{"step": 9, "loss": -1e299, "lr": null, "grad_norm": 1e299}',
        '{"step": 9, "val_windows": "all", "val_bpb": null, "zlib_bpb": 2}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    result = invoke("plot", tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_prepare_counts_what_it_wrote(tmp_path):
    source = write_corpus(tmp_path / "text")
    out = tmp_path / "tokens"
    result = invoke("prepare", "--source", source, "--out", out)
    assert result.exit_code == 0, result.output
    assert "train: " in result.stdout and f"prepared in {out}" in result.stdout
    result = invoke("prepare", "--source", tmp_path / "none", "--out", out)
    assert result.exit_code == 2 and result.stderr.startswith("mamba3lite prepare: ")
    arguments = ["--source", source, "--out", out, "--tokenizer", "gpt3"]
    result = invoke("prepare", *arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1


def test_generate_continues_a_prompt(finished):
    _, run, _ = finished
    arguments = ["generate", "--checkpoint", run, "--max-new-tokens", 8, "--seed", 1]
    first = invoke(*arguments, "--prompt", "def é")
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("def é")
    assert invoke(*arguments, "--prompt", "def é").stdout == first.stdout
    newest = list_checkpoints(run / "checkpoints")[-1]
    same = invoke(
        "generate", "--checkpoint", newest, *arguments[3:], "--prompt", "def é"
    )
    assert same.stdout == first.stdout


def test_generate_keeps_the_bytes_of_a_prompt(finished, monkeypatch):
    _, run, _ = finished
    prompts = []

    def fake_stream(decoder, asked, **options):
        prompts.extend(map(bytes, asked))
        return iter([[0xA9], [65]])  # ends the character that the prompt began

    monkeypatch.setattr("mamba3lite.generate.Decoder.stream", fake_stream)
    result = invoke("generate", "--checkpoint", run, "--prompt", "é\udcff\udcc3")
    assert result.exit_code == 0, result.output
    assert prompts == [b"\xc3\xa9\xff\xc3"]
    assert result.stdout == "é\ufffdéA\n"


def test_generate_takes_a_prompt_that_is_not_utf_8(finished):
    _, run, _ = finished
    command = [sys.executable, "-m", "mamba3lite.cli", "generate", "--checkpoint", run]
    command += ["--prompt", b"\xff", "--max-new-tokens", "2"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().startswith("\ufffd")


def test_generate_takes_many_prompts_and_samples(finished, tmp_path):
    _, run, _ = finished
    arguments = ["generate", "--checkpoint", run, "--max-new-tokens", 8, "--seed", 4]
    file = tmp_path / "prompts.txt"
    file.write_bytes("for é\r\n\nx\xff".encode("latin-1"))
    many = ["--prompt", "def", "--prompt-file", file, "--num-samples", 2]
    result = invoke(*arguments, *many)
    assert result.exit_code == 0, result.output
    expected = ""
    for number, prompt in enumerate(("def", "for \udce9", "", "x\udcff"), 1):
        for sample in (1, 2):
            alone = invoke(*arguments[:-1], 3 + sample, "--prompt", prompt)
            title = f"===== prompt {number}, sample {sample} =====\n"
            expected += title + alone.stdout
    assert result.stdout == expected
    for more in (["--stream"], ["--batch-size", 3]):
        assert invoke(*arguments, *many, *more).stdout == expected


def test_generate_streams_token_by_token(finished, monkeypatch):
    _, run, _ = finished
    printed, taken = [], []

    def tokens_one_by_one(decoder, prompts, **options):
        for token in b"ab":
            taken.append(len(printed))
            yield [token]

    monkeypatch.setattr("mamba3lite.generate.Decoder.stream", tokens_one_by_one)
    monkeypatch.setattr("mamba3lite.cli.show", lambda text, **_: printed.append(text))
    assert invoke("generate", "--checkpoint", run, "--stream").exit_code == 0
    assert printed == ["", "a", "b", "", ""] and taken == [1, 2]


def test_ctrl_c_leaves_what_there_is_of_a_text(finished, monkeypatch):
    _, run, _ = finished

    def cut_short(*_, **__):
        def pieces():
            yield from ("def ", "f")
            raise KeyboardInterrupt

        yield 1, 1, pieces()

    monkeypatch.setattr("mamba3lite.generate.texts", cut_short)
    for extra in ([], ["--stream"]):
        result = invoke("generate", "--checkpoint", run, *extra)
        assert result.exit_code != 0
        assert result.stdout.startswith("def f"), extra


def test_ctrl_c_leaves_what_there_is_of_every_text(finished, monkeypatch):
    _, run, _ = finished

    def cut_short(decoder, prompts, **options):
        yield [ord("a"), ord("b")]
        yield [ord("c"), None]
        raise KeyboardInterrupt

    monkeypatch.setattr("mamba3lite.generate.Decoder.stream", cut_short)
    result = invoke("generate", "--checkpoint", run, "--prompt", "1", "--prompt", "2")
    assert result.exit_code == 130
    titles = [f"===== prompt {number}, sample 1 =====" for number in (1, 2)]
    assert result.stdout == f"{titles[0]}\n1ac\n{titles[1]}\n2b\n"


def test_a_reader_that_has_gone_is_no_mistake(finished):
    _, run, _ = finished
    command = [sys.executable, "-m", "mamba3lite.cli", "generate", "--checkpoint", run]
    command += ["--stream", "--max-new-tokens", "1", "--num-samples", "2000"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as running:
        assert running.stdout.read(20) == b"===== prompt 1, samp"
        running.stdout.close()
        assert (running.stderr.read(), running.wait()) == (b"", 1)


class Terminal(io.StringIO):
    """A stream that says it is one, and keeps what it would obey."""

    encoding = "utf-8"

    def isatty(self):
        return True


RED = "\x1b[31m\x1b]0;name\x07"


def test_a_terminal_shows_control_characters_and_obeys_them_with_raw(
    finished, monkeypatch
):
    _, run, _ = finished
    ask = ["generate", "--checkpoint", str(run), "--max-new-tokens", "1"]
    ask += ["--prompt", f"{RED}\u202e\ttab"]
    for extra in ([], ["--stream"]):
        shown = Terminal()
        monkeypatch.setattr("sys.stdout", shown)
        app([*ask, *extra], standalone_mode=False)
        spelled = r"\x1b[31m\x1b]0;name\x07\u202e" + "\ttab"
        assert shown.getvalue().startswith(spelled)
        assert not {"\x1b", "\x07", "\u202e"} & set(shown.getvalue())
        obeyed = Terminal()
        monkeypatch.setattr("sys.stdout", obeyed)
        app([*ask, *extra, "--raw"], standalone_mode=False)
        assert obeyed.getvalue().startswith(f"{RED}\u202e\ttab")
    monkeypatch.undo()
    for extra in ([], ["--stream"]):
        piped = invoke(*ask, *extra).stdout
        assert piped.startswith(f"{RED}\u202e\ttab"), "a pipe gets every character"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--config", f"{RED}\n"],
        ["train", "--resume", f"{RED}\n"],
        ["train", "--set", f"data.source={RED}\n"],
        ["info", "--config", f"{RED}\n"],
        ["info", "--set", f"{RED}\n=1"],
        ["generate", "--checkpoint", f"{RED}\n"],
        ["generate", "--checkpoint", ".", "--prompt-file", f"{RED}\n"],
        ["generate", "--checkpoint", ".", "--top-k", f"{RED}\n"],
        ["prepare", "--source", f"{RED}\n", "--out", "x"],
        ["prepare", "--source", "stdlib", "--out", "x", "--tokenizer", f"{RED}\n"],
        ["plot", f"{RED}\n"],
        ["verify", f"{RED}\n"],
        ["bench", "--model", f"{RED}\n"],
        ["bench", "--json", f"/{RED}\n/x"],
        [f"{RED}\n"],
    ],
)
def test_what_a_mistake_quotes_stays_on_one_line(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    assert not {"\x1b", "\x07"} & set(result.output)
    assert list(tmp_path.iterdir()) == []


def test_every_command_shows_what_a_stream_can(finished, tmp_path):
    _, run, _ = finished
    source, out = write_corpus(tmp_path / "text"), tmp_path / "€"
    narrow = CliRunner(charset="latin-1")
    done = narrow.invoke(app, ["prepare", "--source", str(source), "--out", str(out)])
    assert done.exit_code == 0 and done.stdout.endswith("\\u20ac\n"), done.output
    ask = ["generate", "--checkpoint", str(run), "--max-new-tokens", "1"]
    done = narrow.invoke(app, [*ask, "--prompt", "é€"])
    assert done.exit_code == 0 and done.stdout.startswith("é\\u20ac"), done.output
    for command in (["verify", str(out)], ["info", "--config", str(out / "none")]):
        done = narrow.invoke(app, command)
        assert "\\u20ac" in done.output and not isinstance(done.exception, ValueError)


@pytest.mark.parametrize(
    ("kind", "environment", "redrawn"),
    [
        (Terminal, {"TERM": "xterm"}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (Terminal, {"TERM": "dumb", "FORCE_COLOR": "1"}, False),
        (io.StringIO, {"TERM": "xterm", "FORCE_COLOR": "1"}, False),
    ],
)
def test_progress_is_a_bar_where_one_can_be_redrawn_and_lines_elsewhere(
    tmp_path, monkeypatch, kind, environment, redrawn
):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    source = write_corpus(tmp_path / "[red]text[/blue]")
    shown = kind()
    monkeypatch.setattr("sys.stderr", shown)
    ask = ["prepare", "--source", str(source), "--out", str(tmp_path / "out")]
    for _ in range(2):  # the second time it says that all is there
        app(ask, standalone_mode=False)
    assert ("\x1b" in shown.getvalue()) == redrawn
    if not redrawn:
        assert "reading: 40/40 files, " in shown.getvalue()


@pytest.mark.parametrize("name", ["info", "verify", "generate", "prepare", "plot"])
def test_without_streams_a_command_does_its_work(finished, tmp_path, monkeypatch, name):
    _, run, _ = finished
    out = tmp_path / "out"
    arguments = {
        "info": [],
        "verify": [str(run)],
        "generate": ["--checkpoint", str(run), "--max-new-tokens", "1"],
        "prepare": ["--source", str(write_corpus(tmp_path / "a")), "--out", str(out)],
        "plot": [str(run), "--out", str(tmp_path / "a.png")],
    }[name]
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert app([name, *arguments], standalone_mode=False) in (None, 0)


@pytest.mark.parametrize("name", ["info", "verify", "doctor", "generate", "plot"])
def test_a_full_disk_behind_stdout_is_one_line(finished, tmp_path, monkeypatch, name):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    _, run, _ = finished
    arguments = {
        "verify": [run],
        "generate": ["--checkpoint", run, "--max-new-tokens", 1],
        "plot": [run, "--out", tmp_path / "a.png"],
    }.get(name, [])
    monkeypatch.setattr("mamba3lite.cli.show", refuse)
    result = invoke(name, *arguments)
    line = f"mamba3lite {name}: output: No space left on device\n"
    assert (result.exit_code, result.stderr) == (2, line)


def test_ctrl_c_while_torch_loads_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "-m", "mamba3lite.training.pretrain"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr.splitlines() == [
        "python -m mamba3lite.training.pretrain: interrupted before training began"
    ]
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("data", "prompts"),
    [
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\n\r\nb\r\n", [b"a", b"", b"b"]),
        (b"a\rb\x0b\n\r\r\n", [b"a\rb\x0b", b"\r"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", [b"a", b"\xef\xbb\xbfb"]),
        (b"\n", [b""]),
    ],
)
def test_a_prompt_file_is_cut_at_line_feeds_alone(tmp_path, data, prompts):
    file = tmp_path / "prompts.txt"
    file.write_bytes(data)
    assert lines_of(str(file)) == prompts


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--prompt", "a\ud800"], "prompt: character 2 is a lone surrogate, not text"),
        (["--checkpoint", __file__], f"{__file__}: is a file, wants a folder\n"),
        (["--prompt-file", "/nowhere"], "/nowhere: No such file or directory\n"),
        (
            ["--prompt-file", "/dev/null"],
            "/dev/null: holds no prompt; wants one a line\n",
        ),
        (["--mode", "fast"], "mode: got 'fast', should be recurrent"),
        (["--mode", ""], "mode: got '', should be recurrent or exact\n"),
        (["--checkpoint", ""], "checkpoint: got '', should be a path\n"),
        (["--prompt-file", ""], "prompt_file: got '', should be a path\n"),
        (
            ["--num-samples", "0"],
            "num_samples: got 0, should be between 1 and 1000000\n",
        ),
        (["--batch-size", "0"], "batch_size: got 0, should be at least 1\n"),
        (["--top-p", "2"], "top_p: got 2.0, should be above 0 and at most 1\n"),
        (["--checkpoint", "/nowhere"], "/nowhere: no such folder\n"),
        (["--checkpoint", "/"], "/: no checkpoint here; wants a step_... folder, "),
    ],
)
def test_generate_mistakes_are_one_line(finished, arguments, line):
    _, run, _ = finished
    result = invoke("generate", "--checkpoint", run, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"mamba3lite generate: {line}")
    assert result.stderr.count("\n") == 1


def test_generate_refuses_a_damaged_checkpoint(finished, tmp_path):
    _, run, _ = finished
    bad = tmp_path / "step_00000008"
    shutil.copytree(run / "checkpoints" / "step_00000008", bad)
    (bad / "model.safetensors").write_bytes(b"")
    result = invoke("generate", "--checkpoint", bad)
    assert result.exit_code == 2
    assert "model.safetensors has 0 bytes, the manifest says" in result.stderr
