"""`evaluate.py --dry-run`: estimate the calls, tokens and dollars of each method, without a call.

Calls and games cost what training/dry_run.py assumes. A search makes as many calls as its limit allows or,
without a limit, as its authors' code makes. Its texts are longer:

    tokens                                likely   high
    of the prompt before a question          100   2,000
    that the optimiser reads               1,000   20,000
    that the optimiser writes                250   2,000
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
from prompt_r1.evaluation.searches import Algorithm
from prompt_r1.spending import Spending
from prompt_r1.training.dry_run import Case, Estimate, cases_of, mean_bytes, shown_estimate
from prompt_r1.types import GameSettings


@dataclass(frozen=True)
class SearchTexts:
    """Lengths of a search's texts, in tokens."""

    prompt: int  # the prompt before each question
    request: int  # what the optimiser reads
    reply: int  # what the optimiser writes


SEARCH_TEXTS = {"likely": SearchTexts(100, 1000, 250), "high": SearchTexts(2000, 20_000, 2000)}
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
    prices = [evaluation.prices[name] for name in system.environment.split(",")]
    agent = evaluation.systems[system]
    game = GameSettings() if agent is None else agent.config.game  # Without an agent, no cost depends on it.
    return cases_of(game, mean_bytes(evaluation.questions), evaluation.fields_of(system), prices)


def cost_of(evaluation: Evaluation, system: System, case: Case) -> Spending:
    """What the answers of a system cost in one case, with the preparation of its method."""
    answers = len(evaluation.repeats)
    system_message = evaluation.environments[system.environment].env_system
    request = request_of(system.environment)

    def cost_of_calls(text: str, *, more: int = 0) -> Spending:
        """The cost of a call for each answer, with the question, `text`, and `more` tokens."""
        return case.direct_call(evaluation.questions, text, more=more) * answers

    method = METHODS[system.method]
    if method.ask is direct:
        return cost_of_calls(system_message + request)
    if method.ask is think_then_answer:
        thoughts = cost_of_calls(system_message + STEP_BY_STEP)
        second = system_message + STEP_BY_STEP + EXTRACT + request
        return thoughts + cost_of_calls(second, more=case.reply)  # It sends the first reply again.
    if method.algorithm is not None:
        prompt = SEARCH_TEXTS[case.name].prompt  # It takes the place of the system message.
        searches = cost_of_searches(evaluation, system, case, method.algorithm)
        return cost_of_calls(request, more=prompt) + searches
    games = answers
    if method.fine_tuned_on == "own games":
        calls_to_learn_from = evaluation.config.optimize_calls or CALLS
        games += math.ceil(calls_to_learn_from / max(case.calls, 1))
    return case.game(system_message) * games


def cost_of_searches(evaluation: Evaluation, system: System, case: Case, algorithm: Algorithm) -> Spending:
    """What the searches of a system cost in one case."""
    spent = Spending()
    texts = SEARCH_TEXTS[case.name]
    request = request_of(system.environment)
    optimizer = evaluation.config.optimizer_env or system.environment
    price_of_optimizer = evaluation.prices[optimizer.split(",")[0]]
    calls = evaluation.config.optimize_calls or algorithm.authors_calls
    share = algorithm.optimizer_share if case.name == "likely" else HIGHEST_SHARE
    optimizer_calls = round(calls * share)
    for data in evaluation.searches.values():
        spent += case.direct_call(data.train, request, more=texts.prompt) * (calls - optimizer_calls)
        spent += price_of_optimizer.of_call(texts.request, texts.reply) * optimizer_calls
    return spent
