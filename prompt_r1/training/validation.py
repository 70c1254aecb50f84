"""What an evaluation says of each game, the means by dataset, and the table."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from prompt_r1.errors import EnvError
from prompt_r1.metrics.text import exact_match, f1
from prompt_r1.reward import Rule, score, well_formed
from prompt_r1.types import Ask, Question, Trajectory


@dataclass(frozen=True)
class Result:
    """One evaluated question. A method that plays no game has no reward, format and turns."""

    id: str
    dataset: str
    prediction: str
    em: float
    f1: float
    reward: float | None = None
    format: float | None = None  # 1: every turn was well-formed and the last one answered
    turns: float | None = None
    error: str = ""  # the environment failed: not scored, counted apart


def judge(trajectory: Trajectory, *, rule: Rule) -> Result:
    """EM, F1, reward, format and turns of one game."""
    question = trajectory.question
    if trajectory.stop == "env_error":
        return Result(
            question.id, question.dataset, "", 0.0, 0.0, error=trajectory.error or "the environment failed"
        )
    answer = trajectory.answer or ""
    return Result(
        id=question.id,
        dataset=question.dataset,
        prediction=answer,
        em=exact_match(answer, question.answers),
        f1=f1(answer, question.answers),
        reward=score(trajectory, rule=rule).total,
        format=float(well_formed(trajectory)),
        turns=float(len(trajectory.turns)),
    )


async def ask_directly(questions: Sequence[Question], ask: Ask) -> list[Result]:
    """The environment alone: the question and "Answer only."; its reply is the prediction."""

    async def one(question: Question) -> Result:
        try:
            reply = await ask([{"role": "user", "content": f"{question.text} Answer only."}])
        except EnvError as error:
            return Result(question.id, question.dataset, "", 0.0, 0.0, error=str(error))
        return Result(question.id, question.dataset, reply,
                      exact_match(reply, question.answers), f1(reply, question.answers))  # fmt: skip

    return await asyncio.gather(*map(one, questions))


async def play_all(
    questions: Sequence[Question], play_one: Callable[[Question, str], Awaitable[Trajectory]], *, rule: Rule
) -> list[Result]:
    """One game of each question, all at once."""
    games = await asyncio.gather(*(play_one(question, f"evaluation/{question.id}") for question in questions))
    return [judge(trajectory, rule=rule) for trajectory in games]


METRICS = ("em", "f1", "reward", "format", "turns")


def means(results: Iterable[Result]) -> dict[str, float]:
    """The mean of each metric over the results that have it, failed calls left out; `n`, `errors`."""
    results = list(results)
    scored = [result for result in results if not result.error]
    columns = {
        name: [value for result in scored if (value := getattr(result, name)) is not None] for name in METRICS
    }
    averages = {name: mean(values) for name, values in columns.items() if values}
    return {"n": len(scored), "errors": len(results) - len(scored), **averages}


def table(rows: dict[str, list[Result]]) -> str:
    """A Markdown table: a row for each method and dataset, and each method's mean over the questions."""
    lines = [
        "| method | dataset | n | errors | EM | F1 | reward | format | turns |",
        "|---|---|" + "---:|" * 7,
    ]
    for method, results in rows.items():
        datasets = sorted({result.dataset for result in results})
        parts = [(name, [result for result in results if result.dataset == name]) for name in datasets]
        lines += [_line(method, name, means(part)) for name, part in parts]
        if len(datasets) > 1:
            lines.append(_line(f"**{method}**", "**all**", means(results)))
    return "\n".join(lines)


def _line(method: str, dataset: str, averages: dict[str, float]) -> str:
    numbers = [f"{round(averages[name], 3) + 0:.3f}" if name in averages else "–" for name in METRICS]
    return f"| {method} | {dataset} | {averages['n']} | {averages['errors']} | " + " | ".join(numbers) + " |"
