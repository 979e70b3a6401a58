"""What a run keeps in its folder: whole and finite checkpoints, and never another run's."""

import os
import resource
import signal
import subprocess

import pytest
import torch
from helpers import assert_same_weights, tiny_config
from safetensors.torch import load_file
from small_runs import run

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.errors import TrainingDiverged, UserError
from deepmoe.files import exclusive
from deepmoe.training import trainer
from deepmoe.training.log import read_metrics


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


def test_a_run_that_never_began_is_not_in_the_way(whole_run, tmp_path) -> None:
    with pytest.raises(UserError, match="codes"):
        run(tiny_config("train.codes=9999"), tmp_path)
    assert_same_weights(run(tiny_config(), tmp_path).checkpoint, whole_run.checkpoint)
