"""`gepa` (Agrawal et al. 2025): prompts evolve from a Pareto front.

Each iteration draws a parent from the prompts that are best on some validation question, runs it on 3
training questions, lets the optimiser rewrite it in view of the errors, and runs the child on the same 3. A
child that scores higher there is scored on all validation questions and joins the pool. The prompt with the
best mean validation score wins.

Calls: one per validation question for the seed prompt; per iteration 6 of the environment and 1 of the
optimiser (3 and none if the parent is perfect), and one per validation question for a child that joins. As in
the original, 150 calls are checked before an iteration, which may exceed them; a limit is never exceeded.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prompt_r1.baselines.ask_once import task_score
from prompt_r1.baselines.optimise import (
    SEED_PROMPT,
    VALIDATED_ON,
    PromptSearch,
    SearchPart,
    draw_questions,
    mean_score,
)
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.types import Question

BATCH, METRIC_CALLS = 3, 150  # training questions of an iteration, calls of the environment
FENCE = "```"
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
    search: PromptSearch,
    part: SearchPart,
    *,
    examples: int,
    seed: int,
    batch_size: int = BATCH,
    metric_calls: int = METRIC_CALLS,
    seed_prompt: str = SEED_PROMPT,
) -> str:
    """The prompt with the best mean score on the validation questions; the first of equals."""
    train, held_out = part.train, draw_questions(part.validation, examples or VALIDATED_ON, seed)
    if not train or not held_out:
        raise UsageError("gepa needs training and validation questions: give --train-data and --val-data")
    rng = random.Random(seed)
    batches = minibatches(train, batch_size, rng)

    async def validate(prompt: str, **event: object) -> Candidate:
        predictions = await search.try_prompt(prompt, held_out)
        candidate = Candidate(prompt, tuple(map(task_score, predictions)))
        search.record(prompt=prompt, validation=candidate.mean, **event)
        return candidate

    if not search.can_afford(len(held_out)):
        return seed_prompt
    pool = [await validate(seed_prompt, iteration=0)]
    iteration, most = 0, 2 * batch_size + 1 + len(held_out)
    while search.can_afford(most) and (search.max_calls or search.ledger.task.calls < metric_calls):
        iteration += 1
        parent = draw_parent(pool, rng)
        batch = next(batches)
        before = await search.try_prompt(parent.prompt, batch)
        if mean_score(before) == 1:
            search.record(iteration=iteration, skipped="the parent was perfect")
            continue
        reply = await search.ask_optimizer(ROLE, reflection(parent.prompt, before), sample=iteration)
        child = read_fenced_prompt(reply)
        after = await search.try_prompt(child, batch)
        if sum(map(task_score, after)) > sum(map(task_score, before)):
            pool.append(await validate(child, iteration=iteration, parent=pool.index(parent)))
        else:
            search.record(iteration=iteration, rejected=child)
    return max(pool, key=lambda candidate: candidate.mean).prompt


def draw_parent(pool: Sequence[Candidate], rng: random.Random) -> Candidate:
    """Draw from the Pareto front, in proportion to the validation questions on which a candidate is best.

    A candidate is dropped if on each of its questions another remaining one does as well, starting with the
    lowest mean. With the same seed, the parents are those of the original.
    """
    # For each validation question, the numbers of the candidates that are best on it. They are sets because
    # the original draws from a list in the order of its sets.
    fronts: list[set[int]] = []
    for scores in zip(*(candidate.scores for candidate in pool), strict=True):
        best, front = scores[0], {0}
        for number, score in enumerate(scores[1:], start=1):
            if score > best:
                best, front = score, {number}
            elif score == best:
                front.add(number)
        fronts.append(front)
    remaining = list(dict.fromkeys(number for front in fronts for number in front))
    for number in sorted(remaining, key=lambda number: pool[number].mean):
        others = set(remaining) - {number}
        if all(front & others for front in fronts if number in front):
            remaining.remove(number)
    undominated = [{number for number in front if number in remaining} for front in fronts]
    wins = Counter(number for front in undominated for number in front)
    return pool[rng.choice(list(wins.elements()))]


def minibatches(questions: Sequence[Question], size: int, rng: random.Random) -> Iterator[list[Question]]:
    """Endless shuffled epochs; the last batch of an epoch is filled up with the questions that came last."""
    while True:
        order = list(range(len(questions)))
        rng.shuffle(order)
        uses = Counter(order)
        while len(order) % size:
            filler = min(reversed(uses), key=lambda number: uses[number])
            uses[filler] += 1
            order.append(filler)
        for start in range(0, len(order), size):
            yield [questions[number] for number in order[start : start + size]]


def reflection(prompt: str, predictions: Sequence[Prediction]) -> str:
    """The optimiser's request about a minibatch."""
    cases = [
        f"# Example {number}\n## Inputs\n{prediction.question.text}\n## Generated Outputs\n{prediction.raw}\n"
        f"## Feedback\n{feedback(prediction)}"
        for number, prediction in enumerate(predictions, start=1)
    ]
    return REQUEST.format(prompt=prompt, cases="\n\n".join(cases))


def feedback(prediction: Prediction) -> str:
    """Feedback from the score; no model is involved."""
    score = task_score(prediction)
    if score == 1:
        return "This answer is right."
    gold = prediction.question.answers[0]
    return f"This answer is not right (score {score:.2f} of 1). The right answer is {gold!r}."


def read_fenced_prompt(reply: str) -> str:
    """The text between the first and the last fence; else the whole reply, without a fence at an end.

    As in the original, a first line without blanks is taken for the name of a language, and left out.
    """
    start, end = reply.find(FENCE) + len(FENCE), reply.rfind(FENCE)
    if start < end and FENCE in reply:
        return re.sub(r"^\S*\n", "", reply[start:end]).strip()
    whole = reply.strip()
    if whole.startswith(FENCE):
        return re.sub(r"^```\S*\n?", "", whole).strip()
    return whole.removesuffix(FENCE).strip()
