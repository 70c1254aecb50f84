"""`gepa` (Agrawal et al. 2025): prompts evolve from a Pareto front.

Each iteration draws a parent from the prompts that are best on some validation question, runs it on 3
training questions, lets the optimiser rewrite it in view of the errors, and runs the child on the same 3. A
child that scores higher there is scored on all validation questions and joins the pool. The prompt with the
best mean validation score wins.

Calls: the seed prompt, and each child that joins the pool, take one call per validation question. An
iteration makes 6 calls of the environment and 1 of the optimiser; if the parent is perfect, only 3 of the
environment. With a limit of calls (--optimize-calls), iterations go on as long as they stay within it.
Without one (0), no iteration begins after 150 calls of the environment, as in the original.
"""

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from prompt_r1.evaluation.predictions import Prediction
from prompt_r1.evaluation.searches import VALIDATED_ON, Algorithm, Data, PromptSearch, task_score
from prompt_r1.types import Question

BATCH = 3  # the number of training questions in an iteration
METRIC_CALLS = 150  # calls of the environment after which no iteration begins
# What may follow the opening fence of a block, as in "```text".
LANGUAGE = re.compile("[a-z]+|Text|Plaintext|Markdown|Prompt")
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


async def gepa(search: PromptSearch, data: Data) -> str:
    """The prompt with the best mean score on the validation questions. Of equal prompts, the first."""
    await search.begin(data.validation, VALIDATED_ON)
    rng = random.Random(search.seed)
    batches = filled_batches(data.train, rng)
    step_calls = 2 * BATCH + 1 + len(search.questions)
    iteration = 0
    while search.may_go_on(step_calls, authors_stop=search.environment_calls >= METRIC_CALLS):
        iteration += 1
        parent = draw_parent(search.scores, rng)
        batch = next(batches)
        before = await search.try_prompt(parent, batch)
        if mean_score(before) == 1:
            search.attempts_without_new_prompt += 1
            continue
        reply = await search.ask_optimizer(ROLE, reflection(parent, before), sample=iteration)
        child = read_fenced_prompt(reply.text)
        if child is None or reply.finish == "length":  # The reply has no prompt, or it is cut.
            continue
        after = await search.try_prompt(child, batch)
        if mean_score(after) > mean_score(before):
            await search.score(child)
    return search.best()


# Estimates of calls for --dry-run, if one child in ten is scored on the validation questions.
ENVIRONMENT_CALLS = 2 * BATCH + VALIDATED_ON // 10  # in an iteration
ITERATION_CALLS = ENVIRONMENT_CALLS + 1  # The optimiser is called once.
# The first VALIDATED_ON of the METRIC_CALLS score the seed prompt.
ITERATIONS = math.ceil((METRIC_CALLS - VALIDATED_ON) / ENVIRONMENT_CALLS)
GEPA = Algorithm(
    gepa,
    authors_calls=VALIDATED_ON + ITERATIONS * ITERATION_CALLS,
    optimizer_share=1 / ITERATION_CALLS,
    optimizer_fields={},
)


def mean_score(predictions: Sequence[Prediction]) -> float:
    """The mean score of at least one prediction."""
    return fmean(task_score(prediction) for prediction in predictions)


def draw_parent(pool: Mapping[str, Sequence[float]], rng: random.Random) -> str:
    """Draw from the Pareto front, in proportion to the validation questions on which a prompt is best.

    `pool`: prompt → its scores, one per validation question. Each question has a front: the prompts that are
    best on it. Then the prompts are taken in turn, the worst first. A prompt leaves all fronts unless it is
    alone in one of them. The parent is drawn from what remains in the fronts.
    """
    fronts = []
    for number in range(len(next(iter(pool.values())))):
        highest = max(scores[number] for scores in pool.values())
        fronts.append([prompt for prompt, scores in pool.items() if scores[number] == highest])
    for prompt in sorted(pool, key=lambda prompt: sum(pool[prompt])):
        is_only_best = any(front == [prompt] for front in fronts)
        if not is_only_best:
            fronts = [[other for other in front if other != prompt] for front in fronts]
    return rng.choice([prompt for front in fronts for prompt in front])


def filled_batches(questions: Sequence[Question], rng: random.Random) -> Iterator[list[Question]]:
    """Endless shuffled epochs in batches. The last batch of an epoch is filled up with its last questions."""
    while True:
        order = rng.sample(list(questions), len(questions))
        from_the_end = itertools.cycle(order[::-1])
        while len(order) % BATCH:
            order.append(next(from_the_end))
        for start in range(0, len(order), BATCH):
            yield order[start : start + BATCH]


def reflection(prompt: str, predictions: Sequence[Prediction]) -> str:
    """The request to the optimiser about a minibatch. The feedback is the score, without a model."""
    cases = []
    for number, prediction in enumerate(predictions, start=1):
        score = task_score(prediction)
        if score == 1:
            feedback = "This answer is right."
        else:
            gold = prediction.question.answers[0]
            feedback = f"This answer is not right (score {score:.2f} of 1). The right answer is {gold!r}."
        cases.append(
            f"# Example {number}\n## Inputs\n{prediction.question.text}\n## Generated Outputs\n"
            f"{prediction.raw}\n## Feedback\n{feedback}"
        )
    return REQUEST.format(prompt=prompt, cases="\n\n".join(cases))


def read_fenced_prompt(reply: str) -> str | None:
    """The prompt in the optimiser's reply: the last fenced block, or the whole reply if it has no fence.

    Returns None if the prompt is empty, or if a fence is not closed.
    """
    fences = re.findall("`{3,}", reply)
    if not fences:
        return reply.strip() or None
    fence = max(fences, key=len)  # Shorter fences belong to the text of a block.
    parts = reply.split(fence)  # text, block, text, block, text
    if len(parts) % 2 == 0:  # The last block is not closed.
        return None
    block = parts[-2]
    first_line, _, rest = block.partition("\n")
    if LANGUAGE.fullmatch(first_line.strip()):
        block = rest
    return block.strip() or None
