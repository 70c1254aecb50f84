"""`evaluate.py --dry-run`: estimate the calls, tokens, dollars and time of each method, without a call.

Calls and games cost what training/dry_run.py assumes. A search makes as many calls as its limit allows; at
the low end, only the calls that score its first prompt. Its texts are longer:

    tokens                                low    likely   high
    of the prompt before a question        10       100   2,000
    that the optimiser reads                –     1,000   20,000
    that the optimiser writes               –       250   2,000
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prompt_r1.environments.budget import FREE, Price
from prompt_r1.environments.sources import limit_in
from prompt_r1.environments.specs import parse_fields
from prompt_r1.evaluation.ask_once import EXTRACT, STEP_BY_STEP
from prompt_r1.evaluation.evaluation import Evaluation
from prompt_r1.evaluation.imitation import CALLS
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.predictions import short_names
from prompt_r1.evaluation.searches import Algorithm, Data, searched
from prompt_r1.evaluation.settings import EvaluateConfig
from prompt_r1.pair.asking import request_of
from prompt_r1.training.dry_run import Case, cases_of, cost_table, mean_bytes, notes_of_calls
from prompt_r1.types import Question, Spending


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


@dataclass(frozen=True)
class MethodCosts:
    """What the answers and the preparation of a method cost."""

    config: EvaluateConfig  # the settings by which the method's environment is asked
    questions: Sequence[Question]
    data: Data

    def answers(self, name: str, case: Case, spec: str) -> Spending:
        """The cost of a method's answers."""
        method = METHODS[name]
        system, request = self.config.env_system, request_of(spec)
        question = mean_bytes(self.questions)
        if not method.needs_environment:
            answer = Spending()
        elif method.agent:
            answer = case.game(system)
        elif name == "cot":
            first = case.direct_call(f"{system}{STEP_BY_STEP}", question)
            second = case.direct_call(f"{system}{STEP_BY_STEP}{EXTRACT}{request}", question)
            repeated = case.price.of_call(case.reply, 0)  # The second call sends the thought again.
            answer = first + second + replace(repeated, calls=0)
        elif method.algorithm:
            prompt = SEARCH_TEXTS[case.name].prompt
            answer = case.call(prompt + case.tokens(request) + question // case.bytes_per_token)
        else:
            answer = case.direct_call(f"{system}{request}", question)
        return answer * len(self.questions) * self.config.repeats

    def searches(self, algorithm: Algorithm, case: Case, spec: str, writer: Price) -> Spending:
        """The cost of a search for each dataset."""
        spent = Spending()
        datasets = list(dict.fromkeys(question.dataset for question in self.questions))
        for name in searched(datasets, self.data):
            data = self.data.of_dataset(name)
            questions = data.train if algorithm.scored_by == "train" else data.validation
            scored = min(len(questions), self.config.optimize_examples or algorithm.scored_on)
            calls = algorithm.calls(scored)
            made = self.config.optimize_calls or calls.most
            share = calls.of_optimizer
            if case.name == "low":  # Only the first prompt is scored.
                made = min(scored, made)
                share = 0.0
            elif case.name == "high":
                share = HIGHEST_SHARE
            of_optimizer = round(made * share)
            texts = SEARCH_TEXTS[case.name]
            question = mean_bytes(questions) // case.bytes_per_token
            sent = texts.prompt + case.tokens(request_of(spec)) + question
            spent += case.call(sent) * (made - of_optimizer)
            spent += writer.of_call(texts.request, texts.reply) * of_optimizer
        return spent

    def games_of_rft(self, case: Case) -> Spending:
        """The cost of the games from which `rft` learns."""
        games = (self.config.optimize_calls or CALLS) / max(case.calls, 1)
        return case.game(self.config.env_system) * math.ceil(games)


def estimate(evaluation: Evaluation) -> str:
    """The text of --dry-run. Reads the questions, and no model. Raises UsageError."""
    config, environments = evaluation.config, evaluation.environments
    data = evaluation.data_for(evaluation.systems)
    names = short_names(evaluation.systems)
    parts = {}
    for system, agent in evaluation.systems.items():
        method = METHODS[system.method]
        spec = evaluation.spec_of(system)
        settings = environments[system.environment] if method.needs_environment else config
        costs = MethodCosts(settings, evaluation.questions, data)
        prices = [evaluation.prices[name] for name in system.environment.split(",") if name] or [FREE]
        fields = {**parse_fields(settings.env_args), **method.fields}
        of_method = {}
        for case in cases_of(agent.config.game, mean_bytes(evaluation.questions), fields, prices):
            spent = costs.answers(system.method, case, spec)
            if method.algorithm:
                writer = next(iter(evaluation.prices_of_optimizer(spec).values()))
                spent += costs.searches(method.algorithm, case, spec, writer)
            if system.method == "rft":
                spent += costs.games_of_rft(case)
            of_method[case.name] = spent
        parts[names[system]] = of_method
    limits = [limit_in(parse_fields(settings.env_args)) for settings in environments.values()]
    notes = notes_of_calls(parts, config, limited=None not in limits, at_once=len(evaluation.repeats))
    return "\n".join([cost_table(parts, priced=any(config.env_price)), "", *notes])
