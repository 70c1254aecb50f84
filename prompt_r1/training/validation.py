"""Greedy games of held-out questions: the validation of a run, and the test after its last step."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from prompt_r1.environments.environment import Caller, Environment
from prompt_r1.errors import EnvError
from prompt_r1.f1 import exact_match, f1
from prompt_r1.pair.agent import Agent, Sampling, load_agent, play_question
from prompt_r1.pair.asking import read_answer, request_of
from prompt_r1.programs.progress import progress_bar
from prompt_r1.programs.tables import markdown_table, text_table
from prompt_r1.reward import Rule, score_games
from prompt_r1.rollout import play_groups, run_together
from prompt_r1.training.metrics import Row, metrics_of_game
from prompt_r1.training.run import Run
from prompt_r1.training.run_folder import TEST_FILE
from prompt_r1.types import Message, Question, ScoredGame, Trajectory

# A column of the tables → the metric of a game whose mean it shows.
METRICS = {"em": "em", "f1": "f1", "reward": "reward/mean", "format": "format", "turns": "turns"}
LABELS = {"em": "EM", "f1": "F1"}
COLUMNS = ["n", "errors", *(LABELS.get(name, name) for name in METRICS)]


async def play_greedily(
    agent: Agent,
    environment: Environment,
    questions: Sequence[Question],
    rule: Rule,
    *,
    after_each: Callable[[], object] = lambda: None,
) -> list[ScoredGame]:
    """Play and score a game of each question, in which the agent takes the most likely tokens.

    `after_each` is called when a game has ended, so that a progress bar can count the games.
    """

    async def play_one(question: Question, *, number: int, sample: int) -> Trajectory:
        game = await play_question(agent, environment, question, Sampling(f"{question.id}/{sample}"))
        after_each()
        return game

    games_PG = await play_groups(dict(enumerate(questions)), 1, play_one)
    trajectories = [group[0] for group in games_PG]
    rewards = score_games(trajectories, rule=rule)
    return [
        ScoredGame(trajectory, reward, advantage=None)
        for trajectory, reward in zip(trajectories, rewards, strict=True)
    ]


async def ask_directly(
    questions: Sequence[Question],
    environment: Environment,
    spec: str,
    *,
    after_each: Callable[[], object] = lambda: None,
) -> list[Row]:
    """Ask the environment of a SPEC alone, as the method `direct` of evaluate.py does.

    `after_each` is called after each question.
    """
    request = request_of(spec)

    async def ask_one(question: Question) -> Row:
        messages: list[Message] = [{"role": "user", "content": question.text + request}]
        try:
            reply = await environment.ask(messages, Caller(question.id))
        except EnvError:
            return {"env/errors": 1}
        finally:
            after_each()
        answer, _ = read_answer(reply.text, request)
        return {"em": exact_match(answer, question.answers), "f1": f1(answer, question.answers)}

    return await run_together(map(ask_one, questions))


def play_share(
    run: Run,
    agent: Agent,
    questions: Sequence[Question],
    *,
    name: str,
    after_each: Callable[[], object] = lambda: None,
) -> list[Row]:
    """Play a greedy game of each question: each rank plays its share. Called by every rank.

    Returns on every rank the metrics of all games, in the order of the questions. Each rank writes its games
    to trajectories/NAME-rankN.jsonl, and calls `after_each` after each of them.
    """
    own = run.ranks.share(questions)
    rule = run.config.reward_rule
    games = run.wait_for(play_greedily(agent, run.environment, own, rule, after_each=after_each))
    agent.engine.drop_cache()
    file = f"{name}-rank{run.ranks.rank}"
    run.ranks.on_every_rank(lambda: run.log.write_games(file, [[game] for game in games]))
    return run.ranks.gather_lists([metrics_of_game(game) for game in games])


def compare_on_test(run: Run, questions: Sequence[Question]) -> str:
    """Ask environment, untrained and trained agent the test questions. Called by every rank.

    Writes the rows by dataset to TEST_FILE in the run folder. Returns the table for a terminal.
    """
    rows: dict[str, list[Row]] = {}
    own = run.ranks.share(questions)
    spec = run.config.env
    asked = len(own) * (2 if spec == "none" else 3)
    with progress_bar(name="test", total=asked, shown=run.ranks.is_first) as bar:
        if spec != "none":
            alone = run.wait_for(ask_directly(own, run.environment, spec, after_each=bar.update))
            rows["environment alone"] = run.ranks.gather_lists(alone)
        for name, path in [("untrained", run.start), ("trained", run.folder / "agent")]:
            agent = load_agent(path, run.config, run.ranks.device)
            test_name = f"test-{name}"
            rows[f"{name} agent"] = play_share(run, agent, questions, name=test_name, after_each=bar.update)
            del agent  # Its memory is free before the next agent is loaded.
    by_dataset = table_by_dataset(rows, [question.dataset for question in questions]) + "\n"
    run.ranks.on_first_rank(lambda: (run.folder / TEST_FILE).write_text(by_dataset, "utf-8"))
    return table_of_methods(rows)


def validation_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """The metrics val/* of the games of a validation."""
    metrics = mean_metrics(rows)
    metrics["calls"] = float(sum(row["env/calls"] for row in rows))
    metrics["usd"] = mean([row["usd"] for row in rows]) if rows else 0.0
    return {f"val/{name}": value for name, value in metrics.items()}


def mean_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """The mean of each metric over the games that have it, with the number of games and of failed calls."""
    failed = [row for row in rows if row.get("env/errors")]
    means: dict[str, float] = {"n": len(rows) - len(failed), "errors": len(failed)}
    for name, metric in METRICS.items():
        values = [row[metric] for row in rows if metric in row]
        if values:
            means[name] = mean(values)
    return means


def table_of_methods(rows_of: Mapping[str, list[Row]]) -> str:
    """The results of a test, for a terminal: a row for each method."""
    lines = [[method, *_cells(rows)] for method, rows in rows_of.items()]
    return text_table(["test", *COLUMNS], lines)


def table_by_dataset(rows_of: Mapping[str, list[Row]], datasets: Sequence[str]) -> str:
    """The results of a test, in Markdown: a row for each method and dataset, and for each method over all.

    `datasets` has the dataset of each question, in the order of the rows.
    """
    lines = []
    names = sorted(set(datasets))
    for method, rows in rows_of.items():
        for name in names:
            part = [row for row, dataset in zip(rows, datasets, strict=True) if dataset == name]
            lines.append([method, name, *_cells(part)])
        if len(names) > 1:
            lines.append([f"**{method}**", "**all**", *_cells(rows)])
    return markdown_table(["method", "dataset", *COLUMNS], lines, left=2)


def _cells(rows: Sequence[Row]) -> list[str]:
    means = mean_metrics(rows)
    # "z" in the format writes a rounded -0.0 as 0.
    numbers = [f"{means[name]:z.3f}" if name in means else "–" for name in METRICS]
    return [str(means["n"]), str(means["errors"]), *numbers]
