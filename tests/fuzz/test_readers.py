"""Every reader of foreign things, on the damage of the slow fuzz: what it raises is a sentence for the user.

Pipes and folders in place of files are refused by the programs, and tested with them.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from prompt_r1.data.files import load_questions, write_questions
from prompt_r1.environments.sources import Reply
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import Prediction, System, read_predictions, to_row
from prompt_r1.pair.chat_format import Failure, read_request
from prompt_r1.pair.named_agent import SETTINGS_FILE, resolve_agent
from prompt_r1.settings.fields import write_yaml
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.report import page
from prompt_r1.training.warm_start import read_games
from prompt_r1.types import Question
from tests.support import tiny
from tests.support.damage import RANDOM, nest_deeply
from tests.support.played import group_of, write_run
from tests.support.providers import body_of, read_body
from tests.support.published import parquet, published_row
from tests.support.settings import train_config

QUESTION = Question("q", "a", "Who?", ("Anna",), extra={"level": 3})


def write_files(folder: Path) -> dict[Path, Callable[[Path], object]]:
    """A file of each kind, with its reader."""
    run = write_run(folder / "run", [[group_of(QUESTION)]])
    [games] = (run / "trajectories").iterdir()
    write_questions(folder / "own.jsonl", [QUESTION])
    parquet(folder / "published.parquet", published_row("Who?", ["Anna"]))
    answer = Prediction(System("direct", "mini"), QUESTION, 0, "Anna")
    (folder / "predictions.jsonl").write_text(json.dumps(to_row(answer)) + "\n")
    write_yaml(TrainConfig(agent="mini", env="mini", data=("mini",), val_data=()), folder / "settings.yaml")
    agent = tiny.save_agent(folder / "agent")
    write_yaml(TrainConfig(agent="mini"), agent / SETTINGS_FILE)
    return {
        folder / "own.jsonl": load_questions,
        folder / "published.parquet": load_questions,
        folder / "predictions.jsonl": read_predictions,
        folder / "settings.yaml": lambda path: train_config(["--config", str(path)]),
        agent / SETTINGS_FILE: lambda file: resolve_agent(str(file.parent)),
        games: read_games,
        run / "metrics.jsonl": lambda path: page(path.parent),
    }


@pytest.mark.parametrize("damage", [*RANDOM, nest_deeply], ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(damage, tmp_path):
    for path, read in write_files(tmp_path).items():
        whole = path.read_bytes()
        for seed in range(1 if damage is nest_deeply else 12):
            path.write_bytes(whole)
            damage(path, random.Random(f"{path.name} {seed}"))
            try:
                read(path)
            except (UsageError, SystemExit) as refused:
                assert str(refused) and len(str(refused)) < 3000, path.name
        path.write_bytes(whole)
        read(path)


def test_a_damaged_body_is_read_or_refused_in_a_sentence(tmp_path):
    file = tmp_path / "body.json"
    request = {"model": "m", "messages": [{"role": "user", "content": "Who?"}], "max_calls": 3, "seed": 1}
    for damage in RANDOM:
        for seed in range(60):
            rng = random.Random(f"{damage.__name__} {seed}")
            file.write_text(json.dumps(body_of("Anna.")))
            damage(file, rng)
            came = read_body(200, file.read_bytes())
            assert isinstance(came, Reply) or 0 < len(str(came)) < 3000
            file.write_text(json.dumps(request))
            damage(file, rng)
            try:
                read_request(file.read_bytes())
            except Failure as refused:
                assert len(str(refused)) < 1000
