import json

from click.testing import CliRunner
from helpers import TINY_RUN

from deepmoe.cli import main


def test_the_bench_times_all_kinds_in_one_run(tmp_path) -> None:
    saved = tmp_path / "speed.json"
    command = ["bench", "train", "quickstart", "--rounds", "1", "--json", "--save", str(saved)]
    result = CliRunner().invoke(main, [*command, *(a for s in TINY_RUN for a in ("--set", s))])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    kinds = {"dense", "joint", "frozen"}
    assert values["seconds_per_epoch"].keys() == values["milliseconds_per_batch"].keys() == kinds
    assert values["ratio_to_dense"].keys() == {"joint", "frozen"}
    assert all(seconds > 0 for seconds in values["seconds_per_epoch"].values())
    assert values["gpu_gib"] == {}, "counted on a GPU alone"
    phases = {"data", "forward", "backward", "optimizer"}
    assert all(times.keys() == phases for times in values["milliseconds_per_batch"].values())
    record = json.loads(saved.read_text())
    assert record["values"] == values
    assert record["command"].startswith("deepmoe bench train quickstart")
