"""`gepa` (Agrawal et al. 2025): prompts evolve by reflection, and every prompt that is best on some
validation question may be a parent.

Each iteration draws a parent from the Pareto front, runs it on 3 training questions, lets the optimiser
rewrite it in the light of what went wrong, and runs the child on the same 3. A child that is better there is
scored on all validation questions and joins. The prompt with the best mean validation score wins.

Calls: one a validation question for the seed; 6 of the environment and 1 of the optimiser an iteration (3 and
none where the parent was perfect), and one a validation question for a child that joins. The budget is looked
at before an iteration, so that the last one may go over it.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prompt_r1.baselines.optimise import Bench, Trial, chosen
from prompt_r1.errors import UsageError
from prompt_r1.types import Question

ROLE = "You improve the instructions of language models."
REQUEST = """\
An assistant works under this instruction:
```
{prompt}
```
Tasks that it was given, what it replied, and what was to be said about it:

{cases}

Write a better instruction. Work out from the tasks what is asked for and in which form; keep every fact \
about their subject that a future task may need, and every strategy that is of use beyond one task. Write \
the new instruction, and nothing else, between ``` and ```."""


@dataclass(frozen=True)
class Candidate:
    """A prompt and its score on each validation question."""

    prompt: str
    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


async def gepa(
    bench: Bench,
    train: Sequence[Question],
    validation: Sequence[Question],
    *,
    seed_prompt: str,
    max_task_calls: int = 150,
    batch_size: int = 3,
    validation_limit: int = 50,
    seed: int = 0,
) -> str:
    """The prompt with the best mean score on the validation questions; of equals the first."""
    held_out = chosen(validation, validation_limit, seed)
    if not train or not held_out:
        raise UsageError("gepa needs training and validation questions: give --train-data and --val-data, "
                         "and --optimize-val above 0")  # fmt: skip
    rng = random.Random(seed)
    batches = minibatches(train, batch_size, rng)

    async def candidate(prompt: str, **event: object) -> Candidate:
        scores = [trial.score for trial in await bench.trials(prompt, held_out)]
        found = Candidate(prompt, tuple(scores))
        bench.record(prompt=prompt, validation=found.mean, **event)
        return found

    pool = [await candidate(seed_prompt, iteration=0)]
    iteration = 0
    while bench.ledger.task_calls < max_task_calls and bench.affords(7 + len(held_out)):
        iteration += 1
        parent = draw_parent(pool, rng)
        batch = next(batches)
        before = await bench.trials(parent.prompt, batch)
        if all(trial.score == 1 for trial in before):
            bench.record(iteration=iteration, skipped="the parent was perfect")
            continue
        reply = await bench.write(ROLE, reflection(parent.prompt, before), sample=iteration)
        child = extract(reply)
        after = await bench.trials(child, batch)
        if sum(trial.score for trial in after) > sum(trial.score for trial in before):
            pool.append(await candidate(child, iteration=iteration, parent=pool.index(parent)))
        else:
            bench.record(iteration=iteration, rejected=child)
    return max(pool, key=lambda found: found.mean).prompt


def draw_parent(pool: Sequence[Candidate], rng: random.Random) -> Candidate:
    """A candidate of the Pareto front, as likely as it is best on many validation questions (alone or not).

    A candidate is left out when each of its questions has another remaining one that does as well; the worst
    on average go first.
    """
    columns = list(zip(*(found.scores for found in pool), strict=True))
    fronts = [{number for number, s in enumerate(column) if s == max(column)} for column in columns]
    remaining = set().union(*fronts)
    for number in sorted(remaining, key=lambda number: pool[number].mean):
        others = remaining - {number}
        if all(front & others for front in fronts if number in front):
            remaining = others
    places = [number for front in fronts for number in sorted(front & remaining)]
    return pool[rng.choice(places)]


def minibatches(questions: Sequence[Question], size: int, rng: random.Random) -> Iterator[list[Question]]:
    """Shuffled epochs for ever; the last batch of one is filled up with what was used least."""
    used: Counter[int] = Counter()
    numbers = range(len(questions))
    while True:
        order = rng.sample(numbers, len(numbers))
        used.update(order)
        while len(order) % size:
            filler = min(numbers, key=lambda number: used[number])
            used[filler] += 1
            order.append(filler)
        for start in range(0, len(order), size):
            yield [questions[number] for number in order[start : start + size]]


def reflection(prompt: str, trials: Sequence[Trial]) -> str:
    """What the optimiser reads of a minibatch."""
    return REQUEST.format(prompt=prompt, cases="\n\n".join(map(_case, range(1, len(trials) + 1), trials)))


def _case(number: int, trial: Trial) -> str:
    return (
        f"# Task {number}\n## Inputs\n{trial.question.text}\n## Generated Outputs\n{trial.reply}\n"
        f"## Feedback\n{feedback(trial)}"
    )


def feedback(trial: Trial) -> str:
    """No model is asked for it."""
    if trial.score == 1:
        return "This answer is right."
    gold = trial.question.answers[0]
    return f"This answer is not right (score {trial.score:.2f} of 1). The right answer is {gold!r}."


def extract(reply: str) -> str:
    """The text between the first and the last fence, without the name of a language; else the whole reply."""
    first, last = reply.find("```"), reply.rfind("```")
    if first < 0:
        return reply.strip()
    inside = reply[first + 3 : last if last > first else None]
    head, line, rest = inside.partition("\n")
    return (rest if line and head.strip().isalpha() else inside).strip()
