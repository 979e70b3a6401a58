"""What the command prints: its help, tables, and nothing where nobody reads."""

import subprocess
import sys

import click
import pytest
from command_line import assert_refused, deepmoe

from deepmoe.cli import main
from deepmoe.console import print_table


def test_the_command_alone_prints_its_help() -> None:
    for arguments in ((), ("bench",)):
        result = deepmoe(*arguments)
        assert result.exit_code == 0 and result.stdout.startswith("Usage: ")
        assert "Error" not in result.output


def test_summaries_of_verbs_are_not_cut_off() -> None:
    for arguments in ((), ("bench",)):
        assert "..." not in deepmoe(*arguments, "--help").stdout.partition("Commands:")[2]


def verbs_of(group: click.Group, *before: str) -> list[tuple[list[str], click.Command]]:
    """Every verb, with what is typed for it."""
    found = []
    for name, verb in group.commands.items():
        if verb.hidden:  # called by other verbs alone
            continue
        below = verbs_of(verb, *before, name) if isinstance(verb, click.Group) else []
        found += below or [([*before, name], verb)]
    return found


@pytest.mark.parametrize(
    ("typed", "verb"),
    verbs_of(main),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_verb_alone_tells_how_it_is_called(typed, verb) -> None:
    """One line with its usage and an example, which is also at the end of its help."""
    command = " ".join(("deepmoe", *typed))
    assert verb.epilog.startswith(f"Example: {command}")
    assert verb.epilog in " ".join(deepmoe(*typed, "--help").stdout.split())
    if any(isinstance(p, click.Argument) and p.required for p in verb.params):
        refused = deepmoe(*typed)
        assert_refused(refused, " is missing: ", f"{' '.join(typed)} [OPTIONS] ")
        assert f"; for example: {command}" in refused.stderr


@pytest.mark.parametrize(("lines", "seen"), [(1, "drn_a_50_camvid\n"), (0, "")])
def test_a_pipe_into_head_is_quiet(lines: int, seen: str) -> None:
    """Also where it has closed the pipe before anything is printed."""
    command = f"{sys.executable} -m deepmoe config | head -n {lines}"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.stdout == seen and result.stderr == ""


@pytest.mark.parametrize(
    ("command", "code"), [("config >&-", 0), ("config x 2>&-", 2), ("config <&- >&- 2>&-", 0)]
)
def test_outputs_that_are_closed_from_the_start_get_nothing(command: str, code: int) -> None:
    whole = f"{sys.executable} -m deepmoe {command}"
    result = subprocess.run(whole, shell=True, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_the_module_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "deepmoe", "train", "quikstart"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: no preset is named 'quikstart'")
    assert "Traceback" not in result.stderr


def test_tables_are_not_wrapped_in_a_log(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "a_run_with_a_name_of_more_than_forty_letters"
    print_table(("run", "accuracy"), [(name, "73.27 %")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name, "73.27", "%"] in lines


def test_tables_have_words_to_the_left_and_figures_to_the_right(capsys) -> None:
    print_table(
        ("run", "by", "loss"), [("a", "Li", "1.5"), ("b", "ThiNet", "-12.0"), ("c", "", "")]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "by", "loss"]
    assert lines[2:] == [" a     Li         1.5", " b     ThiNet   -12.0", " c"]
