"""What a run leaves beside its checkpoints never stops it."""

import json
import os
import resource
import sys
import types
import warnings

import matplotlib.figure
import pytest
from fault_cases import copy_of, finished, in_child, losses, on_cpu, results
from trainer_cases import (
    StopsAfter,
    assert_same_bits,
    new_run,
    prepare_corpus,
    run_config,
    write_config,
)

from mamba3lite.training import metrics, side_files
from mamba3lite.training.config import load_config
from mamba3lite.training.metrics import plot_runs, read_metrics
from mamba3lite.training.pretrain import Pretrainer, run_training
from mamba3lite.training.side_files import MetricsLog, SampleLog, sample_header
from mamba3lite.training.trackers import Trackers

REPORTS = {"eval_interval": 4, "sample_interval": 2}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    """A run that nothing happens to."""
    return finished(prepared, tmp_path_factory.mktemp("whole"), **REPORTS)


@pytest.fixture(scope="module")
def stopped(prepared, tmp_path_factory):
    """The folder of a run that was stopped after step 5."""
    folder = tmp_path_factory.mktemp("stopped")
    assert new_run(run_config(prepared, folder, **REPORTS), StopsAfter).run() is False
    return folder


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(metrics, "MOST_BYTES", 100_000)
    monkeypatch.setattr(Pretrainer, "sample_tokens", 5)
    monkeypatch.setattr(Pretrainer, "final_sample_tokens", 5)


def train(config, capsys, *overrides) -> list[str]:
    """`mamba3lite train` to its good end; the warnings that it printed."""
    assert run_training(str(config), overrides) == 0
    out, err = capsys.readouterr()
    assert err == "" and "bits per byte over all of it" in out
    return [line for line in out.splitlines() if line.startswith("[warn]")]


# --------------------------------------------------------------------------------------
# What cannot be read


def byte_set(path) -> None:
    """The fault of a disk: one byte in the middle is another."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] = 0xF0
    path.write_bytes(data)


def replaced_by(make):
    def damage(path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGE = {
    "one byte": byte_set,
    "a folder": replaced_by(lambda path: path.mkdir()),
    "a pipe": replaced_by(os.mkfifo),
    "a link to nothing": replaced_by(lambda path: path.symlink_to("nowhere")),
    "other bytes": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "more than any run writes": lambda path: os.truncate(path, metrics.MOST_BYTES + 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.txt"])
def test_a_damaged_side_file_is_set_aside_and_the_run_goes_on(
    stopped, prepared, tmp_path, whole, capsys, name, damage
):
    folder = copy_of(stopped, tmp_path / "run")
    DAMAGE[damage](folder / name)
    before = (folder / name).read_bytes() if (folder / name).is_file() else None
    config = write_config(tmp_path / "a.yaml", prepared, folder, **REPORTS)
    (warning,) = train(config, capsys)
    aside = folder / f"damaged-1-{name}"
    assert warning.startswith(f"[warn] {name}: ") and warning.endswith(
        f"; it is set aside as {aside.name}"
    )
    assert os.path.lexists(aside)
    assert before is None or aside.read_bytes() == before
    newest = "checkpoints/step_00000008/model.safetensors"
    assert (folder / newest).read_bytes() == (whole.run_dir / newest).read_bytes()
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")][-1] == 8
    assert sample_header(8) in (folder / "samples.txt").read_text("utf-8")
    assert train(config, capsys) == [], "once is enough"


def test_a_line_ends_with_a_line_feed_alone(tmp_path):
    """JSON allows U+2028 in a string, where Python would cut the line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "problem": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read_metrics(path) == [{"step": 1, "problem": "a\u2028b\x85c"}]


def test_checkpoints_may_lie_on_another_disk(stopped, prepared, tmp_path, whole):
    folder = copy_of(stopped, tmp_path / "run")
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert new_run(run_config(prepared, folder, **REPORTS)).run() is True
    newest = "checkpoints/step_00000008/model.safetensors"
    assert (folder / newest).read_bytes() == (whole.run_dir / newest).read_bytes()


def test_the_lines_that_can_be_read_are_kept(stopped, prepared, tmp_path):
    folder = copy_of(stopped, tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert '"step": 2,' in lines[1]
    lines[1] = lines[1].replace('"step"', '"st\xf0p"')
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 6, "lo']))
    samples = (folder / "samples.txt").read_bytes() + b"\xf0\n"
    (folder / "samples.txt").write_bytes(samples)
    assert new_run(run_config(prepared, folder, **REPORTS)).run() is True
    assert set(losses(folder)) == {1, 3, 4, 5, 6, 7, 8}
    text = (folder / "samples.txt").read_text("utf-8")
    assert text.startswith(samples.decode("utf-8", "replace"))


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.txt"])
def test_a_finished_run_reports_all_the_same(
    whole, prepared, tmp_path, capsys, name, damage
):
    folder = copy_of(whole.run_dir, tmp_path / "run")
    DAMAGE[damage](folder / name)
    config = write_config(tmp_path / "a.yaml", prepared, folder, **REPORTS)
    final = read_metrics(whole.metrics.path)[-1]
    assert run_training(str(config)) == 0
    out, err = capsys.readouterr()
    assert f"{final['val_bpb']:.4f} bits per byte over all of it" in out and not err
    assert f"zlib -9: {final['zlib_bpb']:.4f} on the same text" in out


def test_a_file_that_cannot_be_moved_either_is_a_warning(
    stopped, prepared, tmp_path, capsys, monkeypatch
):
    folder = copy_of(stopped, tmp_path / "run")
    byte_set(folder / "samples.txt")

    def refuse(path, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(side_files.Path, "rename", refuse)
    config = write_config(tmp_path / "a.yaml", prepared, folder, **REPORTS)
    assert train(config, capsys) == [
        f"[warn] {folder / 'samples.txt'}: not UTF-8, and stays so (Operation not "
        "permitted)"
    ]


def test_an_id_that_cannot_be_read_is_a_new_one(prepared, tmp_path, monkeypatch):
    ids = []
    run = types.SimpleNamespace(define_metric=lambda *_, **__: None)
    init = lambda **options: ids.append(options["id"]) or run  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config, lines = run_config(prepared, tmp_path, wandb=True), []
    for _ in range(2):
        Trackers(config, tmp_path, 0, lines.append)
    byte_set(tmp_path / "wandb_id.txt")
    for _ in range(2):
        Trackers(config, tmp_path, 0, lines.append)
    assert ids[0] == ids[1] != ids[2] == ids[3] and lines == []


# --------------------------------------------------------------------------------------
# Links, leftovers, files of somebody's own


def test_no_link_is_written_through(stopped, prepared, tmp_path, capsys):
    folder, victim = copy_of(stopped, tmp_path / "run"), tmp_path / "victim"
    victim.write_text("of somebody's own")
    names = ("config.yaml", "metrics.jsonl", "samples.txt", "curves.png")
    for name in names:
        (folder / f".tmp-{name}").symlink_to(victim)
    for name in ("trace.json", "ops.txt"):
        (folder / "profile").mkdir(exist_ok=True)
        (folder / "profile" / name).symlink_to(victim)
    for name in ("config.yaml", "curves.png"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
    settings = REPORTS | {"profile_start": 7, "profile_steps": 1}
    config = write_config(tmp_path / "a.yaml", prepared, folder, **settings)
    train(config, capsys)
    assert victim.read_text() == "of somebody's own"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_killed_writer_left_is_removed(stopped, prepared, tmp_path):
    folder = copy_of(stopped, tmp_path / "run")
    (folder / ".tmp-metrics.jsonl-0123abcd").write_text("half of it")
    (folder / ".tmp-mine").write_text("not ours")
    new_run(run_config(prepared, folder, **REPORTS), StopsAfter).run()
    assert [path.name for path in folder.glob(".tmp-*")] == [".tmp-mine"]


def test_settings_of_ones_own_are_set_aside(prepared, tmp_path, capsys):
    """Also where they are the very file that the command names."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = write_config(folder / "config.yaml", prepared, folder, **REPORTS)
    own = f"# my notes\n{config.read_text()}"
    config.write_text(own)
    assert train(config, capsys, "training.lr=2e-3") == [
        "[warn] config.yaml: not what this run wrote; it is set aside as "
        "earlier-1-config.yaml"
    ]
    assert (folder / "earlier-1-config.yaml").read_text() == own
    assert load_config(str(config)).training.lr == 2e-3
    # What a run has written there is replaced without a word.
    assert train(config, capsys) == []
    assert train(config, capsys, "training.total_steps=9") == []
    assert load_config(str(config)).training.total_steps == 9
    config.write_text(config.read_text().replace("seed: 0", "seed: 0  # mine"))
    assert len(train(config, capsys, "training.total_steps=10")) == 1


# --------------------------------------------------------------------------------------
# What cannot be written or drawn


def test_a_disk_that_refuses_a_report_costs_one_warning(
    prepared, tmp_path, whole, capsys, monkeypatch
):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(side_files, "_append", full)
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **REPORTS)
    warnings = train(config, capsys)
    for name in ("metrics.jsonl", "samples.txt"):
        (line,) = [
            w for w in warnings if w.startswith(f"[warn] {tmp_path / 'run' / name}")
        ]
        assert "No space left on device; the run goes on" in line
    newest = "checkpoints/step_00000008/model.safetensors"
    left, right = (
        (run / newest).read_bytes() for run in (tmp_path / "run", whole.run_dir)
    )
    assert left == right


@on_cpu
def test_a_line_is_appended_whole_or_not_at_all(tmp_path):
    lines = []

    def starved() -> int:
        log = MetricsLog(tmp_path / "metrics.jsonl", lines.append)
        log.append({"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
        log.append({"step": 2, "problem": "x" * 40})
        log.append({"step": 3, "problem": "x" * 40})
        assert len(lines) == 1 and "File too large; the run goes on" in lines[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
        log.append({"step": 4})
        return 0

    assert in_child(starved).code == 0
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 4}\n'


NAMES = ("a_$5_and_$10", "_hidden", r"$\frac{", "a:bug:b [red]", "\x1b]0;x\x07")


def test_names_of_runs_are_text_in_a_plot(whole, tmp_path, monkeypatch):
    shown = []
    save = matplotlib.figure.Figure.savefig

    def noted(figure, *arguments, **options):
        (legend,) = [a.get_legend() for a in figure.axes if a.get_legend()]
        shown.extend(text.get_text() for text in legend.get_texts())
        return save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", noted)
    monkeypatch.chdir(tmp_path)
    folders = [copy_of(whole.run_dir, side_files.Path(name)) for name in NAMES]
    plot_runs(folders, side_files.Path("all.png"))
    assert shown == [*NAMES[:-1], r"\x1b]0;x\x07"]
    shown.clear()
    long = copy_of(whole.run_dir, side_files.Path("x" * 180 + "end"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a legend wider than the picture
        plot_runs([long], side_files.Path("long.png"))
    assert shown == ["..." + "x" * 54 + "end"]


def test_a_folder_with_a_name_of_markup_trains(prepared, tmp_path, capsys):
    run = tmp_path / NAMES[0]
    assert train(write_config(tmp_path / "a.yaml", prepared, run), capsys) == []
    assert (run / "curves.png").is_file()


def test_whatever_a_plot_fails_of_is_one_warning(
    prepared, tmp_path, capsys, monkeypatch
):
    def broken(run_dirs, out):
        raise ZeroDivisionError("of the library\nin two lines")

    monkeypatch.setattr(side_files, "plot_runs", broken)
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    told = "[warn] curves.png was not refreshed: of the library"
    assert train(config, capsys) == [told]


# --------------------------------------------------------------------------------------
# What a stop kept from being written


class Asked(Pretrainer):
    """A run that is asked to stop in the evaluation or in the sample of step 4."""

    where = "evaluation"

    def evaluation(self, windows):
        self._ask("evaluation")
        return super().evaluation(windows)

    def sample(self, n_tokens):
        self._ask("sample")
        return super().sample(n_tokens)

    def _ask(self, where):
        if (self.step, where) == (4, self.where):
            self.stop.received = 15


def reports(run_dir) -> tuple[list[dict], str]:
    """The evaluations, and the samples; without what a clock says."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    kept = [{k: row[k] for k in row if k != "time"} for row in rows if "val_bpb" in row]
    return kept, (run_dir / "samples.txt").read_text("utf-8")


@pytest.mark.parametrize("where", ["evaluation", "sample"])
def test_what_a_stop_left_out_is_written_on_resume(prepared, tmp_path, whole, where):
    config = run_config(prepared, tmp_path, **REPORTS)
    part = new_run(config, type("Run", (Asked,), {"where": where}))
    assert part.run() is False and part.step == 4
    last = new_run(config)
    assert last.run("must") is True
    assert reports(tmp_path) == reports(whole.run_dir)
    assert [row["step"] for row in reports(tmp_path)[0]] == [4, 8]
    assert_same_bits(results(last), results(whole))


def test_a_longer_run_has_the_sample_of_its_former_end_once(prepared, tmp_path):
    settings = {"sample_interval": 4}
    finished(prepared, tmp_path, **settings)
    finished(prepared, tmp_path, **settings, total_steps=12)
    text = SampleLog(tmp_path / "samples.txt", print).read()
    assert [text.count(sample_header(step)) for step in (4, 8, 12)] == [1, 1, 1]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
