"""The names of agents: which one plays is always said, and a missing one by its own cause."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
import torch

from prompt_r1.errors import UsageError
from prompt_r1.pair.api import open_pair
from prompt_r1.pair.named_agent import SETTINGS_FILE, NamedAgent, preset_config, resolve_agent
from prompt_r1.pair.settings import PairConfig, choose_pair
from tests.support.exports import save_run


def test_the_newest_run_is_named_with_its_step_and_seed(tmp_path, monkeypatch):
    """After training seed 7 the README's own question had another answer, and nothing said why."""
    monkeypatch.chdir(tmp_path)
    save_run(Path("runs/mini-seed8"), seed=8, step=60, saved=1)
    save_run(Path("runs/mini-seed7"), seed=7, step=80, saved=2)
    newest = resolve_agent("").describe(environment="mini", seed=7)
    assert newest == "agent runs/mini-seed7, step 80, environment mini, seed 7"


def test_an_agent_of_step_0_is_said_to_be_untrained(tmp_path, monkeypatch):
    """A short run may keep the agent of step 0, and `infer.py` asked it without a word."""
    monkeypatch.chdir(tmp_path)
    save_run(Path("runs/short"), seed=0, step=0, saved=1)
    line = resolve_agent("runs/short").describe(environment="mini", seed=0)
    assert line == "agent runs/short, step 0 (as it was before training), environment mini, seed 0"


@pytest.mark.parametrize("typed", ["runs/mini-sed0", "./none", "one/two/three"])
def test_a_typo_in_the_path_of_an_agent_is_a_typo_in_a_path(tmp_path, monkeypatch, typed):
    """A bug: `runs/mini-sed0` was taken for a name of the Hub, and a key of OpenAI was asked for."""
    monkeypatch.chdir(tmp_path)
    for saved, name in enumerate(("mini-seed0", "own")):
        save_run(Path("runs", name), seed=0, step=1, saved=saved)
        os.utime(Path("runs", name, "agent/config.json"), (saved, saved))
    with pytest.raises(UsageError) as refused:
        resolve_agent(typed)
    end = "there is no such folder; there are agents in runs/own, runs/mini-seed0"
    assert str(refused.value) == f"--agent {typed}: {end}"
    for name in ("Qwen/Qwen3-0.6B", "gpt2"):
        assert resolve_agent(name).make(seed=0) == name


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B-Instruct-2507", "gpt2"])
def test_a_hub_id_is_no_typo_of_a_run_with_a_similar_name(tmp_path, monkeypatch, name):
    """A bug: after its first export, a training of Qwen/NAME with `--out runs/NAME` could not be resumed."""
    monkeypatch.chdir(tmp_path)
    save_run(Path("runs", Path(name).name), seed=0, step=1, saved=1)
    assert resolve_agent(name).make(seed=0) == name


def test_a_folder_that_is_called_mini_is_no_mini_agent(asking_agent, tmp_path, monkeypatch):
    """A bug: `infer.py --agent ./mini` built the mini agent, and played it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(asking_agent, "mini")
    assert resolve_agent("./mini").make(seed=0) == Path("mini")


def test_an_agent_that_was_trained_to_answer_alone_is_not_the_newest_that_asks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_run(Path("runs/asks"), seed=0, step=60, saved=1)
    save_run(Path("runs/alone"), seed=0, step=60, saved=2, env="none")
    assert resolve_agent("").folder == Path("runs/asks/agent")


def test_an_agent_that_was_trained_with_an_unknown_setting_plays(tmp_path):
    save_run(tmp_path, seed=3, step=60, saved=1)
    with (tmp_path / "agent" / SETTINGS_FILE).open("a") as file:
        file.write("gone: 0.5\n")
    assert resolve_agent(str(tmp_path)).config.seed == 3


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "threads"), [("mini", 1), ("smollm2", 2)])
def test_a_mini_agent_plays_in_one_thread_and_a_real_one_in_those_of_torch(
    two_threads, asking_agent, monkeypatch, name, threads
):
    """With a thread for each core, an evaluation of a mini agent took three times as long."""
    monkeypatch.setattr("prompt_r1.model.machine.usable_cores", lambda: 2)
    monkeypatch.setattr("prompt_r1.model.machine.TORCH_THREADS", 2)
    named = NamedAgent(name, preset_config(name), start=name, folder=asking_agent)
    asyncio.run(open_pair(choose_pair(PairConfig(env="mini"), ["env"], named)))
    assert torch.get_num_threads() == threads
