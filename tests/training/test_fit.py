import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import call_forked
from helpers import TINY_RUN, slow, tiny_config
from killed_run import train_and
from safetensors.torch import load_file

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.config import RunConfig, apply_overrides
from deepmoe.errors import TrainingDiverged, UserError
from deepmoe.files import exclusive
from deepmoe.training import FitResult, fit, trainer
from deepmoe.training.log import read_metrics


def run(config: RunConfig, out: Path, **options: bool) -> FitResult:
    return fit(config, out, quiet=True, **options)


def without_time(path: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(path)]


def assert_same_weights(one: Path, other: Path) -> None:
    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> FitResult:
    return run(tiny_config(), tmp_path_factory.mktemp("runs") / "whole")


def test_a_run_leaves_checkpoint_metrics_and_configuration(whole_run) -> None:
    metrics = read_metrics(whole_run.metrics)
    assert [m["epoch"] for m in metrics] == [1, 2, 3, 4]
    assert [m["stage"] for m in metrics] == ["joint", "joint", "finetune", "finetune"]
    assert metrics[-1]["accuracy"] == whole_run.evaluation.accuracy
    assert metrics[-1]["evaluated_on"] == "test"
    assert (whole_run.checkpoint.parent / "config.toml").is_file()
    loaded = load_checkpoint(whole_run.checkpoint)
    assert loaded.config == tiny_config()
    assert loaded.state.epoch == 4
    assert not loaded.model.training
    for name, tensor in whole_run.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name])


def test_gate_heads_learn_at_a_rate_of_their_own(tmp_path) -> None:
    moved = {}
    for scale in (0.0, 1.0, 10.0):
        one_step = ("train.epochs=1", "train.finetune_epochs=0", "heads.init=ones")
        slow = ("train.lr=1e-5", "train.schedule=constant", "train.precision=64-true")
        config = tiny_config(*one_step, *slow, f"heads.lr_scale={scale}")
        weight = run(config, tmp_path / str(scale)).model.heads.weight
        moved[scale] = (weight.detach().double() - 1).abs().sum()
    assert moved[0.0] == 0 < moved[1.0]
    torch.testing.assert_close(moved[10.0], 10 * moved[1.0], rtol=0.05, atol=0)


def test_the_same_seed_gives_the_same_run_and_another_does_not(whole_run, tmp_path) -> None:
    again = run(tiny_config(), tmp_path / "again")
    assert_same_weights(again.checkpoint, whole_run.checkpoint)
    assert without_time(again.metrics) == without_time(whole_run.metrics)
    other = run(tiny_config("train.seed=1"), tmp_path / "other")
    assert without_time(other.metrics) != without_time(whole_run.metrics)


def run_and(out: Path, action: str, numbers: tuple[int, ...], *settings: str) -> int:
    """Trains in another process that does something to itself; returns its exit code."""
    return call_forked(train_and, action, numbers, out, settings)


def names_of_epochs(folder: Path) -> dict[str, tuple[int, float | None]]:
    """Which epoch each checkpoint of a folder is of, and the best accuracy it knows."""
    states = {p.name: load_checkpoint(p).state for p in folder.glob("*.safetensors")}
    return {name: (state.epoch, state.best) for name, state in states.items()}


# The files of a run: 1 config.toml, 2 metrics.jsonl, then a checkpoint an epoch: 3, 4 | 5, 6.
@pytest.mark.parametrize(
    "action",
    [
        ("kill-batch", (0, 2)),
        ("kill-write", (3,)),
        slow(("kill-batch", (1, 0))),
        ("kill-batch", (2, 1)),
        slow(("kill-write", (6,))),
        ("kill-metrics", (1,)),
        slow(("kill-keep", (1,))),
        ("kill-keep", (4,)),
    ],
    ids=str,
)
def test_a_killed_run_resumes_to_the_same_weights(action, whole_run, tmp_path) -> None:
    assert run_and(tmp_path, *action) == -signal.SIGKILL
    finished = [m["epoch"] for m in read_metrics(tmp_path / "metrics.jsonl")]
    last = tmp_path / "last.safetensors"
    assert max(finished, default=0) <= (load_checkpoint(last).state.epoch if last.exists() else 0)
    resumed = run(tiny_config(), tmp_path, resume=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert without_time(resumed.metrics) == without_time(whole_run.metrics)
    assert names_of_epochs(tmp_path) == names_of_epochs(whole_run.checkpoint.parent)


@pytest.mark.parametrize(
    "action",
    [
        ("term-batch", (1, 3)),
        ("int-batch", (3, 0)),
        ("hup-batch", (2, 1)),
        ("term-twice", (2, 1)),  # as `timeout` sends it
    ],
    ids=str,
)
def test_a_signal_saves_within_the_epoch_and_has_its_own_exit_code(
    action, whole_run, tmp_path
) -> None:
    assert run_and(tmp_path, *action) == 75
    state = load_checkpoint(tmp_path / "last.safetensors").state
    (epoch, batch) = action[1]
    assert (state.epoch, state.batch) == (epoch, batch + 1)
    resumed = run(tiny_config(), tmp_path, resume=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert without_time(resumed.metrics) == without_time(whole_run.metrics)


# With a budget, the second epoch goes through images to meet it before it is evaluated.
@pytest.mark.parametrize(
    ("budget", "evaluation", "place"),
    [((), 2, (1, 5)), ((), 4, (3, 5)), (("train.target_macs=0.6",), 3, (1, 4))],
)
def test_a_signal_during_evaluation_saves_the_epoch_as_trained(
    budget, evaluation, place, whole_run, tmp_path
) -> None:
    whole = run(tiny_config(*budget), tmp_path / "whole") if budget else whole_run
    out = tmp_path / "run"
    assert run_and(out, "term-evaluation", (evaluation,), *budget) == 75
    state = load_checkpoint(out / "last.safetensors").state
    assert (state.epoch, state.batch) == place and state.budget_met
    resumed = run(tiny_config(*budget), out, resume=True)
    assert_same_weights(resumed.checkpoint, whole.checkpoint)
    assert without_time(resumed.metrics) == without_time(whole.metrics)


def test_metrics_name_no_epoch_that_no_checkpoint_has(whole_run, tmp_path) -> None:
    rare = ("train.checkpoint_epochs=100", "train.evaluate_epochs=100")
    assert run_and(tmp_path, "kill-batch", (3, 1), *rare) == -signal.SIGKILL
    assert not (tmp_path / "last.safetensors").exists()
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    shutil.rmtree(tmp_path)
    assert run_and(tmp_path, "term-batch", (3, 1), *rare) == 75
    assert [m["epoch"] for m in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("closed", ["pipe", slow("full disk")])
def test_a_closed_output_ends_a_run_with_its_checkpoint_saved(closed, whole_run, tmp_path) -> None:
    settings = [arg for item in TINY_RUN for arg in ("--set", item)]
    command = [sys.executable, "-m", "deepmoe", "train", "quickstart", *settings]
    command += ["--out", str(tmp_path)]
    options = {"stderr": subprocess.PIPE, "text": True}
    threads = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    if closed == "pipe":
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=threads, **options) as process:
            process.stdout.readline()  # as `head -n 1` does
            process.stdout.close()
            told = process.stderr.read()
    else:
        with open("/dev/full", "w") as full:
            process = subprocess.run(command, stdout=full, env=threads, **options)
        told = process.stderr
    assert process.returncode == 75
    assert told.startswith("Error: the output ") and "--resume goes on" in told
    assert len(told.splitlines()) == 1
    resumed = run(tiny_config(), tmp_path, resume=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert without_time(resumed.metrics) == without_time(whole_run.metrics)


def test_a_place_that_an_epoch_does_not_have_is_refused(tmp_path) -> None:
    assert run_and(tmp_path, "term-batch", (1, 3)) == 75
    path = tmp_path / "last.safetensors"
    saved = load_checkpoint(path)
    sums = (*saved.state.sums[:-1], 1e9)
    state = dataclasses.replace(saved.state, batch=10**9, sums=sums)
    save_checkpoint(path, saved.model, saved.config, saved.info, state)
    with pytest.raises(UserError, match="1000000000 batches into an epoch that has only 5"):
        run(tiny_config(), tmp_path, resume=True)


def test_checkpoints_within_an_epoch_by_time(whole_run, tmp_path, monkeypatch) -> None:
    saved = []
    original = trainer.save_checkpoint
    monkeypatch.setattr(
        trainer,
        "save_checkpoint",
        lambda path, model, config, info, state, **rest: (
            saved.append((state.epoch, state.batch)),
            original(path, model, config, info, state, **rest),
        ),
    )
    always = run(tiny_config("train.checkpoint_minutes=1e-9"), tmp_path)
    assert saved[:6] == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0)]
    ours, theirs = (r.model.state_dict() for r in (always, whole_run))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path) -> None:
    result = run(tiny_config("train.epochs=4", "train.keep_checkpoints=2"), tmp_path)
    kept = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    epochs = ["epoch-0005.safetensors", "epoch-0006.safetensors"]
    assert kept == ["best.safetensors", *epochs, "last.safetensors"]
    assert_same_weights(tmp_path / epochs[1], result.checkpoint)
    best = max(m["accuracy"] for m in read_metrics(result.metrics))
    assert load_checkpoint(tmp_path / "best.safetensors").state.best == best


def test_a_loss_beyond_hope_stops_the_run_and_names_the_last_good_checkpoint(tmp_path) -> None:
    run(tiny_config("train.epochs=1", "train.finetune_epochs=0"), tmp_path)
    wild = tiny_config("train.lr=1000", "train.loss_limit=50", "train.schedule=constant")
    checkpoint = load_checkpoint(tmp_path / "last.safetensors")
    save_checkpoint(
        tmp_path / "last.safetensors", checkpoint.model, wild, checkpoint.info, checkpoint.state
    )
    with pytest.raises(TrainingDiverged, match=r"good checkpoint is .*last.safetensors") as e:
        run(wild, tmp_path, resume=True)
    assert e.value.exit_code == 3
    finite = load_file(tmp_path / "last.safetensors")
    assert all(t.isfinite().all() for t in finite.values())


def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch) -> None:
    run(tiny_config("train.epochs=1", "train.finetune_epochs=0"), tmp_path)
    path = tmp_path / "last.safetensors"
    content = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    loaded = load_checkpoint(path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2, limits[1]))
        with pytest.raises(UserError, match=r"cannot write .*: .*before it is whole"):
            save_checkpoint(path, loaded.model, loaded.config, loaded.info, loaded.state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
    assert path.read_bytes() == content
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_run_on_a_full_file_system(tmp_path) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", tmp_path])
    if mount.returncode:
        pytest.skip("this machine does not let us mount a file system")
    try:
        (tmp_path / "ballast").write_bytes(b"0" * 900_000)
        with pytest.raises(UserError, match="No space left on device"):
            run(tiny_config(), tmp_path / "run")
        (tmp_path / "ballast").unlink()
        run(tiny_config("train.keep_checkpoints=0"), tmp_path / "run", resume=True)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_the_best_is_saved_between_regular_checkpoints(tmp_path) -> None:
    result = run(tiny_config("train.checkpoint_epochs=100"), tmp_path)
    best = max(m["accuracy"] for m in read_metrics(result.metrics))
    assert load_checkpoint(tmp_path / "best.safetensors").state.best == best


def test_checkpoints_without_the_last_are_not_swept_away(tmp_path) -> None:
    run(tiny_config(), tmp_path)
    for name in ("last.safetensors", "metrics.jsonl"):
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match="holds a run already"):
        run(tiny_config(), tmp_path)
    with pytest.raises(UserError, match=r"no last.safetensors to resume from"):
        run(tiny_config(), tmp_path, resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        run(tiny_config(), tmp_path / "file")


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch) -> None:
    original = trainer.Trainer.train_epoch

    def ruin(self, *arguments):
        sums = original(self, *arguments)
        with torch.no_grad():
            self.model.network.fc.weight.fill_(float("nan"))
        return sums

    monkeypatch.setattr(trainer.Trainer, "train_epoch", ruin)
    with pytest.raises(TrainingDiverged, match=r"fc\.weight has values that are not finite"):
        run(tiny_config(), tmp_path)
    assert not (tmp_path / "last.safetensors").exists()


def test_tensorboard_gets_every_figure(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(tiny_config("train.tensorboard=true", "train.evaluate_epochs=3"), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("task_loss")] == [1, 2, 3, 4]
    assert [e.step for e in events.Scalars("accuracy")] == [3, 4]
    metrics = read_metrics(result.metrics)
    assert events.Scalars("loss")[0].value == pytest.approx(metrics[0]["loss"])
    assert ["accuracy" in m for m in metrics] == [False, False, True, True]


def test_a_metrics_line_cut_short_is_dropped(whole_run, tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(whole_run.metrics.read_text()[:-10])
    assert [m["epoch"] for m in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(tmp_path / "missing.jsonl") == []


def test_resuming_a_finished_run_changes_nothing(whole_run, tmp_path) -> None:
    first = run(tiny_config(), tmp_path)
    content = first.checkpoint.read_bytes()
    again = run(tiny_config(), tmp_path, resume=True)
    assert again.checkpoint.read_bytes() == content
    assert again.evaluation == first.evaluation
    assert without_time(again.metrics) == without_time(whole_run.metrics)


@pytest.mark.parametrize("form", ["classes", "latent"])
def test_the_frozen_stage_trains_the_base_network_alone(form: str, tmp_path) -> None:
    overrides = [f"embedding.form={form}", "train.weight_decay=0.01"]
    joint = run(tiny_config(*overrides, "train.finetune_epochs=0"), tmp_path / "joint")
    both = run(tiny_config(*overrides), tmp_path / "both")
    before, after = joint.model.state_dict(), both.model.state_dict()
    routing = [n for n in before if n.startswith(("embedding.", "heads."))]
    assert any("running_mean" in n for n in routing)
    for name in routing:
        assert torch.equal(before[name], after[name]), name
    base = [n for n in before if n.startswith("network.") and n.endswith("weight")]
    for name in base:
        assert not torch.equal(before[name], after[name]), name


def test_training_learns_and_sparsity_closes_gates(tmp_path) -> None:
    options = ["train.epochs=4", "train.finetune_epochs=0", "train.batch_size=32"]
    free = run(tiny_config(*options, "loss.sparsity=0"), tmp_path / "free").evaluation
    sparse = run(tiny_config(*options, "loss.sparsity=0.1"), tmp_path / "sparse").evaluation
    assert free.accuracy > 0.8
    assert sparse.active < free.active - 0.05
    assert sparse.macs < free.macs


def test_the_dense_twin_trains_by_the_same_code(tmp_path) -> None:
    twin = run(tiny_config().dense, tmp_path)
    assert twin.evaluation.active == 1.0
    assert twin.evaluation.macs == twin.evaluation.dense_macs
    assert twin.evaluation.embedding_accuracy is None
    assert load_checkpoint(twin.checkpoint).model.embedding is None


def test_noisy_top_k_trains(tmp_path) -> None:
    overrides = ["heads.kind=noisy-topk", "heads.init=normal(0, 1)", "loss.balance=0.01"]
    result = run(tiny_config(*overrides, "train.epochs=1", "train.finetune_epochs=0"), tmp_path)
    assert result.evaluation.active == pytest.approx(0.5)


def test_a_folder_in_use_is_kept(whole_run, tmp_path) -> None:
    run(tiny_config("train.epochs=1", "train.finetune_epochs=0"), tmp_path)
    with pytest.raises(UserError, match="holds a run already"):
        run(tiny_config(), tmp_path)
    with pytest.raises(UserError, match=r"other settings of train.epochs, train.finetune_epochs"):
        run(tiny_config(), tmp_path, resume=True)
    with exclusive(tmp_path), pytest.raises(UserError, match="in use by this process"):
        run(tiny_config(), tmp_path, overwrite=True)
    assert load_checkpoint(tmp_path / "last.safetensors").config.train.epochs == 1
    replaced = run(tiny_config(), tmp_path, overwrite=True)
    assert_same_weights(replaced.checkpoint, whole_run.checkpoint)


def test_a_resumed_run_tells_that_its_teacher_is_another(whole_run, tmp_path, capsys) -> None:
    for name in ("one", "other"):
        shutil.copy(whole_run.checkpoint, tmp_path / f"{name}.safetensors")
    taught = tiny_config(f"train.teacher={tmp_path / 'one.safetensors'}", "loss.distillation=0.5")
    fit(taught, tmp_path / "run", quiet=True)
    fit(taught, tmp_path / "run", resume=True)
    assert "started with" not in capsys.readouterr().out
    taught = apply_overrides(taught, [f"train.teacher={tmp_path / 'other.safetensors'}"])
    fit(taught, tmp_path / "run", resume=True)
    assert "another train.start or train.teacher than it was started" in capsys.readouterr().out


def test_a_run_that_never_began_is_not_in_the_way(whole_run, tmp_path) -> None:
    with pytest.raises(UserError, match="codes"):
        run(tiny_config("train.codes=9999"), tmp_path)
    assert_same_weights(run(tiny_config(), tmp_path).checkpoint, whole_run.checkpoint)


def test_images_too_small_for_the_network_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match="8x8 px: it needs at least 32 px"):
        run(tiny_config("model.name=vgg11", "model.widths=[4,4,4,4,4,4,4,4]"), tmp_path)


def test_a_wrong_class_count_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"model.classes is 7, but the data \(digits\) has 10"):
        run(tiny_config("model.classes=7"), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match="no usable CUDA device"):
        run(tiny_config("train.device=cuda"), tmp_path)


def test_a_run_starts_from_another_and_learns_from_it(whole_run, tmp_path) -> None:
    before = load_checkpoint(whole_run.checkpoint).model.network.state_dict()
    path = whole_run.checkpoint
    taught = ["loss.distillation=1", f"train.teacher={path}", f"train.start={path}"]
    one_step = ["train.epochs=1", "train.finetune_epochs=0", "train.lr=1e-12"]
    config = tiny_config(*taught, *one_step, "train.weight_decay=0")
    result = run(config, tmp_path / "student")
    for name, tensor in result.model.network.named_parameters():
        torch.testing.assert_close(tensor.cpu(), before[name])
    assert read_metrics(result.metrics)[-1]["distillation_loss"] > 0
    wider = tiny_config(*taught, *one_step, "model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]")
    with pytest.raises(UserError, match="widths"):
        run(wider, tmp_path / "wider")


def test_several_networks_teach_one(whole_run, tmp_path) -> None:
    path = str(whole_run.checkpoint)
    results = [
        run(
            tiny_config("loss.distillation=1", "train.epochs=1", f"train.teacher={t}"), tmp_path / n
        )
        for n, t in {"one": json.dumps(path), "two": json.dumps([path, path])}.items()
    ]
    one, two = (read_metrics(result.metrics)[-1]["distillation_loss"] for result in results)
    assert one == pytest.approx(two)
    with pytest.raises(UserError, match="at least one path"):
        tiny_config("loss.distillation=1", "train.teacher=[]")
    for wrong in ("3", "[a.safetensors, b.safetensors]"):
        with pytest.raises(UserError, match="list of paths in quotes"):
            tiny_config("loss.distillation=1", f"train.teacher={wrong}")


def test_a_trained_model_gets_a_codebook_by_a_frozen_stage_alone(whole_run, tmp_path) -> None:
    trained = load_checkpoint(whole_run.checkpoint).model
    settings = ("train.epochs=0", "train.finetune_epochs=1", "train.codes=3")
    result = run(tiny_config(*settings, f"train.start={whole_run.checkpoint}"), tmp_path)
    torch.testing.assert_close(result.model.heads.weight.cpu(), trained.heads.weight)
    for name, tensor in trained.embedding.state_dict().items():
        torch.testing.assert_close(result.model.embedding.state_dict()[name].cpu(), tensor)
    assert 1 <= len(result.model.codebook.codes) <= 3
    assert [m["stage"] for m in read_metrics(result.metrics)] == ["finetune"]


def test_a_frozen_stage_alone_meets_a_budget_and_needs_gates(whole_run, tmp_path) -> None:
    frozen = ("train.epochs=0", "train.finetune_epochs=1")
    start = f"train.start={whole_run.checkpoint}"
    result = run(tiny_config(*frozen, start, "train.target_macs=0.6"), tmp_path / "less")
    assert 0.5 < result.evaluation.macs_share < 0.61 < whole_run.evaluation.macs_share
    dense = run(tiny_config("model.gates=none", "train.epochs=1"), tmp_path / "dense")
    with pytest.raises(UserError, match="has no gates"):
        run(tiny_config(*frozen, f"train.start={dense.checkpoint}"), tmp_path / "gated")
    with pytest.raises(UserError, match="a different form"):
        run(tiny_config(start, "embedding.form=latent"), tmp_path / "latent")


def test_some_stage_must_train_and_the_frozen_one_needs_what_is_trained() -> None:
    with pytest.raises(UserError, match="not both be 0"):
        tiny_config("train.epochs=0", "train.finetune_epochs=0", "train.start=x.safetensors")
    with pytest.raises(UserError, match="without a joint stage"):
        tiny_config("train.epochs=0", "train.finetune_epochs=1")


def test_a_teacher_and_its_share_need_each_other() -> None:
    for alone in ("loss.distillation=0.5", "train.teacher=x.safetensors"):
        with pytest.raises(UserError, match="or neither"):
            tiny_config(alone)
