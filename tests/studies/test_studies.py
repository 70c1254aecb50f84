"""The studies: the games they play, and what they measure."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.config.yaml_files import GAME_FILE, write_yaml
from prompt_r1.errors import UsageError
from prompt_r1.miniworld import mini_world
from prompt_r1.protocol import INSTRUCTIONS, Codec
from prompt_r1.rollout import play
from prompt_r1.studies import __main__ as studies
from prompt_r1.studies import programs, turns
from prompt_r1.studies.study import Point
from prompt_r1.studies.training import training_table
from prompt_r1.studies.turns import (
    THOUGHT_AFTER_ASKING,
    THOUGHT_BEFORE_ASKING,
    answer_in_turn,
    find_runs,
    first_of_each_kind,
    load_run,
)
from prompt_r1.types import GameSettings, Question
from tests.support import tiny
from tests.support.providers import open_environment
from tests.support.tiny import ScriptedAgent, ScriptedEnvironment, think

QUESTION = Question("q", "test", "Who made it?", ("Anna",))


def play_with_answer_at(turn: int, texts: list[str]):
    """A scripted game whose turn number `turn` starts with an answer; with its agent and environment."""
    agent, environment = ScriptedAgent(texts), ScriptedEnvironment(["one", "two", "three"])
    prefix = tiny.tokenizer()(THOUGHT_AFTER_ASKING, add_special_tokens=False)["input_ids"]
    codec = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])
    generate = answer_in_turn(turn, agent.generate, prefix)
    settings = GameSettings(max_turns=turn, max_tokens=5000, max_new=500)
    game = asyncio.run(play(QUESTION, generate, environment.ask, codec, settings, seed="0"))
    return game, agent, environment


def test_after_t_interactions_the_agent_is_forced_to_answer():
    asking = think("more", prompt="Who?")
    game, agent, environment = play_with_answer_at(3, [asking, asking, " Anna </answer>"])
    assert (game.stop, game.answer, len(environment.asked)) == ("answered", "Anna", 2)
    assert game.turns[-1].text == THOUGHT_AFTER_ASKING + " Anna </answer>"
    assert tiny.tokenizer().decode(agent.read[2]).endswith("assistant\n" + THOUGHT_AFTER_ASKING)
    assert len(game.tokens) == len(game.sampled) == len(game.logprobs)


def test_a_game_that_ends_earlier_keeps_its_answer():
    game, _, environment = play_with_answer_at(3, [think("sure", answer="Bob")])
    assert (game.answer, len(environment.asked)) == ("Bob", 0)


@pytest.mark.parametrize(("limit", "left"), [(500, None), (3, 1)])
def test_the_tokens_of_the_forced_answer_count_and_have_no_log_probabilities_of_their_own(limit, left):
    """The thought is not sampled; at least one token is left for the answer."""
    agent = ScriptedAgent([think("more", prompt="Who?"), " Anna </answer>"], finished=False)
    generate, prefix = answer_in_turn(2, agent.generate, [7, 8, 9]), [7, 8, 9]
    first = asyncio.run(generate([1, 2], max_new=limit, seed="study/q/1"))
    forced = asyncio.run(generate([1, 2], max_new=limit, seed="study/q/2"))
    assert agent.limits == [limit, left or limit - len(prefix)] and agent.read == [[1, 2], [1, 2, 7, 8, 9]]
    assert agent.seeds == ["study/q/1", "study/q/2"] and not forced.finished
    assert forced.tokens[:3] == prefix and forced.logprobs[:3] == [0.0, 0.0, 0.0]
    assert set(forced.logprobs[3:]) == {-0.5} and first.tokens[:3] != prefix


class GreedyScript(ScriptedAgent):
    """A scripted agent as the studies load one: with a codec, and sampled at a temperature."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(texts)
        self.codec = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])
        self.game = GameSettings(max_turns=9, max_tokens=5000, max_new=500)

    async def generate(self, tokens, *, max_new, seed, temperature):
        assert temperature == 0.0
        return await super().generate(tokens, max_new=max_new, seed=seed)


@pytest.mark.parametrize(("asked", "thought"), [(0, THOUGHT_BEFORE_ASKING), (1, THOUGHT_AFTER_ASKING)])
def test_each_game_has_as_many_interactions_as_it_may_and_then_its_answer(asked, thought):
    agent = GreedyScript([*[think("more", prompt="Who?")] * asked, " Anna </answer>"])
    run = SimpleNamespace(questions=[QUESTION], environment=ScriptedEnvironment(["one", "two"]))
    [game] = turns.play_and_answer(run, agent, asked)
    assert (len(game.turns), game.stop, game.answer) == (asked + 1, "answered", "Anna")
    assert game.turns[-1].text.startswith(thought)
    assert agent.seeds == [f"study/q/{turn}" for turn in range(1, asked + 2)]


def test_the_longest_mini_run_of_each_seed_is_studied(tmp_path):
    runs = [("a", 0, 40), ("b", 0, 80), ("c", 0, 60), ("d", 1, 10), ("e", 2, 90)]
    for name, seed, steps in runs:
        (tmp_path / name / "agent").mkdir(parents=True)
        settings = {
            **PRESETS["mini"],
            "seed": seed,
            "steps": steps,
            "env": "mini-b" if name == "e" else "mini",
        }
        write_yaml(TrainConfig(**settings), tmp_path / name / "agent" / GAME_FILE)
    assert [folder.name for folder in find_runs(tmp_path)] == ["b", "d"]


def test_the_first_questions_of_each_kind_are_taken_in_their_order():
    questions = [Question(str(n), "even" if n % 2 == 0 else "odd", "?", ()) for n in range(7)]
    assert [question.id for question in first_of_each_kind(questions, 2)] == ["0", "2", "1", "3"]
    assert len(first_of_each_kind(questions, 9)) == 7


@pytest.mark.parametrize(
    ("last", "exported", "trains"), [(7, True, False), (8, True, False), (6, True, True), (7, False, True)]
)
def test_a_run_is_trained_unless_all_its_steps_and_its_agent_are_there(
    tmp_path, monkeypatch, last, exported, trains
):
    commands = []

    def start(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", start)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(last + 1)))
    if exported:
        (folder / "agent").mkdir()
    programs.train(folder, 7, {"--seed": [2]})
    command = f"{sys.executable} -m prompt_r1 train --seed 2 --steps 7 --out {folder}"
    assert [" ".join(words) for words in commands] == ([command] if trains else [])
    assert (tmp_path / "run.log").exists() == trains


def test_a_studied_run_has_the_questions_and_the_environment_of_its_training(tmp_path):
    """The errors and wordings of the environment follow from the seed of the run, like its world."""
    agent = tiny.save_agent(tmp_path / "agent")
    write_yaml(TrainConfig(**{**PRESETS["mini"], "agent": str(agent), "seed": 3}), agent / GAME_FILE)
    run = load_run(tmp_path, per_kind=4)
    assert len(run.questions) == 5 * 4 and set(run.questions) <= set(mini_world(3).test)
    trained_with = open_environment("mini", seed=3)
    for question in run.questions:
        reply = asyncio.run(trained_with.ask([{"role": "user", "content": question.text}]))
        assert run.environment.reply(question.text).text == reply


def test_a_run_with_another_environment_is_refused(tmp_path):
    agent = tiny.save_agent(tmp_path / "agent")
    write_yaml(TrainConfig(**{**PRESETS["mini"], "agent": str(agent), "env": "mini-b"}), agent / GAME_FILE)
    with pytest.raises(UsageError, match="is not a run with the environment mini, which"):
        load_run(tmp_path, per_kind=1)


def write_validations(folder, rates: list[float]) -> None:
    """A run folder with validations every 20 steps."""
    folder.mkdir(parents=True)
    lines = [{"step": 20 * place, "val/em": rate, "val/n": 50} for place, rate in enumerate(rates)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_rate_is_written_with_its_interval():
    assert str(Point(0, 0.95349, 0.9249, 0.9751, 9)) == "0.953 [0.92, 0.98]"


def test_the_training_study_pools_all_seeds(tmp_path):
    """Student's t of one degree of freedom, 12.706, times the standard error of 0.68 and 0.72 is 0.25."""
    write_validations(tmp_path / "a", [0.1, 0.68])
    write_validations(tmp_path / "b", [0.3, 0.72])
    table = training_table([tmp_path / "a", tmp_path / "b"])
    assert table.splitlines()[0] == "| validation at step | n | all seeds | a | b |"
    assert "| 20 | 100 | 0.700 [0.45, 0.95] | 0.680 | 0.720 |" in table


def test_all_studies_run_on_a_tiny_run(asking_agent, tmp_path, capsys):
    """With an agent that memorised a few turns: the numbers are meaningless, but none is missing."""
    from prompt_r1.cli.command_line import train_config

    run = tmp_path / "runs" / "tiny"
    write_validations(run, [0.0, 0.0])
    (run / "agent").symlink_to(asking_agent)
    config, _ = train_config(["--agent", str(asking_agent), "--max-tokens", "1500"])
    write_yaml(config, asking_agent / "prompt_r1.yaml")
    try:
        studies.main([str(run), "--limit", "1"])
    finally:
        (asking_agent / "prompt_r1.yaml").unlink()
    printed = capsys.readouterr().out
    assert "| trained, all | 5 | " in printed and "| 20 | 50 | 0.000 [0.00, 0.07] |" in printed
    assert find_runs(tmp_path / "runs") == []  # its agent is not the mini one
    kinds = {question.dataset for question in mini_world(0).test}
    assert all(f"| {kind} | 1 | " in printed for kind in kinds)


def test_turns_are_counted_by_agent_and_kind(monkeypatch):
    """The trained agent needs one interaction with seed 0 and two with seed 1; the untrained one fails."""
    questions = [Question("p", "pop", "?", ("Anna",)), Question("m", "math", "?", ("Anna",))]
    names = {"untrained": "untrained", "trained": "trained"}
    runs = [SimpleNamespace(seed=seed, agents=names, questions=questions) for seed in (0, 1)]

    def play_and_answer(run, agent, interactions):
        right = agent == "trained" and interactions > run.seed
        return [SimpleNamespace(answer="Anna" if right else None, question=one) for one in questions]

    monkeypatch.setattr(turns, "play_and_answer", play_and_answer)
    header, _, *lines = turns.turns_table(runs).splitlines()
    assert header.endswith("| n | 0 interactions | 1 interaction | 2 interactions | 3 interactions |")
    rows = {}
    for row in lines:
        name, count, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        rows[name] = (count, [cell.split(" ")[0] for cell in cells])
    assert rows == {
        "trained, all": ("4", ["0.000", "0.500", "1.000", "1.000"]),
        "untrained, all": ("4", ["0.000"] * 4),
        "math": ("2", ["0.000", "0.500", "1.000", "1.000"]),
        "pop": ("2", ["0.000", "0.500", "1.000", "1.000"]),
    }
