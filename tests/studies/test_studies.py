"""The studies: what is played, what is measured, and that plot and table say the same."""

import asyncio
import json
import xml.etree.ElementTree as ElementTree

import pytest

from prompt_r1.metrics.statistics import wilson
from prompt_r1.miniworld import MiniEnvironment, make_world, mini_world
from prompt_r1.protocol import INSTRUCTIONS, Codec
from prompt_r1.rollout import play
from prompt_r1.studies import __main__ as studies
from prompt_r1.studies.distance import Mixture, share
from prompt_r1.studies.figure import Point, Series, Study, cell, svg
from prompt_r1.studies.runs import find_runs
from prompt_r1.studies.training import study_training
from prompt_r1.studies.turns import INFORMED, answering_at
from prompt_r1.types import Question
from tests import tiny
from tests.tiny import ScriptedAgent, ScriptedEnvironment, think

QUESTION = Question("q", "test", "Who made it?", ("Anna",))


def play_with_answer_at(turn: int, texts: list[str]):
    """A scripted game whose turn `turn` is begun with an answer; the game and what the agent read."""
    agent, environment = ScriptedAgent(texts), ScriptedEnvironment(["one", "two", "three"])
    prefix = tiny.tokenizer()(INFORMED, add_special_tokens=False)["input_ids"]
    codec = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])
    game = asyncio.run(play(QUESTION, answering_at(turn, agent.generate, prefix), environment.ask, codec,
                            max_turns=turn, max_tokens=5000, max_new=500, seed="0"))  # fmt: skip
    return game, agent, environment


def test_after_its_interactions_the_agent_is_made_to_answer():
    asking = think("more", prompt="Who?")
    game, agent, environment = play_with_answer_at(3, [asking, asking, " Anna </answer>"])
    assert (game.stop, game.answer, len(environment.asked)) == ("answered", "Anna", 2)
    assert game.turns[-1].text == INFORMED + " Anna </answer>"
    assert tiny.tokenizer().decode(agent.read[2]).endswith("assistant\n" + INFORMED)
    assert len(game.tokens) == len(game.sampled) == len(game.logprobs)


def test_a_game_that_ended_before_keeps_its_answer():
    game, _, environment = play_with_answer_at(3, [think("sure", answer="Bob")])
    assert (game.answer, len(environment.asked)) == ("Bob", 0)


@pytest.fixture(scope="module")
def home() -> MiniEnvironment:
    return MiniEnvironment(make_world(0), "A", seed=0)


def test_a_mixture_is_as_far_from_home_as_its_share(home):
    """Total variation is linear in a mixture; who replies to a prompt never changes."""
    world = home.world
    prompts = [f"Who is the director of {film}?" for film in world.test.films[:120]]
    other = MiniEnvironment(world, "B", seed=0)

    def distance(part: float) -> float:
        mixture = Mixture(home, None, part)
        return share([mixture.reply(prompt).value != home.reply(prompt).value for prompt in prompts])

    assert distance(0.0) == 0.0 and distance(1.0) == 1.0
    assert [distance(0.25), distance(0.5), distance(0.75)] == sorted(distance(p) for p in (0.25, 0.5, 0.75))
    assert distance(0.5) == pytest.approx(0.5, abs=0.15)  # three standard errors of 120 prompts
    assert all(Mixture(home, other, 1.0).reply(prompt) == other.reply(prompt) for prompt in prompts)
    half = Mixture(home, other, 0.5)
    assert all(half.reply(prompt) in (home.reply(prompt), other.reply(prompt)) for prompt in prompts)
    assert [half.reply(prompt) for prompt in prompts] == [half.reply(prompt) for prompt in prompts]
    asked = asyncio.run(half.ask([{"role": "user", "content": prompts[0]}]))
    assert asked == half.reply(prompts[0]).text


def write_curves(folder, rates: list[float]) -> None:
    (folder / "trajectories").mkdir(parents=True)
    lines = [{"step": 20 * place, "val/em": rate, "val/n": 50} for place, rate in enumerate(rates)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    games = [{"stop": "answered", "answer": answer, "question": {"id": f"q{n}", "answers": ["Anna"]}}
             for n, answer in enumerate(["Anna", "Bob", None, "Anna"])]  # fmt: skip
    broken = {"stop": "env_error", "answer": None, "question": {"id": "q9", "answers": ["Anna"]}}
    rows = "".join(json.dumps(game) + "\n" for game in [*games, broken])
    for step in range(1, 7):
        (folder / "trajectories" / f"step-{step:06d}-rank0.jsonl").write_text(rows)


def test_the_training_study_pools_the_seeds(tmp_path):
    write_curves(tmp_path / "a", [0.1, 0.5])
    write_curves(tmp_path / "b", [0.3, 0.9])
    study = study_training([tmp_path / "a", tmp_path / "b"])
    validation, sampled = study.series
    assert [(point.x, point.mean, point.n) for point in validation.points] == [(0, 0.2, 100), (20, 0.7, 100)]
    assert (validation.points[1].low, validation.points[1].high) == wilson(70, 100)
    assert "| 20 | 100 | 0.700 [0.60, 0.78] | 0.500 | 0.900 |" in study.table
    # Five steps to a point; a broken game does not count; four questions a step and run.
    assert [(point.x, point.mean, point.n) for point in sampled.points] == [(3.0, 0.5, 40), (8.0, 0.5, 8)]


def test_the_plot_has_every_point_at_its_height_and_no_markup_of_a_label():
    points = [Point(0, 0.0, 0.0, 0.1, 50), Point(10, 1.0, 0.9, 1.0, 50)]
    series = [Series("<b>", points), Series("c", points, dashed=True)]
    study = Study("x", "<title & more>", "claim", "x", "y", series, "| a |", ("note",))
    root = ElementTree.fromstring(svg(study))
    name = "{http://www.w3.org/2000/svg}"
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{name}circle")]
    heights = [text for text in root.iter(f"{name}text") if text.get("text-anchor") == "end"]
    grid = {text.text: float(text.get("y")) - 4 for text in heights}
    assert [y for _, y in dots] == [grid["0"], grid["1"]] and dots[0][0] < dots[1][0]
    assert len(list(root.iter(f"{name}rect"))) == 2 and "<b>" in [
        text.text for text in root.iter(f"{name}text")
    ]
    assert cell(points[1]) == "1.000 [0.90, 1.00]" and "![<title & more>](x.svg)" in study.markdown()


@pytest.mark.slow
def test_the_studies_run_from_end_to_end_on_a_tiny_run(asking_agent, tmp_path, capsys):
    """An agent that learnt a few turns by heart: no number means anything, all are there."""
    from prompt_r1.cli.command_line import train_config
    from prompt_r1.config.yaml_files import write_yaml

    run = tmp_path / "runs" / "tiny"
    write_curves(run, [0.0, 0.0])
    (run / "agent").symlink_to(asking_agent)
    config, _ = train_config(["--agent", str(asking_agent), "--max-tokens", "1500"])
    write_yaml(config, asking_agent / "prompt_r1.yaml")
    try:
        studies.main([str(run), "--limit", "1", "--out", str(tmp_path / "out")])
    finally:
        (asking_agent / "prompt_r1.yaml").unlink()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{name}.{end}" for name in ("turns", "training", "distance") for end in ("svg", "md")
    }
    told = capsys.readouterr().out
    assert "| 100% mute | 5 | " in told and "| trained, all | 5 | " in told
    assert find_runs(tmp_path / "runs") == []  # its agent is not the mini one
    kinds = {question.dataset for question in mini_world(0).test}
    assert all(f"| {kind} | 1 | " in told for kind in kinds)
