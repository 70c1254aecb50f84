"""`evaluate.py --dry-run`: estimate the calls, tokens and dollars of each method, without a call.

Calls and games cost what training/dry_run.py assumes. A search makes as many calls as its limit allows or,
without a limit, as its authors' code makes.
"""

import math
from dataclasses import dataclass

from prompt_r1.environments.asking import request_of
from prompt_r1.environments.sources import limit_in
from prompt_r1.environments.specs import parse_fields
from prompt_r1.evaluation.ask_once import EXTRACT, STEP_BY_STEP, direct, think_then_answer
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.imitation import CALLS
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import System, short_names
from prompt_r1.evaluation.searches import Algorithm, data_of_searches
from prompt_r1.settings.agent import names_of
from prompt_r1.spending import Spending
from prompt_r1.training.dry_run import Case, Estimate, cases_of, mean_bytes, prices_of_cases, shown_estimate
from prompt_r1.types import GameSettings


@dataclass(frozen=True)
class SearchLengths:
    """The tokens of the texts of a search for prompts."""

    prompt: int  # the prompt before each question
    optimizer_reads: int
    optimizer_writes: int


# By the name of the case:
SEARCH_LENGTHS = {"likely": SearchLengths(100, 1000, 250), "high": SearchLengths(2000, 20_000, 2000)}
# In the high estimate, half of all calls go to the optimiser. This happens if most of its proposals cannot be
# used, because then the environment is not asked.
HIGHEST_SHARE = 0.5


def estimate(evaluation: Evaluation) -> str:
    """The text of --dry-run. No model is loaded."""
    names = short_names(evaluation.systems)
    parts: dict[str, Estimate] = {}
    for system in evaluation.systems:
        if system.environment:  # The others make no calls.
            cases = cases_of_system(evaluation, system)
            parts[names[system]] = {case.name: cost_of(evaluation, system, case) for case in cases}
    limits = [limit_in(parse_fields(settings.env_args)) for settings in evaluation.environments.values()]
    return shown_estimate(parts, priced=any(evaluation.config.env_price), limited=None not in limits)


def cases_of_system(evaluation: Evaluation, system: System) -> list[Case]:
    """What the two estimates assume of a system's games and calls."""
    prices = [evaluation.prices[name] for name in names_of(system.environment)]
    agent = evaluation.systems[system]
    game = GameSettings() if agent is None else agent.config.game  # Without an agent, no cost depends on it.
    return cases_of(game, mean_bytes(evaluation.questions), evaluation.fields_of(system), prices)


def cost_of(evaluation: Evaluation, system: System, case: Case) -> Spending:
    """What the answers of a system cost in one case, with the preparation of its method."""
    questions = evaluation.questions
    answers = len(evaluation.repeats)
    system_message = evaluation.environments[system.environment].env_system
    request = request_of(system.environment)
    method = METHODS[system.method]
    if method.ask is direct:
        return case.direct_call(questions, system_message + request) * answers
    if method.ask is think_then_answer:
        first_text = system_message + STEP_BY_STEP
        first = case.direct_call(questions, first_text)
        # The second call sends the first reply again.
        second = case.direct_call(questions, first_text + EXTRACT + request, more=case.reply)
        return (first + second) * answers
    if method.algorithm is not None:
        # The prompt takes the place of the system message.
        call = case.direct_call(questions, request, more=SEARCH_LENGTHS[case.name].prompt)
        return call * answers + cost_of_searches(evaluation, system, case, method.algorithm)
    games = answers
    if method.fine_tuned_on == "own games":
        calls_to_learn_from = evaluation.config.optimize_calls or CALLS
        games += math.ceil(calls_to_learn_from / max(case.calls, 1))
    return case.game(system_message) * games


def cost_of_searches(evaluation: Evaluation, system: System, case: Case, algorithm: Algorithm) -> Spending:
    """What the searches of a system cost in one case."""
    request = request_of(system.environment)
    optimizer = evaluation.config.optimizer_env or system.environment
    price = prices_of_cases([evaluation.prices[name] for name in names_of(optimizer)])[case.name]
    lengths = SEARCH_LENGTHS[case.name]
    optimizer_call = price.of_call(lengths.optimizer_reads, lengths.optimizer_writes)
    calls = evaluation.config.optimize_calls or algorithm.authors_calls
    share = algorithm.optimizer_share if case.name == "likely" else HIGHEST_SHARE
    optimizer_calls = round(calls * share)
    spent = Spending()
    for data in data_of_searches(evaluation.questions, evaluation.data).values():
        call = case.direct_call(data.train, request, more=lengths.prompt)
        spent += call * (calls - optimizer_calls) + optimizer_call * optimizer_calls
    return spent
