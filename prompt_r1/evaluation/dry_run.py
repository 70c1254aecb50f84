"""`evaluate.py --dry-run`: estimate the calls, tokens and dollars of each method, without a call.

Calls and games cost what training/dry_run.py assumes. A search makes as many calls as its limit allows or,
without a limit, as its authors' code makes. In the low case it ends with its first prompt, and costs nothing.
Its texts are longer:

    tokens                                low    likely   high
    of the prompt before a question        10       100   2,000
    that the optimiser reads                –     1,000   20,000
    that the optimiser writes               –       250   2,000
"""

import math
from dataclasses import dataclass

from prompt_r1.environments.budget import FREE
from prompt_r1.environments.sources import limit_in
from prompt_r1.environments.specs import parse_fields
from prompt_r1.evaluation.ask_once import EXTRACT, STEP_BY_STEP
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.imitation import CALLS
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import System, short_names
from prompt_r1.evaluation.searches import Algorithm, Data, searched
from prompt_r1.pair.asking import request_of
from prompt_r1.training.dry_run import Case, Estimate, cases_of, mean_bytes, shown_estimate
from prompt_r1.types import Spending


@dataclass(frozen=True)
class SearchTexts:
    """Lengths of a search's texts, in tokens."""

    prompt: int  # the prompt before each question
    request: int  # what the optimiser reads
    reply: int  # what the optimiser writes


SEARCH_TEXTS = {
    "low": SearchTexts(10, 0, 0),
    "likely": SearchTexts(100, 1000, 250),
    "high": SearchTexts(2000, 20_000, 2000),
}
# In the high estimate, half of all calls go to the optimiser: a proposal that cannot be used costs a call,
# and the environment is not asked.
HIGHEST_SHARE = 0.5


def estimate(evaluation: Evaluation) -> str:
    """The text of --dry-run. Reads the questions, and no model. Raises UsageError."""
    data = evaluation.data_for(evaluation.systems)
    names = short_names(evaluation.systems)
    parts: dict[str, Estimate] = {}
    for system in evaluation.systems:
        cases = cases_of_system(evaluation, system)
        parts[names[system]] = {case.name: cost_of(evaluation, system, data, case) for case in cases}
    limits = [limit_in(parse_fields(settings.env_args)) for settings in evaluation.environments.values()]
    return shown_estimate(parts, priced=any(evaluation.config.env_price), limited=None not in limits)


def cases_of_system(evaluation: Evaluation, system: System) -> list[Case]:
    """What the three estimates assume of a system's games and calls. Calls of no environment are free."""
    names = system.environment.split(",") if system.environment else []
    prices = [evaluation.prices[name] for name in names] or [FREE]
    game = evaluation.systems[system].config.game
    return cases_of(game, mean_bytes(evaluation.questions), evaluation.fields_of(system), prices)


def cost_of(evaluation: Evaluation, system: System, data: Data, case: Case) -> Spending:
    """The cost of a system's answers, and of the preparation of its method."""
    method = METHODS[system.method]
    if not method.needs_environment:
        return Spending()
    questions = evaluation.questions
    answers = len(evaluation.repeats)
    message = evaluation.environments[system.environment].env_system
    request = request_of(system.environment)
    if method.agent:
        games = answers
        if system.method == "rft":  # It learns from games of its own.
            calls = evaluation.config.optimize_calls or CALLS
            games += math.ceil(calls / max(case.calls, 1))
        return case.game(message) * games
    if method.algorithm:
        answer = case.direct_call(questions, request, more=SEARCH_TEXTS[case.name].prompt)
        return answer * answers + cost_of_searches(evaluation, system, method.algorithm, data, case)
    if system.method == "cot":
        thought = case.direct_call(questions, message + STEP_BY_STEP)
        # The second call sends the first reply again.
        answer = case.direct_call(questions, message + STEP_BY_STEP + EXTRACT + request, more=case.reply)
        return (thought + answer) * answers
    return case.direct_call(questions, message + request) * answers


def cost_of_searches(
    evaluation: Evaluation, system: System, algorithm: Algorithm, data: Data, case: Case
) -> Spending:
    """The cost of a search for each dataset."""
    if case.name == "low":
        return Spending()
    texts = SEARCH_TEXTS[case.name]
    request = request_of(system.environment)
    optimizer = evaluation.config.optimizer_env or system.environment
    price_of_optimizer = evaluation.prices[optimizer.split(",")[0]]
    calls = evaluation.config.optimize_calls or algorithm.authors_calls
    share = algorithm.optimizer_share if case.name == "likely" else HIGHEST_SHARE
    of_optimizer = round(calls * share)
    spent = Spending()
    for name in searched(evaluation.datasets, data):
        questions = data.of_dataset(name).train
        spent += case.direct_call(questions, request, more=texts.prompt) * (calls - of_optimizer)
        spent += price_of_optimizer.of_call(texts.request, texts.reply) * of_optimizer
    return spent
