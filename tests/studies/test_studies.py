"""The studies: the games they play, what they measure, and that plot and table agree."""

import asyncio
import json
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.config.yaml_files import GAME_FILE, write_yaml
from prompt_r1.errors import UsageError
from prompt_r1.metrics.statistics import wilson
from prompt_r1.miniworld import MiniEnvironment, make_world, mini_world
from prompt_r1.protocol import INSTRUCTIONS, Codec
from prompt_r1.report.svg import Plot, Point, Series, rate_text, svg
from prompt_r1.rollout import play
from prompt_r1.studies import __main__ as studies
from prompt_r1.studies import trained_turns, turns
from prompt_r1.studies.distance import Measurements, Mixture, distance_table, share_of, study_distance
from prompt_r1.studies.runs import find_runs, greedy, load_run, seed_groups
from prompt_r1.studies.study import Study
from prompt_r1.studies.training import study_training
from prompt_r1.studies.turns import THOUGHT_AFTER_ASKING, answer_in_turn
from prompt_r1.types import GameSettings, Question
from tests import tiny
from tests.providers import open_environment
from tests.tiny import ScriptedAgent, ScriptedEnvironment, think

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


@pytest.fixture(scope="module")
def home() -> MiniEnvironment:
    return MiniEnvironment(make_world(0), "A", seed=0)


def test_the_distance_of_a_mixture_from_home_is_its_share(home):
    """Total variation is linear in a mixture; a prompt always gets the same reply."""
    world = home.world
    prompts = [f"Who is the director of {film}?" for film in world.test.films[:120]]
    other = MiniEnvironment(world, "B", seed=0)

    def distance(part: float) -> float:
        mixture = Mixture(home, None, part)
        return share_of([mixture.reply(prompt).value != home.reply(prompt).value for prompt in prompts])

    assert distance(0.0) == 0.0 and distance(1.0) == 1.0
    assert [distance(0.25), distance(0.5), distance(0.75)] == sorted(distance(p) for p in (0.25, 0.5, 0.75))
    assert distance(0.5) == pytest.approx(0.5, abs=0.15)  # three standard errors of 120 prompts
    assert all(Mixture(home, other, 1.0).reply(prompt) == other.reply(prompt) for prompt in prompts)
    half = Mixture(home, other, 0.5)
    assert all(half.reply(prompt) in (home.reply(prompt), other.reply(prompt)) for prompt in prompts)
    assert [half.reply(prompt) for prompt in prompts] == [half.reply(prompt) for prompt in prompts]
    asked = asyncio.run(half.ask([{"role": "user", "content": prompts[0]}]))
    assert asked == half.reply(prompts[0]).text


def test_the_loss_of_an_environment_is_what_the_trained_agent_has_less_than_at_home():
    home = Measurements("home", "home", trained=[1.0, 1.0, 1.0, 0.0], untrained=[0.0] * 4)
    away = Measurements("B", "environment B", trained=[1.0, 0.0, 0.0, 0.0], untrained=[0.0] * 4)
    away.fact_differs = [True, False, False, False]
    rows = [[cell.strip() for cell in row.split("|")] for row in distance_table([home, away]).splitlines()]
    [header, _, of_home, of_away] = rows
    column = header.index("loss")
    assert (of_home[column], of_away[column]) == ("+0.000", "+0.500")
    assert of_away[header.index("different fact")] == "0.250"


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


def test_the_greedy_games_of_a_study_are_not_sampled():
    agent = SimpleNamespace(generate=lambda *_, temperature: temperature)
    assert greedy(agent)() == 0


def write_curves(folder, rates: list[float]) -> None:
    """A run folder with validations every 20 steps, and six steps of sampled games."""
    (folder / "trajectories").mkdir(parents=True)
    lines = [{"step": 20 * place, "val/em": rate, "val/n": 50} for place, rate in enumerate(rates)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    games = []
    for number, answer in enumerate(["Anna", "Bob", None, "Anna"]):
        question = {"id": f"q{number}", "answers": ["Anna"]}
        games.append({"stop": "answered", "answer": answer, "question": question})
    games.append({"stop": "env_error", "answer": None, "question": {"id": "q9", "answers": ["Anna"]}})
    rows = "".join(json.dumps(game) + "\n" for game in games)
    for step in range(1, 7):
        (folder / "trajectories" / f"step-{step:06d}-rank0.jsonl").write_text(rows)


def test_the_training_study_pools_all_seeds(tmp_path):
    write_curves(tmp_path / "a", [0.1, 0.5])
    write_curves(tmp_path / "b", [0.3, 0.9])
    study = study_training([tmp_path / "a", tmp_path / "b"])
    validation, sampled = study.plot.series
    assert [(point.x, point.mean, point.n) for point in validation.points] == [(0, 0.2, 100), (20, 0.7, 100)]
    assert (validation.points[1].low, validation.points[1].high) == wilson(70, 100)
    assert "| 20 | 100 | 0.700 [0.60, 0.78] | 0.500 | 0.900 |" in study.table
    # Five steps per point, four questions per step and run; broken games are not counted.
    assert [(point.x, point.mean, point.n) for point in sampled.points] == [(3.0, 0.5, 40), (8.0, 0.5, 8)]


def test_the_plot_draws_each_point_at_its_height_and_escapes_labels():
    points = [Point(0, 0.0, 0.0, 0.1, 50), Point(10, 1.0, 0.9, 1.0, 50)]
    series = [Series("<b>", points), Series("c", points, dashed=True)]
    plot = Plot("<title & more>", "x", "y", series)
    study = Study("x", "claim", plot, "| a |", ("note",))
    root = ElementTree.fromstring(svg(plot))
    name = "{http://www.w3.org/2000/svg}"
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{name}circle")]
    heights = [text for text in root.iter(f"{name}text") if text.get("text-anchor") == "end"]
    grid = {text.text: float(text.get("y")) - 4 for text in heights}
    assert [y for _, y in dots] == [grid["0"], grid["1"]] and dots[0][0] < dots[1][0]
    assert len(list(root.iter(f"{name}rect"))) == 2 and "<b>" in [
        text.text for text in root.iter(f"{name}text")
    ]
    assert rate_text(points[1]) == "1.000 [0.90, 1.00]" and "![<title & more>](x.svg)" in study.markdown()


def test_a_line_joins_points_only_where_something_was_measured_between_them(tmp_path):
    """Validations are 20 steps apart; a line claimed an EM for every step between them."""
    write_curves(tmp_path / "a", [0.1, 0.5])
    plot = study_training([tmp_path / "a"]).plot
    lines = [item for item in ElementTree.fromstring(svg(plot)).iter() if item.tag.endswith("polyline")]
    assert [one.label for one in plot.series if one.joined] == ["sampled"] and len(lines) == 1
    assert plot.y_label == "EM" and plot.title == "Exact match by training step"


def test_all_studies_run_on_a_tiny_run(asking_agent, tmp_path, capsys):
    """With an agent that memorised a few turns: the numbers are meaningless, but none is missing."""
    from prompt_r1.cli.command_line import train_config

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
    printed = capsys.readouterr().out
    assert "| 100% mute | 5 | " in printed and "| trained, all | 5 | " in printed
    assert find_runs(tmp_path / "runs") == []  # its agent is not the mini one
    kinds = {question.dataset for question in mini_world(0).test}
    assert all(f"| {kind} | 1 | " in printed for kind in kinds)


def test_turns_are_counted_by_agent_kind_and_seed(monkeypatch):
    """The trained agent needs one interaction with seed 0 and two with seed 1; the untrained one fails."""
    questions = [Question("p", "pop", "?", ("Anna",)), Question("m", "math", "?", ("Anna",))]
    names = {"untrained": "untrained", "trained": "trained"}
    runs = [SimpleNamespace(seed=seed, agents=names, questions=questions) for seed in (0, 1)]

    def play_and_answer(run, agent, interactions):
        right = agent == "trained" and interactions > run.seed
        return [SimpleNamespace(answer="Anna" if right else None, question=one) for one in questions]

    monkeypatch.setattr(turns, "play_and_answer", play_and_answer)
    rows = {}
    for row in turns.study_turns(runs, most=2).table.splitlines():
        name, count, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        rows[name] = (count, [cell.split(" ")[0] for cell in cells])
    del rows["agent, questions"], rows["---"]
    assert rows == {
        "trained, all": ("4", ["0.000", "0.500", "1.000"]),
        "untrained, all": ("4", ["0.000", "0.000", "0.000"]),
        "math": ("2", ["0.000", "0.500", "1.000"]),
        "pop": ("2", ["0.000", "0.500", "1.000"]),
        "trained, seed 0": ("2", ["0.000", "1.000", "1.000"]),
        "trained, seed 1": ("2", ["0.000", "0.000", "1.000"]),
    }


def test_seed_0_is_reported_apart_from_the_others():
    """The wordings of the mini world were chosen on seed 0."""
    assert seed_groups([0, 1, 2, 1]) == {"seed 0": [0], "seeds 1, 2": [1, 2]}
    assert seed_groups([0, 1]) == {"seed 0": [0], "seed 1": [1]}
    assert seed_groups([0]) == seed_groups([1, 2]) == {}
    home = Measurements("home", "home", trained=[1.0, 1.0, 0.0, 0.0], untrained=[0.0] * 4, seeds=[0, 1, 2, 1])
    header, _, row = distance_table([home]).splitlines()
    cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert cells["trained, seed 0"].startswith("1.000 ")
    assert cells["trained, seeds 1, 2 |"].startswith("0.333 ")


def test_proposition_3_is_also_measured_from_the_other_environment(tmp_path):
    agent = tiny.save_agent(tmp_path / "agent")
    settings = {**PRESETS["mini"], "agent": str(agent), "seed": 3, "env": "mini-b"}
    settings |= {"max_turns": 2, "max_new": 8}
    write_yaml(TrainConfig(**settings), agent / GAME_FILE)
    run = load_run(tmp_path, per_kind=1, home="mini-b")
    trained_with = open_environment("mini-b", seed=3)
    for question in run.questions:
        reply = asyncio.run(trained_with.ask([{"role": "user", "content": question.text}]))
        assert run.environment.reply(question.text).text == reply
    table = study_distance([run]).table
    assert "| home |" in table and "| 100% A |" in table and "B |" not in table
    with pytest.raises(UsageError, match="is not a run with the environment mini, which"):
        load_run(tmp_path, per_kind=1)


def test_agents_of_each_number_of_turns_are_trained_once_and_compared(tmp_path, monkeypatch):
    """The trainings are replaced by a tiny agent with the settings that the flags give."""
    trained = []

    def train(folder, steps, flags):
        trained.append((folder.name, steps, dict(flags)))
        agent = tiny.save_agent(folder / "agent")
        [seed] = flags["--seed"]
        turns = 1 if "--env" in flags else flags["--max-turns"][0]
        settings = {**PRESETS["mini"], "agent": str(agent), "seed": seed, "max_turns": turns, "max_new": 20}
        write_yaml(TrainConfig(**settings), agent / GAME_FILE)

    monkeypatch.setattr(trained_turns, "train", train)
    runs = trained_turns.train_for_turns(tmp_path, [0, 1], steps=7, jobs=2)
    assert sorted(name for name, _, _ in trained) == sorted(
        f"turns{turns}-seed{seed}" for turns in (1, 2, 3, 4) for seed in (0, 1)
    )
    flags_of = {name: flags for name, _, flags in trained}
    assert flags_of["turns1-seed0"] == {"--seed": [0], "--env": ["none"]}
    assert flags_of["turns3-seed1"] == {"--seed": [1], "--max-turns": [3]}
    assert trained_turns.play_run(runs[0], per_kind=1).keys() == {"bridge", "compare", "pop", "math", "gen"}
    scores = {run: {"pop": [1.0, 0.0], "math": [float(run.turns > 2)]} for run in runs}
    rows = [row.split(" | ") for row in trained_turns.study_trained_turns(scores).table.splitlines()]
    assert [cell.strip("| ") for cell in rows[0]] == [
        "trained for",
        "n",
        "all seeds",
        "seed 0",
        "seed 1",
        "math",
        "pop",
    ]
    assert [row[2].split()[0] for row in rows[2:]] == ["0.333", "0.333", "0.667", "0.667"]
    assert [row[5].split()[0] for row in rows[2:]] == ["0.000", "0.000", "1.000", "1.000"]
