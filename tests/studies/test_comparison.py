"""The comparison in `mini-advice`: the exhaustive search, and the tables over seeds."""

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import Prediction, PredictionFile, System
from prompt_r1.metrics.em_f1 import exact_match, f1
from prompt_r1.miniworld import make_questions, make_world, mini_world
from prompt_r1.miniworld.advice import ADVICE, AdvisedEnvironment
from prompt_r1.miniworld.mini_optimizer import ANYTHING
from prompt_r1.spending import Spending
from prompt_r1.studies import __main__ as studies
from prompt_r1.studies import comparison, programs, seeds
from prompt_r1.studies.ceiling import PromptScores, score_every_prompt
from prompt_r1.types import Question

WORLD = make_world(0)
ENVIRONMENT = AdvisedEnvironment(WORLD, seed=0)
KINDS = ("bridge", "compare", "pop", "math", "gen")
QUESTIONS = [one.question for one in make_questions(WORLD, "test", 15, 0, kinds=KINDS)]


@pytest.fixture(scope="module")
def found() -> PromptScores:
    """The scores of all combinations of advice."""
    return score_every_prompt(ENVIRONMENT, QUESTIONS)


def scores(prompt: str) -> dict[str, float]:
    """The score of each question, asked as the compared methods ask it."""
    found = {}
    for question in QUESTIONS:
        reply = ENVIRONMENT.reply(f"{question.text} Answer only.", [prompt]).text
        found[question.id] = (f1 if question.kind == "text" else exact_match)(reply, question.answers)
    return found


def test_the_exhaustive_search_scores_prompts_as_the_environment_answers_under_them(found):
    assert len(found.prompts) > 5000
    for prompt in islice(found.prompts, 0, None, 400):
        assert found.of(prompt, KINDS) == pytest.approx(scores(prompt), abs=1e-6), prompt


def test_no_prompt_of_the_optimiser_scores_more_than_the_best_of_all(found):
    best = sum(found.of(found.best(KINDS), KINDS).values())
    rng = random.Random(0)
    wordings = [*ANYTHING, *(one.wording for one in ADVICE.values())]
    tried = [sum(scores(" ".join(rng.sample(wordings, rng.randint(1, 7)))).values()) for _ in range(60)]
    assert sum(scores("").values()) < max(tried) <= best + 1e-4


def test_an_interval_of_several_seeds_is_over_seeds_and_questions():
    scores = {(seed, "pop"): [1.0] * right + [0.0] * (100 - right) for seed, right in enumerate((50, 60, 61))}
    # scipy.stats.t.interval(0.95, 2, loc=mean, scale=sem) of the seeds' means
    assert seeds.percent(scores) == "57.0 [41.9, 72.1]"
    assert seeds.percent({(0, "pop"): [1.0] * 50 + [0.0] * 50}) == "50.0 [40.4, 59.6]"  # Wilson's
    assert seeds.percent({(seed, "pop"): [0.0] * 9 for seed in range(3)}).startswith("0.0 [0.0, 1")
    assert seeds.percent({(0, "pop"): [1.0]}, difference=True) == "+100.0 [too few questions]"


def test_a_seed_that_is_given_twice_is_made_once(tmp_path, monkeypatch):
    """A bug: two trainings ran at once in one folder."""
    ran = []
    monkeypatch.setattr(comparison, "compare", lambda settings, seed: ran.append(seed))
    monkeypatch.setattr(comparison, "join", lambda settings, seeds: [])
    comparison.main(["--out", str(tmp_path), "--seeds", "3", "3"])
    assert ran == [3]


def test_the_agent_alone_is_trained_and_evaluated_where_a_method_needs_it(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(comparison, "train", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(comparison, "run", lambda program, flags, *, log: ran.append((program, flags, log)))
    settings = comparison.Settings(tmp_path, 3, 60, 1, 10, ("grpo-only", "agent-only"))
    comparison.compare(settings, 4)
    [asking, alone, (program, flags, log)] = ran
    assert asking[0] == tmp_path / "agent-seed4" and asking[2]["--env"] == ["mini-advice"]
    assert alone == (tmp_path / "alone-seed4", 3, {"--env": ["none"], "--seed": [4]})
    assert flags["--grpo-agent"] == [tmp_path / "alone-seed4"] and "--agent" not in flags
    assert (program, log) == ("evaluate", tmp_path / "results-seed4.log")


def test_methods_that_start_from_the_untrained_agent_do_not_take_the_newest_run(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(comparison, "train", lambda folder, *_: ran.append(folder.name))
    monkeypatch.setattr(comparison, "run", lambda program, flags, *, log: ran.append(flags.get("--agent")))
    for methods in (("untrained", "best-of-n"), ("direct",), ("self-consistency",)):
        comparison.compare(comparison.Settings(tmp_path, 3, 60, 1, 10, methods), 4)
    assert ran == [["mini"], None, "agent-seed4", None]


def two_of_each_kind(seed: int) -> tuple[list[Question], list[Question]]:
    """A test question of each kind, and another."""
    test = mini_world(seed).test
    first = [next(one for one in test if one.dataset == kind) for kind in KINDS]
    second = [next(one for one in test[::-1] if one.dataset == kind) for kind in KINDS]
    return first, second


class FakePrograms:
    """In place of the programs: writes what they would leave, and notes their flags."""

    def __init__(self) -> None:
        self.flags: list[tuple[str, dict[str, list[str]]]] = []

    def run(self, program, flags, *, log, module="prompt_r1") -> None:
        flags = {flag: list(map(str, values)) for flag, values in flags.items()}
        self.flags.append((program, flags))
        out, seed = Path(flags["--out"][0]), int(flags["--seed"][0])
        if program == "train":
            (out / "agent").mkdir(parents=True)
            lines = [
                {"step": 0, "env/paid": 5.0, "env/usd": 0.25},
                {"step": 3, "env/paid": 30.0, "env/reused": 5.0, "env/usd": 0.5},
            ]
            (out / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
            return
        file = PredictionFile(out / "predictions.jsonl")
        # opro is right on one half of the questions with seed 0, and on the other with seed 1.
        first, second = two_of_each_kind(seed)
        asked = first + second
        right = {"direct": (), "opro": [first, second][seed], "prompt-r1": asked}
        for method, known in right.items():
            system = System(method, "mini-advice", str(out.with_name(f"agent-seed{seed}")))
            self.add(file, system, f"old {method}", asked, known=())
            self.add(file, system, f"new {method}", asked, known)
        file.close()
        spent = {"task_calls": 100 + seed, "optimizer_calls": 20, "usd": 0.125}
        (out / "preparation.json").write_text(json.dumps({"opro (mini-advice)": spent}))

    def add(self, file: PredictionFile, system: System, setting: str, asked, known) -> None:
        """Answers to all questions, right for those that are known."""
        for question in asked:
            said = question.answers[0] if question in known else "?"
            file.add(Prediction(question, said, spent=Spending(3, usd=0.002), system=system, setting=setting))


def rows_of(table: str) -> dict[str, list[str]]:
    """The cells of a Markdown table by the first of their row."""
    rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines())
    return {row[0]: row[1:] for row in rows}


def test_the_comparison_trains_evaluates_and_joins_the_seeds(tmp_path, monkeypatch, capsys):
    programs_run = FakePrograms()
    monkeypatch.setattr(comparison, "run", programs_run.run)
    monkeypatch.setattr(programs, "run", programs_run.run)
    line = f"--seeds 0 1 --steps 3 --budget 60 --examples 1 --limit 10 --jobs 1 --out {tmp_path} --method"
    comparison.main([*line.split(), "direct", "opro", "prompt-r1"])
    assert [program for program, _ in programs_run.flags] == 2 * ["train", "evaluate"]
    given = [flags["--seed"] for _, flags in programs_run.flags]
    assert given == 2 * [["0"]] + 2 * [["1"]]
    trained, evaluated, *_ = (flags for _, flags in programs_run.flags)
    agent, common = str(tmp_path / "agent-seed0"), {"--env": ["mini-advice"], "--seed": ["0"]}
    price = ["0.15,0.60"]  # of gpt-4o-mini, per million tokens in and out
    assert trained == {**common, "--steps": ["3"], "--out": [agent], "--env-price": price}
    assert evaluated == {
        **common,
        **{"--method": ["direct", "opro", "prompt-r1"], "--data": ["mini", "mini:ood"], "--limit": ["10"]},
        **{"--env-price": price, "--optimizer-price": price, "--agent": [agent], "--sft-lr": ["3e-3"]},
        **{"--optimize-calls": ["60"], "--opro-train": ["1"], "--optimize-val": ["1"]},
        **{"--opro-steps": ["1000000"], "--textgrad-epochs": ["1000000"], "--gepa-calls": ["1000000000"]},
        "--out": [str(tmp_path / "results-seed0")],
    }
    text = (tmp_path / "comparison.md").read_text("utf-8")
    assert text.strip() in capsys.readouterr().out
    table2 = text.split("## Table 2")[1].split("##")[0].strip().split("\n\n")[-1]
    cells = rows_of(table2)
    assert "## Table 3" not in text, "no question out of distribution was asked"
    assert cells["direct"][0].startswith("0.0 [") and cells["direct"][1] == "0.0, 0.0"
    assert cells["opro"][0].startswith("50.0 [") and cells["opro"][1] == "50.0, 50.0"
    assert cells["prompt-r1"][0].startswith("100.0 [")
    assert cells["prompt-r1"][3:7] == ["40", "0.500", "3.00", "2.0000"]
    assert cells["opro"][3:5] == ["120", "0.125"] and cells["direct"][3:5] == ["0", "0.000"]
    best = float(cells[comparison.CEILING][0].split()[0])
    assert cells["direct"][2].startswith(f"+{best:.1f} [") and cells[comparison.CEILING][2] == ""
    assert float(cells[comparison.BOUND][0].split()[0]) >= best > 0
    assert float(cells[comparison.SCRIPT][0].split()[0]) >= 90, "clear questions are nearly always answered"
    assert cells["method"][-5:] == list(KINDS) and cells["direct"][-5].startswith("0.0 [")
    table4 = rows_of(text.split("## Table 4 (ablations)")[1].strip().split("\n\n")[0])
    assert list(table4)[2:] == ["direct", "prompt-r1"], "agent-only and untrained did not play"
    assert table4["direct"][2].startswith("+100.0 [") and table4["prompt-r1"][2] == ""
    # What is trained is not trained again.
    settings = comparison.Settings(tmp_path, 3, 60, 1, 10, ("direct", "prompt-r1"))
    comparison.compare(settings, 0)
    assert [program for program, _ in programs_run.flags[4:]] == ["evaluate"]


def test_what_a_method_took_before_its_first_answer_is_read_from_its_files(tmp_path):
    """Reused calls count too; dollars are those of the whole run. Who prepared nothing, took nothing."""
    assert seeds.preparation(tmp_path, "opro", "") == (0.0, 0.0)
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": 0, "env/reused": 2.0}, {"step": 1, "env/paid": 4.0, "env/usd": 0.5}, {"step": 2}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for method in ("prompt-r1", "agent-only"):
        assert seeds.preparation(tmp_path, method, str(run)) == (6.0, 0.5)
    assert seeds.preparation(tmp_path, "prompt-r1", str(tmp_path / "none")) == (0.0, 0.0)


@pytest.mark.slow
def test_the_comparison_joins_the_seeds_and_reuses_what_is_there(tmp_path, monkeypatch, capsys):
    """With methods that need no agent: the programs run as a user runs them, in this process."""
    monkeypatch.chdir(tmp_path)
    ran = []

    def run_here(program, lines, *, log):
        import evaluate

        ran.append(program)
        evaluate.main([str(part) for flag, values in lines.items() for part in (flag, *values)])

    monkeypatch.setattr(comparison, "run", run_here)
    line = f"--seeds 0 1 --budget 60 --examples 4 --limit 30 --jobs 1 --out {tmp_path} --method direct gepa"
    comparison.main(line.split())
    first = (tmp_path / "comparison.md").read_text()
    assert ran == ["evaluate", "evaluate"]
    assert "## Table 2" in first and "## Table 3" in first
    rows = dict(re.findall(r"^\| ([\w ]+) \| ([\d.]+) \[", first.split("## Table 3")[0], re.MULTILINE))
    assert list(rows) == ["direct", "gepa", comparison.CEILING, comparison.BOUND, comparison.SCRIPT]
    assert all(float(rows[comparison.BOUND]) >= float(rows[name]) for name in list(rows)[:-1])
    spent = [
        json.loads((tmp_path / f"results-seed{seed}/preparation.json").read_text())["gepa (mini-advice)"]
        for seed in (0, 1)
    ]
    calls = sum(one["task_calls"] + one["optimizer_calls"] for one in spent) / 2
    assert calls <= 60 * 6 and f"| {calls:,.0f} |" in first, "six searches for each seed"
    assert all(one["usd"] > 0 for one in spent), "the tokens of mini-advice and of its optimiser are counted"
    journals = [path.read_bytes() for path in sorted(tmp_path.glob("results-*/journal/*"))]
    comparison.main(line.split())
    assert (tmp_path / "comparison.md").read_text() == first
    assert [path.read_bytes() for path in sorted(tmp_path.glob("results-*/journal/*"))] == journals


def test_results_folders_of_several_seeds_make_one_table(tmp_path, monkeypatch, capsys):
    programs_run = FakePrograms()
    monkeypatch.setattr(programs, "run", programs_run.run)
    folders = []
    for seed in (0, 1):
        folders.append(tmp_path / f"results-{seed}")
        programs_run.run("evaluate", {"--out": [folders[-1]], "--seed": [seed]}, log=None)
    studies.main(["seeds", *map(str, folders), "--data", "pop", "bridge"])
    cells = rows_of(capsys.readouterr().out)
    assert cells["method"][-2:] == ["pop", "bridge"]
    assert cells["opro"][0].startswith("50.0 [") and cells["opro"][1] == "50.0, 50.0"
    assert cells["direct"][2].startswith("+100.0 [") and cells["prompt-r1"][2] == ""
    for wrong, sentence in (
        (["--reference", "bc"], "no answers of bc"),
        (["--data", "x"], "lacks answers to x"),
    ):
        with pytest.raises(UsageError, match=sentence):
            studies.main(["seeds", *map(str, folders), *wrong])


def test_seeds_are_joined_for_one_environment(tmp_path, capsys):
    [question, *_] = two_of_each_kind(0)[0]
    file = PredictionFile(tmp_path / "predictions.jsonl")
    for env, said in [("mini", question.answers[0]), ("mini-mute", "?")]:
        file.add(Prediction(question, said, spent=Spending(), system=System("direct", env), setting=env))
    file.close()
    line = ["seeds", str(tmp_path), "--reference", "direct"]
    for name, score in [("mini", "100.0"), ("mini-mute", "0.0")]:
        studies.main([*line, "--env", name])
        assert rows_of(capsys.readouterr().out)["direct"][1] == score
    for wrong, sentence in [([], r"one of \['mini', 'mini-mute'\] with --env"), (["--env", "x"], "with x")]:
        with pytest.raises(UsageError, match=sentence):
            studies.main([*line, *wrong])


def test_a_program_that_fails_names_its_log(tmp_path):
    log = tmp_path / "train.log"
    with pytest.raises(UsageError, match=r"train ended with exit code 2: see .*train\.log"):
        programs.run("train", {"--steps": ["none"]}, log=log)
    assert "invalid int value" in log.read_text()


@pytest.mark.parametrize("study", ["failures", "comparison"])
def test_a_negative_seed_is_refused(study, tmp_path):
    with pytest.raises(UsageError, match=r"--seeds must be 0 \(none\) or more, not -1"):
        studies.main([study, "--seeds", "-1", "--out", str(tmp_path)])
