"""Supervised fine-tuning: the examples, the loss against Hugging Face's, and the export."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch

from prompt_r1.errors import EnvError, UsageError
from prompt_r1.evaluation.imitation import example_of
from prompt_r1.evaluation.preflight import read_evaluation
from prompt_r1.model.lora import adapters_removed, add_lora
from prompt_r1.model.policy import Policy
from prompt_r1.pair.agent import Agent, Sampling, load_agent, play_question
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.protocol import Codec, parse
from prompt_r1.reward import RULE_WITHOUT_ENVIRONMENT
from prompt_r1.settings.agent import INSTRUCTIONS, AgentConfig
from prompt_r1.training.log import Log
from prompt_r1.training.settings import FineTuningConfig, read_warm_start_config
from prompt_r1.training.supervised import (
    batch_size_for,
    cut,
    fine_tune_agent,
    negative_log_likelihood,
    schedule,
    train_weights,
    within_cutoff,
)
from prompt_r1.training.warm_start import encode, learn_games, read_games
from prompt_r1.types import Completion, GameSettings, Question, ScoredGame, Trajectory, Turn
from tests.support import tiny
from tests.support.methods import PricedSource, method, priced
from tests.support.played import play_game
from tests.support.programs import run_here
from tests.support.templates import KINDS, tokenizer_of
from tests.support.tiny import ScriptedAgent, ScriptedEnvironment, think

QUESTIONS = [Question(str(n), "a", f"Number {n}?", (f"it is {n}",)) for n in range(6)]
SMALL = FineTuningConfig(agent="", lr=1e-2, epochs=8, batch_size=4, micro_batch=2, device="cpu")


def one_turn_config(start: str) -> AgentConfig:
    """The settings of an agent that answers in one turn, without an environment."""
    return AgentConfig(agent=start, env="none", instruction="answer")


def tiny_agent() -> Agent:
    game = replace(one_turn_config("").game, max_tokens=400)
    codec = Codec(tiny.tokenizer(), "Answer.")
    return Agent(tiny.policy(), codec, game)


def examples(agent: Agent) -> list[Trajectory]:
    return [example_of(question, agent.codec) for question in QUESTIONS]


@pytest.fixture
def start(tmp_path) -> Path:
    """The folder of an agent to fine-tune."""
    return tiny.save_agent(tmp_path / "start")


def test_the_loss_covers_only_the_tokens_of_the_answer():
    agent = tiny_agent()
    batch = examples(agent)[:3]
    total = 0.0
    for example in batch:
        read = len(example.tokens) - sum(example.sampled)
        labels = [-100] * read + example.tokens[read:]
        with tiny.own_attention(agent.policy.model):
            tokens = torch.tensor([example.tokens])
            mean = agent.policy.model(tokens, labels=torch.tensor([labels])).loss.item()
        total += mean * (len(example.tokens) - read)
    expected = total / sum(sum(example.sampled) for example in batch)
    assert negative_log_likelihood(agent.policy, batch).item() == pytest.approx(expected, rel=1e-5)


def test_an_example_is_the_question_in_the_chat_template_and_the_gold_answer_in_tags():
    agent = tiny_agent()
    example = example_of(QUESTIONS[0], agent.codec)
    read = example.sampled.index(True)
    assert example.tokens[:read] == agent.codec.opening("Number 0?") and all(example.sampled[read:])
    assert agent.codec.turn_text(example.tokens[read:]) == "<answer>it is 0</answer>"
    assert example.tokens[-1] == agent.codec.turn_end


def test_an_example_closes_the_think_block_that_a_template_opens():
    codec = Codec(tokenizer_of(KINDS["DeepSeek-R1-distill"], "byte level"), "Answer.")
    example = example_of(QUESTIONS[0], codec)
    text = codec.turn_text(example.tokens[example.opening_length :])
    assert text == "<think>\n</think>\n<answer>it is 0</answer>" and parse(text).answer == "it is 0"


def test_training_lowers_the_loss_and_does_not_change_the_frozen_weights():
    agent = tiny_agent()
    frozen = {name: tensor.clone() for name, tensor in agent.policy.model.state_dict().items()}
    add_lora(agent.policy.model, rank=8, alpha=16)
    lines = list(train_weights(agent.policy, examples(agent), SMALL))
    assert len(lines) == 8 * 2, "8 epochs of 6 examples, 4 per step"
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    with adapters_removed(agent.policy.model):
        after = agent.policy.model.state_dict()
    assert all(torch.equal(frozen[name], after[name]) for name in frozen)


def test_the_size_of_micro_batches_does_not_change_the_result():
    """Each token counts alike, in a short answer and in a long one."""
    answers = [Question(str(n), "a", "Spell it.", ("ab" * n,)) for n in (1, 20, 2, 9, 3, 30)]
    weights = []
    for micro_batch in (1, 3):
        agent = tiny_agent()
        add_lora(agent.policy.model, rank=8, alpha=16)
        settings = replace(SMALL, batch_size=6, micro_batch=micro_batch, epochs=3)
        batch = [example_of(question, agent.codec) for question in answers]
        list(train_weights(agent.policy, batch, settings))
        trained = agent.policy.trained_parameters()
        weights.append(torch.cat([parameter.flatten() for parameter in trained]))
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def turns_of(*lengths: tuple[int, int]) -> Trajectory:
    """A game of numbered tokens: for each turn, how many the agent reads and writes."""
    game = Trajectory(QUESTIONS[0])
    for read, written in lengths:
        start = len(game.tokens)
        game.add_context(list(range(start, start + read)))
        tokens = list(range(start + read, start + read + written))
        game.add_sampled(Completion(tokens, [-1.0] * written, finished=True))
    return game


@pytest.mark.parametrize(
    ("turn", "most", "cut_turn"),
    [
        ((10, 10), 20, (10, 10)),
        ((100, 4), 20, (16, 4)),  # What is written fits, so only the question is cut.
        ((9, 100), 20, (9, 11)),  # The question takes less than half.
        ((30, 60), 20, (10, 10)),  # Each part takes more than half.
        ((3, 7), 1, (1, 0)),
    ],
)
def test_the_opening_of_a_long_example_is_cut_first_but_keeps_half_of_the_room(turn, most, cut_turn):
    """A bug: long examples were left out, so `sft` learned from short stories only."""
    shorter = cut(turns_of(turn), most, tail=2)
    read, written = cut_turn
    assert shorter.sampled == [False] * read + [True] * written
    tail = min(2, read)  # It stays.
    assert shorter.tokens == [*range(read - tail), *range(turn[0] - tail, turn[0] + written)]


def test_a_game_of_several_turns_loses_its_last_tokens():
    game = turns_of((10, 5), (4, 30), (3, 3))
    assert cut(game, 55, tail=2) == game, "it fits"
    shorter = cut(game, 28, tail=2)
    assert shorter.tokens == list(range(28)) and shorter.sampled == game.sampled[:28]
    shorter = cut(turns_of((20, 5), (4, 30)), 30, tail=2)
    assert shorter.tokens == [*range(13), *range(18, 35)]


def test_examples_that_are_too_long_are_cut_and_counted(caplog):
    agent = tiny_agent()
    codec = agent.codec
    rows = [*examples(agent)[:2], example_of(Question("q", "a", "abc " * 99, ("x",)), codec)]
    most = len(rows[0].tokens)
    *short, long = within_cutoff(rows, most, codec)
    assert short == rows[:2] and len(long.tokens) == most
    # A bug: the opening lost the instruction and the beginning of the agent's turn.
    assert long.tokens[: long.opening_length][-len(codec.opening_tail) :] == codec.opening_tail
    assert f"1 of 3 examples have more than --cutoff {most} tokens" in caplog.text
    with pytest.raises(UsageError, match="--cutoff 1 leaves no token"):
        within_cutoff(rows, 1, codec)


def test_the_learning_rate_rises_for_a_tenth_of_the_steps_and_decays_to_zero():
    """The first step had a rate of 0, one of six for 64 games."""
    rates = [schedule(step, 100) for step in range(101)]
    assert rates[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5) and rates[100] == 0


@pytest.mark.parametrize(
    ("examples", "size"), [(64 * 3, 6), (44 * 2, 2), (30, 1), (6, 1), (960, 32), (10**6, 32)]
)
def test_few_examples_get_small_batches_so_that_there_are_thirty_steps(examples, size):
    """64 games in 3 epochs were 6 steps of 32, which teach a model nothing."""
    assert batch_size_for(examples) == size
    assert -(-examples // size) >= min(examples, 30)


@pytest.mark.parametrize(("epochs", "warned"), [(29, True), (30, False)])
def test_fewer_than_thirty_steps_are_warned_of(epochs, warned, caplog):
    agent = tiny_agent()
    add_lora(agent.policy.model, rank=1, alpha=1)
    lines = train_weights(agent.policy, examples(agent)[:1], replace(SMALL, epochs=epochs))
    next(lines)
    assert ("--epochs" in caplog.text) == warned


GAME = {
    "question": {"id": "7", "text": "Who?"},  # as in runs/*/trajectories
    "turns": [
        {"text": "<think>a</think><interaction_prompt>Who?</interaction_prompt>", "reply": "Anna."},
        {"text": "<think>b</think><answer>Anna</answer>", "reply": None},
    ],
    "stop": "answered",
}


def games_file(folder: Path, *games: object) -> Path:
    path = folder / "games.jsonl"
    path.write_text("".join(json.dumps(game) + "\n" for game in games))
    return path


def test_a_warm_start_on_recorded_games_teaches_a_model_without_the_format_to_play_them(tmp_path):
    """It can ask afterwards, which an agent that was fine-tuned on gold answers cannot."""
    start, games = tiny.save_agent(tmp_path / "start"), games_file(tmp_path, *[GAME] * 2)
    settings = replace(SMALL, agent=str(start), micro_batch=4, rank=0, preset="small", lr=3e-3, seed=3)
    settings = replace(settings, games=str(games), epochs=60, out=str(tmp_path / "out"))
    folder = learn_games(settings)
    assert resolve_agent(str(folder)).start == str(folder), "`untrained` was the agent before the warm start"
    game = resolve_agent(str(folder)).config
    assert game is not None and game.seed == 3
    assert (game.env, game.instruction, game.max_turns) == ("mini", "short", 4)
    agent = load_agent(folder, replace(game, max_new=100, max_tokens=700), torch.device("cpu"))
    question = Question("q", "own", "Who?", ("Anna",))
    played = asyncio.run(
        play_question(agent, priced(PricedSource(lambda prompt: "Anna.")), question, Sampling("0"))
    )
    assert [turn.text for turn in played.turns] == [turn["text"] for turn in GAME["turns"]]


ASK = think("a", prompt="Who?")


@pytest.mark.parametrize(
    ("texts", "replies", "limits", "stop"),
    [
        ([ASK, think("b", answer="Anna")], ["Anna."], {}, "answered"),
        ([ASK, think("b", answer="Anna")], [""], {}, "answered"),
        ([ASK, think("b", answer="Anna")], ["Anna. " * 99], {"max_reply_tokens": 20}, "answered"),
        ([ASK, ASK], ["Anna."], {"max_turns": 2}, "max_turns"),
        ([ASK], [EnvError("HTTP 500")], {}, "env_error"),
        ([ASK, ""], ["Anna."], {}, "malformed"),
        ([ASK], ["Anna. " * 99], {"max_tokens": 600}, "max_tokens"),
    ],
)
def test_a_game_of_a_run_is_learned_with_the_tokens_that_were_played(tmp_path, texts, replies, limits, stop):
    """Empty texts were refused, replies were not cut, and a reply that no turn follows was appended."""
    rules = GameSettings(**limits)
    question = Question("7", "own", "Who?", ("Anna",))
    game = play_game(ScriptedAgent(texts), ScriptedEnvironment(replies), question=question, game=rules)
    assert game.stop == stop
    Log(tmp_path).write_games("step-000001", [[ScoredGame(game, None, None)]])
    games = list(read_games(tmp_path / "trajectories" / "step-000001-rank0.jsonl"))
    codec = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])
    [learned] = encode(games, codec, max_reply_tokens=rules.max_reply_tokens)
    assert (learned.tokens, learned.sampled) == (game.tokens, game.sampled)


def test_the_think_block_that_a_template_opens_is_not_learned_twice():
    codec = Codec(tokenizer_of(KINDS["DeepSeek-R1-distill"], "byte level"), "Answer.")
    turn = Turn("<think>a</think><answer>b</answer>", parse(""), None)
    [learned] = encode([(QUESTIONS[0], [turn])], codec, max_reply_tokens=0)
    assert codec.opened and learned.turns[0].text == "a</think><answer>b</answer>"
    assert codec.turn_text(learned.tokens[learned.opening_length :]).count("<think>") == 1


@pytest.mark.parametrize(
    "row",
    [
        {"turns": GAME["turns"]},
        *(GAME | {"turns": wrong} for wrong in ([{"text": "x"}], [None], GAME["turns"][::-1], 3, [])),
        7,
    ],
)
def test_a_line_that_is_no_game_is_named(tmp_path, row):
    path = games_file(tmp_path, GAME, row)
    with pytest.raises(UsageError, match=r"games.jsonl, row 2: .*`question`.*`turns`"):
        list(read_games(path))


def test_the_program_teaches_our_demonstrations_and_says_how_to_train(tmp_path, capsys, monkeypatch):
    """It printed `--config mini`, whose learning rate destroyed the model in one step."""
    monkeypatch.setattr(torch, "set_num_threads", threads := Mock())
    line = f"--agent {tiny.save_agent(tmp_path / 'start')} --games mini:pop --epochs 1 --cutoff 450"
    run_here("warm_start.py", *line.split(), "--threads", 3, "--seed", 5, "--out", tmp_path / "out")
    assert threads.call_args_list[-1] == call(3)
    folder = tmp_path / "out" / "agent"
    assert resolve_agent(str(folder)).config.seed == 5
    assert f"train.py --config small --agent {folder}" in capsys.readouterr().out
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


def test_a_second_warm_start_does_not_replace_the_agent_of_the_first(start, tmp_path, monkeypatch):
    """A bug: without --out, warm starts of different agents and games all wrote to runs/sft-seed0."""
    monkeypatch.chdir(tmp_path)
    line = ["--agent", str(start), "--games", "mini"]
    Path("runs/sft-seed0").mkdir(parents=True)
    Path("runs/sft-seed0/metrics.jsonl").touch()
    assert read_warm_start_config(line).out == "runs/sft-seed0", "one that was killed has no agent"
    Path("runs/sft-seed0/agent").mkdir()
    with pytest.raises(UsageError, match=r"runs/sft-seed0 has an agent, .* another --out"):
        read_warm_start_config(line)


def test_the_method_sft_fine_tunes_only_once(start, tmp_path):
    def prepared() -> float:
        method("sft", priced(PricedSource(str)), agent=start, folder=tmp_path / "out", train=QUESTIONS)
        [weights] = tmp_path.glob("out/large/sft/*/agent/model.safetensors")
        return weights.stat().st_mtime_ns

    assert prepared() == prepared()
    [folder] = tmp_path.glob("out/large/sft/*/agent")
    game = resolve_agent(str(folder)).config
    assert (
        game is not None
        and game.without_environment
        and game.game.max_turns == 1
        and game.base_rule is RULE_WITHOUT_ENVIRONMENT
    )


def test_grpo_only_without_an_agent_that_was_trained_alone_says_how_to_train_one(tmp_path):
    agent = str(tiny.save_agent(tmp_path))
    for given in ([], ["--grpo-agent", agent]):
        with pytest.raises(UsageError, match="--env none"):
            read_evaluation(["--method", "grpo-only", "--agent", agent, *given])


@pytest.mark.parametrize(
    ("flag", "of_the_game", "expected"), [(0, 0, 2), (0, 1, 1), (0, 64, 2), (3, 1, 3), (3, 64, 3)]
)
def test_threads_are_those_of_the_flag_or_of_the_game_but_no_more_than_cores(
    flag, of_the_game, expected, start, tmp_path, monkeypatch
):
    """The mini agent's game has one thread, and took the place of `--threads 8`.

    The methods bc and rft took the threads of the machine that the agent was trained on.
    """
    monkeypatch.setattr("prompt_r1.model.machine.usable_cores", lambda: 2)
    monkeypatch.setattr("prompt_r1.model.machine.TORCH_THREADS", 8)
    monkeypatch.setattr(torch, "set_num_threads", set_threads := Mock())
    agent_config = replace(one_turn_config(str(start)), threads=of_the_game)

    def examples_of(codec: Codec) -> list[Trajectory]:
        return [example_of(question, codec) for question in QUESTIONS]

    config = replace(SMALL, agent=str(start), epochs=1, threads=flag)
    folder = fine_tune_agent(examples_of, config, agent_config, tmp_path / "out")
    set_threads.assert_called_once_with(expected)
    assert resolve_agent(str(folder)).config.threads == of_the_game


def first_example(codec: Codec) -> list[Trajectory]:
    return [example_of(QUESTIONS[0], codec)]


def test_the_metrics_of_each_step_can_be_read_while_the_next_one_is_taken(start, tmp_path, monkeypatch):
    lines_in_file = []

    def take_steps(*_: object) -> Iterator[dict[str, float]]:
        for step in (1, 2, 3):
            lines_in_file.append((tmp_path / "out/metrics.jsonl").read_text().count("\n"))
            yield {"step": step, "loss": 0.5}

    monkeypatch.setattr("prompt_r1.training.supervised.train_weights", take_steps)
    agent_config = one_turn_config(str(start))
    config = replace(SMALL, agent=str(start))
    fine_tune_agent(first_example, config, agent_config, tmp_path / "out")
    assert lines_in_file == [0, 1, 2]


def test_an_agent_that_was_trained_at_another_temperature_is_fitted_at_temperature_1(
    start, tmp_path, monkeypatch
):
    """A bug: rft fitted games that it had sampled at temperature 1 at that of the agent's training."""
    fitted = []

    def note(policy: Policy, *_: object) -> Iterator[dict[str, float]]:
        fitted.append(policy.temperature)
        return iter([])

    monkeypatch.setattr("prompt_r1.training.supervised.train_weights", note)
    agent_config = replace(one_turn_config(str(start)), temperature=1.3)
    training_config = replace(SMALL, agent=str(start))
    folder = fine_tune_agent(first_example, training_config, agent_config, tmp_path / "out")
    assert fitted == [1.0]
    assert resolve_agent(str(folder)).config.temperature == 1.3, "its settings stay"


def test_a_folder_with_other_files_is_refused(start, tmp_path):
    """Such as a run: its `agent/` was replaced, and its metrics.jsonl overwritten."""
    config = replace(SMALL, agent=str(start))
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UsageError, match="empty folder"):
        fine_tune_agent(lambda codec: [], config, one_turn_config(str(start)), tmp_path)
