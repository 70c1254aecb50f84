"""The tables of the studies, the games with a forced answer, and the demonstrations of parts."""

import asyncio
import math
import re
import statistics
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from itertools import combinations

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.f1 import exact_match
from prompt_r1.miniworld.demonstrations import demonstrations
from prompt_r1.miniworld.questions import TRAINING_MIX
from prompt_r1.protocol import Codec
from prompt_r1.reward import RULES, score
from prompt_r1.settings.agent import INSTRUCTIONS
from prompt_r1.spending import Spending
from prompt_r1.training.log import Log
from prompt_r1.training.warm_start import read_games
from prompt_r1.types import GameSettings, Question, ScoredGame
from studies import chain, parts, rules, seeds, turns
from studies.parts import show_part
from studies.runs import COST_FILE
from studies.turns import THOUGHT_AFTER_ASKING, THOUGHT_BEFORE_ASKING
from tests.support import tiny
from tests.support.paths import ROOT
from tests.support.tiny import ScriptedAgent, ScriptedEnvironment, think

QUESTION = Question("q", "test", "Who made it?", ("Anna",))


class GreedyScript(ScriptedAgent):
    """A scripted agent as the study loads one: with a codec, and sampled at a temperature."""

    codec = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])
    game = GameSettings(max_turns=9, max_tokens=5000, max_new=500)

    async def generate(self, tokens, *, max_new, seed, temperature):
        assert temperature == 0.0
        return await super().generate(tokens, max_new=max_new, seed=seed)


@pytest.mark.parametrize(("asked", "thought"), [(0, THOUGHT_BEFORE_ASKING), (2, THOUGHT_AFTER_ASKING)])
def test_each_game_has_as_many_interactions_as_it_may_and_then_its_answer(asked, thought):
    asking, answering = [think("more", prompt="Who?")] * asked, " Anna </answer>"
    agent = GreedyScript([*asking, answering])
    environment = ScriptedEnvironment(["one", "two", "three"])
    [game] = asyncio.run(turns.play_and_answer(agent, environment, [QUESTION], asked))
    assert (game.stop, game.answer, len(environment.asked)) == ("answered", "Anna", asked)
    assert [turn.text for turn in game.turns] == [*asking, thought + answering]
    assert tiny.tokenizer().decode(agent.read[-1]).endswith("assistant\n" + thought)
    assert len(game.tokens) == len(game.sampled) == len(game.logprobs)


def test_a_game_that_ends_earlier_keeps_its_answer():
    agent, environment = GreedyScript([think("sure", answer="Bob")]), ScriptedEnvironment([])
    [game] = asyncio.run(turns.play_and_answer(agent, environment, [QUESTION], 2))
    assert game.answer == "Bob"


def test_the_table_of_turns_has_both_agents_and_the_kinds_of_the_trained_one():
    cells = {
        (name, count): {(0, "pop"): {"p": float(count > 0 and name == "trained")}, (0, "math"): {"m": 0.0}}
        for name in ("untrained", "trained")
        for count in range(turns.MAX_INTERACTIONS + 1)
    }
    rows = {name: [cell.split(" ")[0] for cell in columns] for name, *columns in turns.rows_of(cells)}
    assert rows == {
        "untrained, all": ["0.0"] * 4,
        "trained, all": ["0.0", "50.0", "50.0", "50.0"],
        "trained, math": ["0.0"] * 4,
        "trained, pop": ["0.0", "100.0", "100.0", "100.0"],
    }


def answers(method: str, right: int, of: int = 100, *, dataset: str = "pop", sample: int = 0):
    """Predictions of a method, the first of which are right."""
    return [
        Prediction(
            System(method, "mini"),
            Question(str(number), dataset, "Who?", ("Anna",)),
            sample,
            "Anna" if number < right else "Bob",
            spent=Spending(calls=2),
        )
        for number in range(of)
    ]


def cells_of(table: str) -> dict[str, list[str]]:
    """The cells of each row, by method."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {method: cells for method, *cells in rows}


def test_an_interval_of_several_seeds_is_over_seeds_and_questions():
    """scipy.stats.t.interval(0.95, 2, loc=mean, scale=sem) of the seeds' means; Wilson's of one seed.

    A difference within one seed has no interval.
    """
    both = [[*answers("opro", right), *answers("prompt-r1", 100)] for right in (50, 60, 61)]
    opro = cells_of(seeds.table(both, "prompt-r1"))["opro"]
    assert opro[:2] == ["57.0 [41.9, 72.1]", "50.0, 60.0, 61.0"] and opro[3] == "2.00"
    assert opro[2].startswith("+43.0 [+27.9, +58.1]")
    alone = cells_of(seeds.table(both[:1], "prompt-r1"))["opro"]
    assert alone[0] == "50.0 [40.4, 59.6]" and alone[2] == "+50.0"


def test_students_interval_over_seeds_is_scipys():
    """scipy.stats.t.interval(0.95, 2, loc=mean, scale=sem) of three means."""
    assert seeds.student_interval([0.5, 0.6, 0.61]) == pytest.approx((0.41891, 0.72109), abs=1e-4)


def test_more_than_ten_seeds_use_the_last_value_of_the_table():
    means = [0.4, 0.6] * 10
    low, high = seeds.student_interval(means)
    half = 2.262 * statistics.stdev(means) / math.sqrt(20)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half))


def test_seeds_that_agree_by_chance_have_no_narrower_interval_than_their_questions():
    """Student's interval of three equal means is a point, whatever the number of questions."""
    same = [answers("direct", 50)] * 3
    assert cells_of(seeds.table(same, "direct"))["direct"][0] == "50.0 [44.4, 55.6]"


def test_datasets_have_equal_weight_and_failed_calls_none():
    failed = [Prediction(System("direct", "mini"), QUESTION, 0, None, error="429")]
    given = [*answers("direct", 100), *answers("direct", 0, of=10, dataset="math"), *failed]
    row = cells_of(seeds.table([given], "direct", ["math", "pop"]))["direct"]
    assert row[0].startswith("50.0 ") and row[4].startswith("0.0") and row[5].startswith("100.0")


@pytest.mark.parametrize(("n", "right"), [(6, 0), (6, 1), (6, 4), (6, 6), (3, 2)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n, right, k):
    marks = [1.0] * right + [0.0] * (n - right)
    draws = list(combinations(marks, k))
    assert seeds.pass_at_k(marks, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_missing_answers_are_refused():
    with pytest.raises(UsageError, match="prompt-r1; --reference"):
        seeds.table([answers("direct", 1)], "prompt-r1")
    with pytest.raises(UsageError, match=r"folder 2 lacks 1 .*direct .*pop"):
        seeds.table([answers("direct", 1), []], "direct")
    with pytest.raises(UsageError, match=r"folder 1 lacks 32 .*direct .*pop"):
        seeds.table([answers("direct", 1)], "direct", k=32)
    with pytest.raises(UsageError, match="have answered different questions"):
        seeds.table([[*answers("direct", 1), *answers("opro", 1, of=9)]], "direct")


def test_no_demonstration_chains_two_facts():
    """No request holds what only a reply has told; questions of two steps get a single request."""
    asked: Counter[str] = Counter()
    answered, right = 0, 0
    for question, shown in demonstrations(0, worlds=2, games=600, demonstrator=show_part):
        told: set[str] = set()
        for turn in shown:
            used = set(re.findall(r"\d+|[A-Z]\w+ [A-Z]\w+", turn.action.prompt or ""))
            assert not used & told, (question.text, shown)
            words = re.findall(r"\d+|[A-Z]\w+ [A-Z]\w+", turn.reply or "")
            told |= {word for word in words if word not in question.text}
            asked[question.dataset] += turn.action.prompt is not None
        if question.dataset == "parts":
            answered += shown[-1].action.answer is not None
            right += exact_match(shown[-1].action.answer or "", question.answers) == 1
        else:
            assert sum(turn.action.prompt is not None for turn in shown) <= 1
    assert set(asked) == {"parts", *TRAINING_MIX} and right > 0.95 * answered


def played(calls: int, answer: str) -> ScoredGame:
    """A game about a question of one step with this many calls, scored by the paper's rule."""
    question = Question("p", "pop", "Who made it?", ("Anna",))
    agent = GreedyScript([*[think("more", prompt="Who?")] * calls, think("known", answer=answer)])
    environment = ScriptedEnvironment(["Ann"] * calls)
    [game] = asyncio.run(turns.play_and_answer(agent, environment, [question], 5))
    return ScoredGame(game, score(game, rule=RULES["paper"]), advantage=None)


@pytest.mark.parametrize(("calls", "answer"), [(0, "Anna"), (1, "Anna"), (2, "Anna"), (2, "Bob")])
def test_the_ablated_rewards_are_the_terms_of_the_papers(calls, answer):
    """By hand: α = .25 for each call, β + γ + δ = 1 for the answer; the gate of the paper needs 1.5."""
    game = played(calls, answer)
    format_reward = min(1.5, 0.25 * calls + 1.0)
    answer_reward = float(answer == "Anna")
    assert rules.format_only(game.trajectory, game.reward) == pytest.approx(format_reward)
    assert rules.answer_only(game.trajectory, game.reward) == answer_reward
    assert rules.additive(game.trajectory, game.reward) == pytest.approx(format_reward + answer_reward)
    gated = answer_reward if format_reward == 1.5 else 0.0
    assert game.reward.total == pytest.approx(format_reward - 1.5 + gated)


def test_the_tables_of_rules_compare_the_finished_runs_of_equal_seeds(tmp_path):
    """`paper` has three seeds, `additive` has one: the difference is between the runs of this seed."""
    games = {("paper", seed): played(2, "Anna" if seed else "Bob") for seed in (0, 1, 2)}
    games["additive", 1] = played(1, "Bob")
    for (rule, seed), game in games.items():
        folder = rules.folder_of(tmp_path, rule, seed)
        folder.mkdir()
        log = Log(folder)
        for agent in ("trained", "untrained"):
            log.write_games(f"test-{agent}", [[game]])
        log.write_metrics({"step": 0, "val/em": 0.1, "val/reward": 0.1, "val/format": 1.0})
        validation = {"val/em": 0.9 + seed / 100, "val/reward": 0.9, "val/format": 0.5}
        log.write_metrics({"step": 5, **validation, "env/calls": 70.0})
        (folder / COST_FILE).write_text('{"cpu_minutes": 1.5, "gigabytes": 0.5}\n' * 2)
        (folder / "test.md").touch()
    finished = rules.finished_runs(tmp_path)
    assert {rule: list(runs) for rule, runs in finished.items()} == {"paper": [0, 1, 2], "additive": [1]}
    accuracy, by_kind, calls, costs = map(cells_of, rules.tables(finished).split("\n\n"))
    assert accuracy["paper"][1] == "0.0, 100.0, 100.0" and accuracy["paper"][2] == ""
    assert accuracy["additive"][1:3] == ["0.0", "-100.0"] and accuracy["additive"][4] == "100.0"
    assert by_kind["additive"] == [accuracy["additive"][0]]
    assert calls["paper"][0] == "2.00 [2.00, 2.00]"
    assert calls["additive"][:2] == ["1.00", "-1.00"]
    assert costs["paper"] == ["5, 5, 5", "0.90, 0.91, 0.92", "70, 70, 70", "3.0, 3.0, 3.0", "0.5, 0.5, 0.5"]
    svg = xml.etree.ElementTree.fromstring(rules.figure(finished))
    curves = [part.get("points") for part in svg.iter() if part.tag.endswith("polyline")]
    assert len(curves) == 2 * 4 and len(set(curves)) == 2 + 4  # EM of each run; format of each panel


@pytest.mark.slow
def test_the_study_of_rules_runs_quickly():
    line = [sys.executable, "-m", "studies.rules", "--quick"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "| additive" in done.stdout and "question " in done.stdout


def bridge_game(*requests_and_replies: tuple[str, str], answer: str) -> ScoredGame:
    """A game about a bridge question with these requests and replies."""
    question = Question("b", "bridge", "Who is the teacher of the star of Hollow Rose?", ("Maria Berger",))
    requests = [think("more", prompt=request) for request, _ in requests_and_replies]
    agent = GreedyScript([*requests, think("known", answer=answer)])
    environment = ScriptedEnvironment([reply for _, reply in requests_and_replies])
    [game] = asyncio.run(turns.play_and_answer(agent, environment, [question], 5))
    return ScoredGame(game, score(game, rule=RULES["release"]), advantage=None)


STAR = ("Who is the star of Hollow Rose?", "Sure, the star of Hollow Rose is Irene Marino.")
TEACHER = ("Who is the teacher of Irene Marino?", "The teacher of Irene Marino is Maria Berger.")
UNUSED = ("Who is the teacher of the star of Hollow Rose?", "That would be Maria Berger, I think.")


def test_a_request_with_a_name_that_only_a_reply_told_is_a_chain(tmp_path):
    """A name in the question is no chain, and neither is a name that a later reply tells."""
    games = [
        bridge_game(STAR, TEACHER, answer="Maria Berger"),
        bridge_game(STAR, TEACHER, answer="Irene Marino"),
        bridge_game(STAR, UNUSED, answer="Maria Berger"),
        bridge_game(TEACHER, STAR, answer="Maria Berger"),
        bridge_game(UNUSED, answer="Maria Berger"),
        bridge_game(answer="Maria Berger"),
    ]
    log = Log(tmp_path)
    log.write_games("step-000001", [games])
    rows = chain.read_lines(tmp_path / "trajectories" / "step-000001-rank0.jsonl")
    assert [chain.has_chain(row) for row in rows] == [True, True, False, False, False, False]
    assert [chain.is_right(row) for row in rows] == [True, False, True, True, True, True]


def test_the_table_of_chains_counts_each_step(tmp_path):
    found = bridge_game(STAR, TEACHER, answer="Maria Berger")
    answered_wrongly = bridge_game(STAR, TEACHER, answer="Irene Marino")
    asked = bridge_game(UNUSED, answer="Maria Berger")
    log = Log(tmp_path)
    validation = {"val/reward": 0.1, "val/format": 1.0, "val/n": 32}
    log.write_metrics({"step": 0, "val/em": 0.1, "val/calls": 48, **validation})
    log.write_games("step-000001", [[asked, answered_wrongly]])
    log.write_metrics({"step": 1, "em/any": 0.25, "em": 0.5, "env/calls": 3.0})
    log.write_games("step-000002", [[found, answered_wrongly], [found, found]])
    validation |= {"val/em": 0.5, "val/calls": 64}
    log.write_metrics({"step": 2, "em/any": 1.0, "em": 0.75, "env/calls": 8.0, **validation})
    (tmp_path / COST_FILE).write_text('{"exit_code": 75, "cpu_minutes": 2, "gigabytes": 3}\n' * 2)
    expected = ["0.25, 1.00", "1, 4", "0, 3", "0.50, 0.75", "0.10, 0.50", "11", "112", "4", "3.0"]
    assert chain.learning_of(tmp_path) == expected
    assert not chain.has_ended(tmp_path)
    with pytest.raises(UsageError, match="no seed is finished"):
        chain.finished_seeds(tmp_path)


def test_demonstrations_with_other_shares_use_no_reply_in_a_request(tmp_path):
    """With all other games of the kind "beginning", each asks for the first step of its question."""
    path = tmp_path / "games.jsonl"
    parts.write_games(path, 40, 0, strategies={"beginning": 1.0})
    shown = list(read_games(path))
    assert len(shown) == 40
    bridges = 0
    for question, played in shown:
        bridges += " of the " in question.text
        told = set()
        for turn in played:
            assert "as it is" not in turn.text
            if turn.reply is not None:
                assert not told & chain.names_in(turn.action.prompt)
                told |= chain.names_in(turn.reply) - chain.names_in(question.text)
    assert bridges > 5


@pytest.mark.slow
def test_the_study_of_chains_runs_quickly():
    line = [sys.executable, "-m", "studies.chain", "--quick"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "| rft" in done.stdout and "| prompt-r1" in done.stdout and "| 0 " in done.stdout
