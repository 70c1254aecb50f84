"""The systems of an evaluation, the settings that its answers have in common."""

import asyncio
import errno
import gc
import json
import re
import shutil
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import save_file

from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import open_account, parse_fields
from prompt_r1.errors import FatalEnvError, UsageError
from prompt_r1.evaluation import tables
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.folder_settings import dependencies_of, write_settings
from prompt_r1.evaluation.making import open_environment_of
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import FILE, System
from prompt_r1.evaluation.preflight import (
    choose_systems,
    common_seed,
    data_for,
    find_agents,
    find_environments,
    methods_of,
    read_evaluation,
)
from prompt_r1.evaluation.searches import Data
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.named_agent import SETTINGS_FILE, NamedAgent, resolve_agent
from prompt_r1.settings.agent import ENVIRONMENT_SYSTEM
from prompt_r1.settings.train import TrainConfig
from tests.support.exports import save_run
from tests.support.json_server import JsonHandler, serving
from tests.support.programs import run_here
from tests.support.providers import error_of


def save_model(folder: Path) -> None:
    """Save a model of which each file has a few bytes."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes(folder.name.encode())
    save_weights(folder / "model.safetensors", folder.name)


def save_weights(path: Path, text: str) -> None:
    """Save a text in the form of weights."""
    save_file({"weight": torch.tensor([*text.encode()])}, path)


@pytest.fixture
def agents(tmp_path) -> dict[str, NamedAgent]:
    """Two trained agents and their common start; the weights are a few bytes."""
    for name in ("a", "b", "start"):
        save_model(tmp_path / name)
    config = TrainConfig(env="large")
    start = str(tmp_path / "start")
    return {f"runs/{name}": NamedAgent(f"runs/{name}", config, start, tmp_path / name) for name in "ab"}


def evaluation_of(config: EvaluateConfig, agents: Mapping[str, NamedAgent]) -> Evaluation:
    """An evaluation of these agents, without questions."""
    config = replace(config, agent=tuple(agents))
    if config.grpo_agent:
        agents = {**agents, config.grpo_agent: resolve_agent(config.grpo_agent)}
    methods = methods_of(config)
    environments = find_environments(config, (), methods, agents)
    systems = choose_systems(config, methods, environments, agents)
    return Evaluation(config, 0, {}, agents, systems, environments)


def systems_of(
    config: EvaluateConfig, agents: Mapping[str, NamedAgent]
) -> Mapping[System, NamedAgent | None]:
    """The systems of an evaluation of these agents."""
    return evaluation_of(config, agents).systems


def evaluation_of_system(config: EvaluateConfig, system: System, agent: NamedAgent) -> Evaluation:
    """An evaluation of one system, without questions."""
    return Evaluation(config, 0, {}, {}, {system: agent}, environments={})


def digested_by(config: EvaluateConfig, agents: Mapping[str, NamedAgent]) -> set[str]:
    """The names of the digests in the config.yaml of an evaluation of these agents."""
    return {name for name in dependencies_of(evaluation_of(config, agents)) if name.startswith("digest of ")}


def test_tables_runs_the_methods_of_table_5_with_every_environment_and_agent(agents):
    config = EvaluateConfig(tables=True, env=("large", "other"))
    counts = Counter(system.method for system in systems_of(config, agents))
    assert counts["direct"] == 2 and counts["prompt-r1"] == 4
    assert all(count == 1 for method, count in counts.items() if method not in ("direct", "prompt-r1"))
    assert set(METHODS) - set(counts) == {"bc", "rft", "grpo-only"}, "grpo-only needs --grpo-agent"


def test_searches_need_a_model_that_writes_prompts_which_the_mini_world_is_not(agents):
    """--tables leaves them out, and --method opro says what is missing."""
    mini = EvaluateConfig(tables=True, env=("mini",))
    assert not {"opro", "textgrad", "gepa"} & {system.method for system in systems_of(mini, agents)}
    written = systems_of(replace(mini, optimizer_env="large"), agents)
    assert {"opro", "textgrad", "gepa"} <= {system.method for system in written}
    with pytest.raises(UsageError, match="--method opro: the mini world"):
        systems_of(replace(mini, method=("opro",)), agents)
    with pytest.raises(UsageError, match="--method opro: the mini world"):
        systems_of(replace(mini, method=("opro",), env=("large",), optimizer_env="mini"), agents)


def test_without_an_environment_no_method_asks_it_alone(agents):
    """An agent of --env none was compared with `direct (none)`, whose EM was 0."""
    alone = {"runs/a": replace(agents["runs/a"], config=TrainConfig(env="none"))}
    for config in (EvaluateConfig(), EvaluateConfig(env=("none",)), EvaluateConfig(tables=True)):
        methods = {system.method for system in systems_of(config, alone)}
        assert {"untrained", "prompt-r1"} <= methods
        assert not {"direct", "cot", "opro", "textgrad", "gepa"} & methods
    both = systems_of(EvaluateConfig(env=("none", "mini")), alone)
    assert [system.environment for system in both if system.method == "direct"] == ["mini"]
    with pytest.raises(UsageError, match=r"--method direct .*--env"):
        systems_of(EvaluateConfig(method=("direct",)), alone)


def test_by_default_the_environment_is_that_of_the_training(agents):
    systems = list(systems_of(EvaluateConfig(), agents))
    assert {system.environment for system in systems} == {"large"}
    assert [system.method for system in systems] == ["direct", "untrained", "prompt-r1", "prompt-r1"]


def test_each_method_is_answered_by_its_own_agent(agents, tmp_path):
    alone = str(tmp_path / "alone")
    save_run(tmp_path / "alone", seed=0, step=1, saved=1, env="none")
    config = EvaluateConfig(method=tuple(METHODS), grpo_agent=alone)
    first = {"runs/a": replace(agents["runs/a"], start="mini")}
    answering = {system.method: system.agent for system in systems_of(config, first)}
    own = {"grpo-only": alone, "agent-only": "runs/a", "prompt-r1": "runs/a"}
    own |= dict.fromkeys(("sft", "untrained", "bc", "rft"), "mini")
    assert answering == {name: own.get(name, "") for name in METHODS}


def test_answers_of_the_environment_alone_depend_on_no_agent(agents):
    """A folder with answers of `direct` was refused when an agent had changed that had answered nothing."""
    config = EvaluateConfig(method=("direct",))
    assert digested_by(config, agents) == set()


def test_answers_of_a_start_do_not_depend_on_what_became_of_it(agents, tmp_path):
    """A bug: a folder with answers of `untrained` was refused after the training had gone on."""
    config = EvaluateConfig(method=("untrained",))
    assert digested_by(config, agents) == {f"digest of {tmp_path}/start"}


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].needs_environment])
def test_a_method_without_environment_opens_none(agents, monkeypatch, name):
    """The mini world was opened, and asked "Hi"."""

    def refuse(checked: object, **_: object) -> Environment:
        raise AssertionError(f"{checked} was opened")

    monkeypatch.setattr("prompt_r1.evaluation.making.open_environment", refuse)
    config, system = EvaluateConfig(), System(name)
    evaluation = evaluation_of_system(config, system, agents["runs/a"])
    opened = open_environment_of(evaluation, system, open_account(config))
    assert opened.name == "nobody"


OTHER_GAMES = [{"max_turns": 1}, {"instruction": "short"}, {"rule": "release"}, {"max_tokens": 99}]


@pytest.mark.parametrize("change", OTHER_GAMES, ids=str)
def test_runs_share_the_answers_of_their_start_only_if_it_plays_the_same_game(agents, change, tmp_path):
    """`untrained` of a run was answered by the game of another run, with other rules, without a word."""
    config = EvaluateConfig(method=("untrained",), out=str(tmp_path))
    first, second = ({name: agents[name]} for name in ("runs/a", "runs/b"))
    changed = replace(agents["runs/b"], config=replace(agents["runs/b"].config, **change))
    with pytest.raises(UsageError, match=r"runs/b .*games differ"):
        systems_of(config, {**first, "runs/b": changed})
    # The same in two evaluations with one --out.
    (tmp_path / FILE).touch()
    for same in (first, second):
        write_settings(evaluation_of(config, same))
    with pytest.raises(UsageError, match=r"game of .* has changed"):
        write_settings(evaluation_of(config, {"runs/b": changed}))


def test_bc_with_another_agent_than_the_mini_agent_is_refused_before_anything_is_asked(agents):
    """It was refused when its turn came, after the calls of the methods before it."""
    with pytest.raises(UsageError, match=r"bc .*mini agent"):
        systems_of(EvaluateConfig(method=("direct", "bc")), agents)


@pytest.mark.parametrize(
    ("trained", "env"),
    [
        ({"env": "none"}, ()),
        ({"env": "large"}, ("none",)),
        ({"env": "none"}, ("large",)),
        ({"env": "large", "max_turns": 1}, ()),
    ],
)
@pytest.mark.parametrize("name", ["bc", "rft"])
def test_games_without_an_environment_are_not_imitated(tmp_path, name, trained, env):
    """A bug: rft played a hundred games of one turn, of which none counts, and advised a warm start."""
    agents = {"runs/a": NamedAgent("runs/a", TrainConfig(**trained), "mini", tmp_path)}
    with pytest.raises(UsageError, match=rf"^{name} imitates games .*, and runs/a asks none: leave it out"):
        systems_of(EvaluateConfig(method=(name,), env=env), agents)


def test_mini_agents_of_other_seeds_are_other_starts(agents):
    mini = {name: replace(spec, start="mini") for name, spec in agents.items()}
    config = EvaluateConfig(method=("untrained",))
    assert len(systems_of(config, mini)) == 1
    mini["runs/b"] = replace(mini["runs/b"], config=TrainConfig(env="large", seed=1))
    with pytest.raises(UsageError, match="their games differ"):
        systems_of(config, mini)


@pytest.mark.parametrize("name", ["sft", "bc", "rft"])
def test_agents_with_other_starts_are_fine_tuned_into_folders_of_their_own(agents, name, tmp_path):
    """The second agent played with the fine-tuned weights of the first, under its own name."""

    def folder(agent: NamedAgent) -> Path:
        system = System(name, agent=agent.start)
        return evaluation_of_system(EvaluateConfig(out=str(tmp_path)), system, agent).folder_of(system)

    first, same = agents.values()
    starts = ["runs/a-b", "runs/a/b", "mini", str(tmp_path / "start")]
    assert folder(first) == folder(same)
    assert len({folder(replace(first, start=start)) for start in starts}) == len(starts)


@pytest.mark.parametrize("is_named", [False, True])
def test_settings_of_the_training_are_those_of_its_environment(asking_agent, tmp_path, monkeypatch, is_named):
    """A bug: the environment of the training was asked without the settings of the training.

    An environment that the user names has the user's settings.
    """
    agent = tmp_path / "agent"
    shutil.copytree(asking_agent, agent)
    trained = "env: large\nenv_system: As trained.\nenv_args: '{\"top_p\": 0.5}'\n"
    (agent / SETTINGS_FILE).write_text(trained)
    opened = Mock(side_effect=UsageError("seen"))
    monkeypatch.setattr("prompt_r1.evaluation.making.open_environment", opened)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    line = ["--agent", agent, "--method", "direct", "--limit", "1", "--out", tmp_path / "out"]
    with pytest.raises(UsageError, match="seen"):
        run_here("evaluate.py", *line, *(["--env", f"hf:{asking_agent}"] if is_named else []))
    [checked] = opened.call_args.args
    settings = checked.config
    fields = parse_fields(settings.env_args)
    if is_named:
        assert (settings.env_system, fields) == (ENVIRONMENT_SYSTEM, {})
    else:
        assert (settings.env_system, fields) == ("As trained.", {"top_p": 0.5})


@pytest.mark.parametrize("change", [{"env_args": '{"top_p": 0.5}'}, {"env_system": ""}, {"route": "uniform"}])
def test_a_folder_refuses_answers_of_an_environment_that_was_asked_with_other_settings(
    agents, change, tmp_path
):
    """A bug: `direct` kept the answers to the requests of another training, and the table said nothing."""
    (tmp_path / FILE).touch()
    config = EvaluateConfig(method=("direct",), out=str(tmp_path))
    changed = replace(agents["runs/b"], config=replace(agents["runs/b"].config, **change))
    write_settings(evaluation_of(config, {"runs/a": agents["runs/a"]}))
    write_settings(evaluation_of(config, {"runs/b": agents["runs/b"]}))
    with pytest.raises(UsageError, match="request to large has changed"):
        write_settings(evaluation_of(config, {"runs/b": changed}))


def test_agents_with_other_settings_of_one_environment_are_not_compared(agents):
    """A bug: both were asked with the default settings, with which neither was trained."""
    other = TrainConfig(env="large", env_system="")
    agents["runs/b"] = replace(agents["runs/b"], config=other)
    with pytest.raises(UsageError, match=r"runs/b .*environment large"):
        systems_of(EvaluateConfig(), agents)
    assert systems_of(EvaluateConfig(env=("large",)), agents)
    # A bug: they were refused also if nothing is asked.
    assert len(systems_of(EvaluateConfig(method=("agent-only",)), agents)) == 2


def test_agents_with_other_seeds_are_compared_only_with_a_seed_of_the_user(agents):
    """Questions of the mini world are made from the seed."""
    assert common_seed(EvaluateConfig(), {}) == 0
    agents["runs/b"] = replace(agents["runs/b"], config=TrainConfig(seed=1))
    with pytest.raises(UsageError, match="other seeds"):
        common_seed(EvaluateConfig(), agents)
    assert common_seed(EvaluateConfig(seed=7), agents) == 7


def test_the_newest_run_stays_the_agent_if_a_training_exports_another(tmp_path, monkeypatch):
    """It was looked up again at each use, so answers and prompts could go to two folders."""
    monkeypatch.chdir(tmp_path)
    save_run(Path("runs/old"), seed=0, step=1, saved=1)
    evaluation = read_evaluation([])
    save_run(Path("runs/new"), seed=0, step=1, saved=2)
    [(name, agent)] = evaluation.agents.items()
    assert (name, evaluation.config.out) == ("runs/old", "runs/eval-old")
    assert agent.folder == Path("runs/old/agent")


@pytest.fixture
def two_runs(tmp_path, monkeypatch) -> None:
    """A run in the mini world, and a run without an environment and with another seed."""
    monkeypatch.chdir(tmp_path)
    save_run(Path("runs/mini"), seed=0, step=1, saved=1)
    save_run(Path("runs/none"), seed=3, step=1, saved=1, env="none")


def test_grpo_only_needs_no_agent_but_its_own(two_runs):
    """A bug: it took folder and seed of the newest mini run, and was refused if there was none."""
    line = ["--method", "grpo-only", "--grpo-agent", "runs/none", "--max-new", "9"]
    evaluation = read_evaluation(line)
    assert [*evaluation.agents] == ["runs/none"]
    assert (evaluation.seed, evaluation.config.out) == (3, "runs/eval-none")
    [system] = evaluation.systems
    assert evaluation.systems[system].config.max_new == 9, "a bug: it had the limit of its training"
    shutil.rmtree("runs/mini")
    assert [*read_evaluation(line).agents] == ["runs/none"]


def test_the_agent_of_grpo_only_is_asked_about_the_world_of_its_training(two_runs):
    """A bug: it was asked about the world of --agent, of which it had seen nothing."""
    line = ["--method", "prompt-r1", "grpo-only", "--agent", "runs/mini", "--grpo-agent", "runs/none"]
    with pytest.raises(UsageError, match="runs/mini and runs/none were trained with other seeds"):
        read_evaluation(line)


def test_tables_asks_for_no_questions_for_the_searches_that_it_leaves_out(two_runs):
    """A bug: with the mini world as the environment, it refused to begin without --val-data."""
    Path("own.jsonl").write_text('{"question": "Who?", "answer": "Anna"}\n')
    line = ["--tables", "--agent", "runs/mini", "--data", "own.jsonl"]
    methods = {system.method for system in read_evaluation([*line, "--train-data", "own.jsonl"]).systems}
    assert "sft" in methods and "textgrad" not in methods
    with pytest.raises(UsageError, match="sft needs training questions"):
        read_evaluation(line)


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("runs/old", "runs/eval-old"),
        ("runs/old/agent", "runs/eval-old"),
        ("runs/old/agent/", "runs/eval-old"),
        ("agent", "runs/eval-agent"),  # a folder of that name here, not of a run
    ],
)
def test_agents_of_two_runs_have_their_answers_in_two_folders(tmp_path, monkeypatch, name, out):
    """`--agent runs/a/agent` and `--agent runs/b/agent` shared runs/eval-agent, and so one table."""
    monkeypatch.chdir(tmp_path)
    save_run(Path("runs/old"), seed=0, step=1, saved=1)
    shutil.copytree("runs/old/agent", "agent")
    assert read_evaluation(["--agent", name]).config.out == out


@pytest.fixture
def evaluate_here(tmp_path, monkeypatch):
    """Evaluate the environment alone on one question, in the same folder; returns the number of lines."""
    monkeypatch.chdir(tmp_path)
    for name in ("own", "train"):
        Path(f"{name}.jsonl").write_text('{"question": "Who?", "answer": "Anna"}\n')

    def run(*arguments: str) -> int:
        line = "--method direct --env mini --data own.jsonl --out out --device cpu --train-data train.jsonl"
        run_here("evaluate.py", *line.split(), *arguments)
        return len(Path("out/predictions.jsonl").read_text().splitlines())

    assert run() == 1
    return run


@pytest.mark.parametrize(
    "other",
    ["--limit 3", "--env-concurrency 1", "--tables --method direct", "--metrics official", "--device auto"],
)
def test_the_same_settings_use_the_answers_again(evaluate_here, other):
    assert evaluate_here(*other.split()) == 1


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("--seed 1", "its answers were made with seed = 0, not 1: give another --out"),
        ("--temperature 0.5", "made with temperature = 0.0, not 0.5"),
        ("--max-turns 3", "made with max_turns = 0, not 3"),
        ("--max-new 9", "made with max_new = 0, not 9"),
        ("--optimize-calls 9", "made with optimize_calls = 5000, not 9"),
        ('--env-args {"top_p":0.5}', "made with env_args = "),
    ],
)
def test_a_folder_refuses_answers_with_other_settings(evaluate_here, other, sentence):
    kept = Path("out/config.yaml").read_text()
    with pytest.raises(UsageError, match=sentence):
        evaluate_here(*other.split())
    assert Path("out/config.yaml").read_text() == kept


def test_a_file_that_is_not_there_is_refused_although_no_method_reads_it(evaluate_here):
    """A bug: the wrong name was kept with the answers, so the right one was refused after they were paid."""
    with pytest.raises(UsageError, match=r"^valid\.jsonl: there is no such file"):
        evaluate_here("--val-data", "valid.jsonl", "--out", "other")
    assert not Path("other").exists()


def test_a_folder_refuses_answers_after_a_file_has_changed(evaluate_here):
    """Only the names of the files were compared, so the answers of the old prompt were reused."""
    Path("train.jsonl").write_text('{"question": "What?", "answer": "Bob"}\n')
    with pytest.raises(UsageError, match=r"digest of train\.jsonl has changed since its answers: .*--out"):
        evaluate_here()


def test_a_folder_of_an_earlier_version_is_refused(evaluate_here):
    """Its config.yaml has settings and digests in one mapping, so the digests would not be compared."""
    kept = yaml.safe_load(Path("out/config.yaml").read_text())
    depends_on = kept.pop("depends_on")
    Path("out/config.yaml").write_text(yaml.safe_dump(kept | depends_on))
    with pytest.raises(UsageError, match=r"^--out out: its answers are of an earlier version: give another"):
        evaluate_here()


@pytest.mark.parametrize("changed", ["first", "second"])
def test_a_changed_model_of_a_pool_is_noticed(tmp_path, changed):
    """Old and new answers of hf:A,hf:B shared a table, if it was the second model that had changed."""
    for name in ("first", "second"):
        save_model(tmp_path / name)
    (tmp_path / FILE).touch()
    pool = f"hf:{tmp_path}/first,hf:{tmp_path}/second"
    config = EvaluateConfig(env=(pool,), method=("direct",), out=str(tmp_path))
    evaluation = evaluation_of(config, {})
    write_settings(evaluation)
    save_weights(tmp_path / changed / "model.safetensors", "after")
    with pytest.raises(UsageError, match=f"{changed} has changed .*--out"):
        write_settings(evaluation)


def test_an_agent_of_several_systems_has_one_digest(tmp_path):
    save_model(tmp_path)
    agents = {"a": NamedAgent("trained", TrainConfig(), start=str(tmp_path))}
    config = EvaluateConfig(env=(f"hf:{tmp_path}",), method=("sft", "untrained", "rft"))
    assert digested_by(config, agents) == {f"digest of {tmp_path}"}


def test_an_agent_that_is_named_by_its_run_has_one_digest(tmp_path):
    """The weights were read twice: in the folder of the agent, and again under the name of its run."""
    run = tmp_path / "run"
    save_run(run, seed=0, step=1, saved=1)
    config = EvaluateConfig(agent=(str(run),), method=("prompt-r1",))
    assert digested_by(config, find_agents(config, config.method)) == {f"digest of {run}/agent"}


def test_a_digest_reads_little_of_the_weights(tmp_path):
    """Each evaluate.py read all weights, also one that only wrote the tables anew."""
    save_model(tmp_path)
    large = torch.zeros(1000)
    digests = []
    for position in (0, 1, 999):
        large[position] += 1
        save_file({"weight": large}, tmp_path / "model.safetensors")
        config = EvaluateConfig(env=(f"hf:{tmp_path}",), method=("direct",))
        digests.append(dependencies_of(evaluation_of(config, {}))[f"digest of {tmp_path}"])
    assert digests[0] != digests[1] == digests[2]


@pytest.mark.parametrize("name", ["prompt-r1", "untrained"])
def test_a_mini_agent_that_has_been_rebuilt_is_noticed(name, tmp_path, monkeypatch):
    """A bug: nothing was compared, because the folder of a rebuilt agent has another name."""
    config = EvaluateConfig(agent=("mini",), method=(name,))
    digests = []
    for folder in (tmp_path / "mini-agent-old", tmp_path / "mini-agent-new"):
        save_model(folder)
        monkeypatch.setattr(NamedAgent, "make", lambda agent, seed, folder=folder: folder)
        found = find_agents(config, config.method)
        digests.append(dependencies_of(evaluation_of(config, found))["digest of mini"])
    assert digests[0] != digests[1]


def test_a_folder_beside_the_run_is_not_taken_for_what_has_its_name(tmp_path, monkeypatch):
    """A bug: with a folder `mini`, every change in it refused the next evaluation in the mini world."""
    monkeypatch.chdir(tmp_path)
    for name in ("mini", "smollm2", "large"):
        Path(name).mkdir()
    agents = {"mini": NamedAgent("mini", TrainConfig(), "mini")}
    data = {"train_data": ("mini",), "val_data": ("mini",)}
    config = EvaluateConfig(agent=("mini",), env=("mini", "smollm2,large"), method=("untrained",), **data)
    assert digested_by(config, agents) == {"digest of mini"}


def test_a_users_function_is_asked_for_questions_after_all_other_checks(tmp_path, monkeypatch):
    """A bug: with `--env hf:nosuch`, a function that took minutes ran before the mistake was reported."""
    (tmp_path / "slow_questions.py").write_text("def questions():\n    raise SystemExit('it was asked')\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = ["--data", "py:slow_questions:questions", "--env", "hf:nosuch", "--method", "direct"]
    with pytest.raises(UsageError, match="nosuch"):
        read_evaluation([*line, "--out", str(tmp_path / "out")])


def test_a_changed_model_that_writes_prompts_is_noticed(tmp_path):
    save_model(tmp_path)
    config = EvaluateConfig(method=("direct",), env=("mini",), optimizer_env=f"hf:{tmp_path}")
    assert digested_by(config, {}) == {f"digest of {tmp_path}"}


async def loaded_questions():
    """Questions that a function of the user loads in an event loop of its own."""
    return [{"question": f"Who is {number}?", "answer": "Anna"} for number in range(9)]


def own_questions(split, seed):
    return asyncio.run(loaded_questions())


def test_a_users_function_may_run_an_event_loop_to_load_the_questions_for_a_search(tmp_path):
    """A bug: it was called inside the event loop of the evaluation, where asyncio.run fails."""
    spec = "py:tests.evaluation.test_systems:own_questions"
    line = f"--method opro --env py:tests.evaluation.test_systems:Wordless --optimize-calls 9 --data {spec}"
    train = f"--train-data {spec} --optimize-examples 2 --device cpu --limit 2"
    run_here("evaluate.py", *line.split(), *train.split(), "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out/results.json").read_text())["opro"]["em"] == 1


class Wordless:
    """Answers, except when it is asked to think."""

    def ask(self, messages):
        if "step by step" in messages[-1]["content"]:
            raise UsageError("there is nothing to think about")
        return "Anna"


def test_finished_rows_are_shown_whatever_fails_after_them(tmp_path, capsys):
    """`--method sft rft`: sft was done, rft had nothing to imitate, and no table was shown."""
    (tmp_path / "own.jsonl").write_text('{"question": "Who?", "answer": "Anna"}\n')
    line = "--method direct cot --env py:tests.evaluation.test_systems:Wordless --device cpu"
    with pytest.raises(UsageError, match="nothing to think about"):
        run_here("evaluate.py", *line.split(), "--data", tmp_path / "own.jsonl", "--out", tmp_path / "out")
    header, row = capsys.readouterr().out.splitlines()[:2]
    assert header.split()[:3] == ["method", "n", "EM"] and row.split()[:3] == ["direct", "1", "1.000"]
    assert json.loads((tmp_path / "out/results.json").read_text())["direct"]["em"] == 1


class Fails:
    """Answers, but when it is asked to think, raises the error of the test."""

    error: ClassVar[BaseException]

    def ask(self, messages):
        if "step by step" in messages[-1]["content"]:
            raise self.error
        return "Anna"


@pytest.mark.parametrize("error", [FatalEnvError("no such model"), KeyboardInterrupt()])
@pytest.mark.parametrize("disk", ["free", "full"])
def test_finished_rows_are_shown_after_ctrl_c_and_on_a_full_disk(error, disk, tmp_path, monkeypatch, capsys):
    """A bug: the tables were written before the row was printed, and a full disk refused them."""

    def fill_up(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "own.jsonl").write_text('{"question": "Who?", "answer": "Anna"}\n')
    monkeypatch.setattr(Fails, "error", error, raising=False)
    if disk == "full":
        monkeypatch.setattr(tables, "replace_file", fill_up)
    line = "--method direct cot --env py:tests.evaluation.test_systems:Fails --device cpu"
    with pytest.raises(OSError if disk == "full" else type(error)):
        run_here("evaluate.py", *line.split(), "--data", tmp_path / "own.jsonl", "--out", tmp_path / "out")
    header, row = capsys.readouterr().out.splitlines()[:2]
    assert header.split()[:3] == ["method", "n", "EM"] and row.split()[:3] == ["direct", "1", "1.000"]


def test_an_environment_that_accepts_no_call_is_reported_before_an_agent_is_loaded(asking_agent, tmp_path):
    """A large agent may take minutes to load, and a method to fine-tune one takes hours."""

    class Expired(JsonHandler):
        def do_POST(self) -> None:
            self.body()
            self.answer(401, error_of("the key has expired"))

    agent = shutil.copytree(asking_agent, tmp_path / "agent")
    save_weights(agent / "model.safetensors", "not the weights of this model")
    line = [
        "--method",
        "prompt-r1",
        "--agent",
        agent,
        "--out",
        tmp_path / "out",
        "--limit",
        1,
        "--data",
        "mini",
    ]
    with serving(Expired) as url, pytest.raises(FatalEnvError, match="the key has expired"):
        run_here("evaluate.py", *line, "--env", f"large@{url}")


class Counted:
    """Answers every question, and knows how many of its instances are alive."""

    alive: ClassVar = weakref.WeakSet["Counted"]()
    most: ClassVar = 0

    def __init__(self) -> None:
        gc.collect()  # as the loading of a model does
        Counted.alive.add(self)
        Counted.most = max(Counted.most, len(Counted.alive))

    def ask(self, messages):
        return "Anna"


def test_each_method_frees_its_environment_before_the_next_method_opens_one(tmp_path):
    """A bug: with `--env hf:DIR`, three methods held three copies of the model, each with its KV cache."""
    (tmp_path / "own.jsonl").write_text('{"question": "Who?", "answer": "Anna"}\n')
    line = "--method direct cot --env py:tests.evaluation.test_systems:Counted --device cpu"
    run_here("evaluate.py", *line.split(), "--data", tmp_path / "own.jsonl", "--out", tmp_path / "out")
    assert Counted.most == 1


def test_a_folder_remembers_the_contents_of_all_earlier_commands(tmp_path):
    (tmp_path / FILE).touch()
    evaluations = []
    for name in ("a", "b"):
        save_run(tmp_path / name, seed=0, step=1, saved=1)
        config = EvaluateConfig(agent=(str(tmp_path / name),), method=("prompt-r1",), out=str(tmp_path))
        evaluations.append(evaluation_of(config, find_agents(config, config.method)))
    first, second = evaluations
    write_settings(first)
    write_settings(second)
    save_weights(tmp_path / "a/agent/model.safetensors", "new weights")
    write_settings(second)
    with pytest.raises(UsageError, match="a/agent has changed"):
        write_settings(first)
    # A bug: a method that asks only the start was added, and the table showed the old answers of the agent.
    untrained = replace(first.config, method=("untrained",))
    with pytest.raises(UsageError, match="a/agent has changed"):
        write_settings(evaluation_of(untrained, find_agents(untrained, untrained.method)))


def test_more_methods_and_questions_are_added_to_a_folder(evaluate_here):
    assert evaluate_here("--method", "direct", "cot") == 2
    Path("own.jsonl").write_text(
        '{"question": "Who?", "answer": "Anna"}\n{"question": "Q?", "answer": "B"}\n'
    )
    assert evaluate_here("--method", "direct", "cot") == 4
    assert evaluate_here("--method", "cot") == 4
    results = json.loads(Path("out/results.json").read_text())
    assert {name: row["n"] for name, row in results.items()} == {"cot": 2, "direct": 2}, (
        "the tables have all answers to these questions, also those of earlier commands"
    )


STARTS_RIGHT = """
def starts_right(answer, question):
    return question.answers[0][0] == answer[:1]
"""


def test_a_users_metric_scores_recorded_answers_without_a_call(evaluate_here, monkeypatch, capsys):
    """The answers are the metric's arguments; its means and Wilson's interval stand beside EM's."""
    Path("own_metric.py").write_text(STARTS_RIGHT)
    monkeypatch.setattr("sys.path", [*sys.path, str(Path.cwd())])
    row = json.loads(Path("out/predictions.jsonl").read_text())
    rows = [row | {"prediction": answer, "sample": number} for number, answer in enumerate(["Abe", None])]
    Path("out/predictions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    capsys.readouterr()
    assert evaluate_here("--repeats", "2", "--metric", "own_metric:starts_right") == 2, "nothing was asked"

    results = json.loads(Path("out/results.json").read_text())["direct"]
    name = "own_metric:starts_right"
    assert (results["em"], results[name]) == (0.0, 0.5), "one of two repeats begins with the A of Anna"
    # Wilson's interval of a rate of 1/2 over one question: 1/2 ± z / (2 √(1 + z²)).
    half = 1.959964 / (2 * (1 + 1.959964**2) ** 0.5)
    assert results[f"{name}_low"] == pytest.approx(0.5 - half, abs=1e-6)
    assert results[f"{name}_high"] == pytest.approx(0.5 + half, abs=1e-6)
    header, shown, *_ = capsys.readouterr().out.splitlines()
    assert name in header.split() and "0.500 [0.05, 0.95]" in shown
    assert f" {name} |" in Path("out/tables.md").read_text()


def test_questions_of_two_datasets_may_have_the_same_id(evaluate_here):
    assert evaluate_here("--data", "train.jsonl") == 2
    with pytest.raises(UsageError, match=r"of own .*twice"):
        evaluate_here("--data", "own.jsonl")


def test_a_note_says_how_many_questions_are_in_the_files_of_the_agents_training(
    asking_agent, tmp_path, capsys
):
    """`evaluate.py` said nothing, although the run's settings name the file."""
    for file in asking_agent.iterdir():
        (tmp_path / file.name).symlink_to(file)
    rows = [f'{{"question": "abc {number}?", "answer": "Anna"}}\n' for number in range(20)]
    (tmp_path / "own.jsonl").write_text("".join(rows))
    settings = (
        f"env: mini\ndata: [{tmp_path}/own.jsonl, 'py:os:abort']\nmax_tokens: 900\ninstruction: short\n"
    )
    (tmp_path / SETTINGS_FILE).write_text(settings)
    with (tmp_path / "more.jsonl").open("w") as file:
        file.writelines([*rows, '{"question": "def?", "answer": "Anna"}\n'])
    line = ["--agent", tmp_path, "--data", tmp_path / "more.jsonl", "--method", "direct", "--device", "cpu"]
    run_here("evaluate.py", *line, "--out", tmp_path / "out")
    assert "20 of these 21 questions are in the files of the agent's training" in capsys.readouterr().err


def test_an_agent_whose_question_files_have_changed_is_evaluated(asking_agent, tmp_path):
    """The note on its training read the old file, and ended the evaluation of other questions."""
    for file in asking_agent.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "old.csv").write_text("topic,answer\nabc,Anna\n")
    (tmp_path / "new.jsonl").write_text('{"question": "abc?", "answer": "Anna"}\n')
    settings = f"env: mini\ndata: ['{tmp_path}/old.csv']\nmax_tokens: 900\ninstruction: short\n"
    (tmp_path / SETTINGS_FILE).write_text(settings)
    line = ["--agent", tmp_path, "--data", tmp_path / "new.jsonl", "--method", "direct", "--device", "cpu"]
    run_here("evaluate.py", *line, "--out", tmp_path / "out")
    assert (tmp_path / "out/results.json").is_file()


@pytest.mark.parametrize("reward", ["", "os:abort"])
def test_a_note_says_that_the_reward_is_not_the_one_of_the_training(asking_agent, tmp_path, capsys, reward):
    """The test after a training scored by --reward, evaluate.py by eq. 15, and both called it `reward`."""
    for file in asking_agent.iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = f"env: mini\nmax_tokens: 900\ninstruction: short\nreward: '{reward}'\n"
    (tmp_path / SETTINGS_FILE).write_text(settings)
    line = f"--agent {tmp_path} --data mini --limit 1 --method prompt-r1 --device cpu --out {tmp_path}/out"
    run_here("evaluate.py", *line.split())
    assert ("--reward os:abort. `reward` in" in capsys.readouterr().err) == bool(reward)
    assert json.loads((tmp_path / "out/results.json").read_text())["prompt-r1"]["reward"] <= 1


def test_the_digest_of_an_agent_covers_its_model_and_the_settings_of_its_training(tmp_path):
    digests = []
    for changed in ("", "config.json", SETTINGS_FILE, "model-1.safetensors", "model-2.safetensors"):
        for name in ("config.json", SETTINGS_FILE):
            (tmp_path / name).write_text("new" if name == changed else "old")
        for name in ("model-1.safetensors", "model-2.safetensors"):
            save_weights(tmp_path / name, "new" if name == changed else "old")
        config = EvaluateConfig(env=(f"hf:{tmp_path}",), method=("direct",))
        digests.append(dependencies_of(evaluation_of(config, {}))[f"digest of {tmp_path}"])
    assert len(set(digests)) == 5


def test_questions_that_prepare_methods_are_read_only_if_a_method_needs_them():
    """Files of training questions are large, and a function of the user may pay for its rows."""
    config = EvaluateConfig(env=("large",), train_data=("py:missing:rows",))
    assert data_for(config, [System("direct", "large"), System("cot", "large")], 0) == Data()
    with pytest.raises(UsageError, match="missing"):
        data_for(config, [System("direct", "large"), System("sft")], 0)


def test_a_complete_evaluation_opens_no_environment_and_no_journal(evaluate_here):
    """With a server that is gone, or on another machine, the tables can still be written anew."""
    before = evaluate_here("--method", "direct")
    shutil.rmtree("out/journal")
    names = sorted(path.name for path in Path("out").iterdir())
    assert evaluate_here("--method", "direct") == before
    assert sorted(path.name for path in Path("out").iterdir()) == names


def test_the_progress_of_an_evaluation_counts_the_answers_that_were_missing(
    evaluate_here, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert evaluate_here("--repeats", "3") == 3
    last_state = capsys.readouterr().err.split("\r")[-1]
    assert re.match(r"direct .*: 100%\|.*\| 2/2 ", last_state), "one of the three answers was there before"
