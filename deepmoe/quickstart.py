"""The first thing to try: train a DeepMoE and its dense twin, and compare them."""

from pathlib import Path

from deepmoe.analysis import Contender, Subject, write_report
from deepmoe.analysis.names import readable_data
from deepmoe.config import RunConfig
from deepmoe.errors import UserError
from deepmoe.evaluation.findings import examine
from deepmoe.results import write_result
from deepmoe.training import fit
from deepmoe.training.fit import check_folder
from deepmoe.training.log import read_metrics

REPORT_NAME = "report.html"
RESULT_NAME = "result.json"


def train_with_twin(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    command: str = "deepmoe quickstart",
    quiet: bool = False,
) -> list[Contender]:
    """Trains the dense twin and the gated network, and writes report and result.json.

    Args:
        config: of the gated network.
        out: folder of the report; the runs are its sub-folders `dense` and `deepmoe`.
        resume: go on with unfinished runs.
        overwrite: replace runs that are in these folders already.
        command: to note in the result.
        quiet: print nothing.
    """
    if config.model.gates == "none":
        raise UserError("a comparison with the dense twin needs gates; model.gates is none")
    out, runs = Path(out), {"dense": config.dense, "deepmoe": config}
    for folder in (out, *(out / name for name in runs)):  # before hours are spent on the first
        check_folder(folder, resume=resume and folder != out, overwrite=overwrite)
    contenders = []
    for name, run in runs.items():
        result = fit(run, out / name, resume=resume, overwrite=overwrite, quiet=quiet)
        contenders.append(Contender(name, result.evaluation, read_metrics(result.metrics)))
    dense, gated = contenders
    subject = Subject(
        name=config.model.name,
        data=readable_data(config.data),
        checkpoint=result.checkpoint.name,
        config=config,
        metrics=gated.metrics,
        beside=(dense,),
    )
    write_report(out / REPORT_NAME, examine(result.model, result.data), subject)
    values = {c.name: c.result.as_dict() for c in contenders}
    write_result(
        out / RESULT_NAME,
        values,
        command=command,
        seed=config.train.seed,
        device=next(result.model.parameters()).device,
    )
    return contenders
