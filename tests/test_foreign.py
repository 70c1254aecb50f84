"""Folders from a stranger: links and pipes in them are refused, and nothing behind a link changes."""

import os
import shutil
from pathlib import Path

import pytest

from prompt_r1.baselines.sft import main as fine_tune
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import PredictionFile
from prompt_r1.foreign import check_no_links, json_object
from prompt_r1.report.page import write_report
from prompt_r1.storage.run_folder import open_run


@pytest.fixture
def secret(tmp_path) -> Path:
    (tmp_path / "home").mkdir()
    path = tmp_path / "home/secret.yaml"
    path.write_text("password: 1234\n")
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "foreign/inner").mkdir(parents=True)
    (tmp_path / "foreign/inner/file").touch()
    return tmp_path / "foreign"


def test_plain_folders_absent_ones_and_links_to_folders_are_accepted(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link", tmp_path / "absent", folder / "inner/file"):
        check_no_links(path)


@pytest.mark.parametrize("name", ["link", "inner/link"])
def test_a_link_anywhere_in_a_folder_is_refused(folder, secret, name):
    for target in (secret, secret.parent, folder / "inner/file", folder / "absent"):
        (folder / name).symlink_to(target)
        with pytest.raises(UsageError, match=f"{name} is a symbolic link"):
            check_no_links(folder)
        check_no_links(folder, skip=("link", "inner"))
        (folder / name).unlink()


def test_a_pipe_is_refused_because_reading_it_would_never_end(folder):
    os.mkfifo(folder / "inner/pipe")
    with pytest.raises(UsageError, match="inner/pipe is neither a file nor a folder"):
        check_no_links(folder)


def test_every_program_refuses_links_in_the_folders_that_it_reads_and_writes(secret, asking_agent, tmp_path):
    """A bug: a link at metrics.jsonl or predictions.jsonl was written through, and its target was changed."""
    run = tmp_path / "run"
    shutil.copytree(asking_agent, run / "agent")
    (run / "config.yaml").symlink_to(secret)
    (run / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "results").mkdir()
    (tmp_path / "results/predictions.jsonl").symlink_to(secret)
    games = str(tmp_path / "games.jsonl")
    Path(games).write_text('{"question": "Who?", "turns": [{"text": "x", "reply": null}]}\n')
    (tmp_path / "tuned/agent").mkdir(parents=True)
    (tmp_path / "tuned/metrics.jsonl").symlink_to(secret)
    for use in (
        lambda: open_run(str(run), "auto", "mini"),
        lambda: write_report(run),
        lambda: PredictionFile(tmp_path / "results/predictions.jsonl"),
        lambda: fine_tune(["--agent", str(asking_agent), "--games", games, "--out", str(tmp_path / "tuned")]),
    ):
        with pytest.raises(UsageError, match=r"is a (symbolic )?link"):
            use()
    assert secret.read_text() == "password: 1234\n" and not (run / "report.html").exists()


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"a": 1', "[" * 100_000, b"\xff", '{"a": ' * 5_000])
def test_a_text_that_holds_no_json_object_is_read_as_an_empty_one(text):
    assert json_object(text) == {}
    assert json_object('{"a": 1}') == {"a": 1}
