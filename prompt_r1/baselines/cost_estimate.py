"""`evaluate.py --dry-run`: the most calls, tokens and dollars that each method can take.

The calls follow from the algorithms, at their most: a game asks in every turn but the last, every attempt at
an example of `cot-few-shot` fails, and a search never finds a text twice. Texts of models are as long as the
limits allow; questions have their own lengths. Nothing is subtracted for calls that a journal or earlier
answers save.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean

from prompt_r1.baselines.ask_once import STEP_BY_STEP, TRIES_PER_SHOT
from prompt_r1.baselines.make import (
    OPTIMIZER_FIELDS,
    choose_answer_format,
    preparation_questions,
    request_fields,
)
from prompt_r1.baselines.opro import EXEMPLARS, MAX_LENGTH, SHOWN
from prompt_r1.baselines.optimise import SearchPart, parts_of
from prompt_r1.baselines.self_consistency import MEASURED_GAMES
from prompt_r1.cli.fitted_table import fitted_table
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.methods import SEARCHES
from prompt_r1.environments.specs import parse_fields
from prompt_r1.evaluation.systems import WITHOUT_ENVIRONMENT, SystemSetup
from prompt_r1.spending import Spending
from prompt_r1.training.dry_run import LONGEST_REPLY, SYSTEM_TOKENS, price_at, spending_of_game
from prompt_r1.types import Question

LONGEST_PROMPT = 2000  # tokens, where the optimiser may write more
REQUEST_TOKENS = 250  # of the optimiser's request, besides what it quotes


def estimate_evaluation(
    setups: Sequence[SystemSetup], questions: Sequence[Question], config: EvaluateConfig, seed: int
) -> str:
    """The table of --dry-run: a row for each system, and their sum.

    Reads the training questions if a method needs them, and loads no model.
    """
    train, validation = preparation_questions((setup.system.method for setup in setups), config, seed)
    costs = [SystemCost(setup, config) for setup in setups]
    before = [cost.before(questions, train, validation) for cost in costs]
    answers = [cost.answers(questions) for cost in costs]
    before.append(sum(before, Spending()))
    answers.append(sum(answers, Spending()))
    labels = [*(str(setup.system) for setup in setups), "together"]
    rows = []
    for label, first, then in zip(labels, before, answers, strict=True):
        both = first + then
        dollars = f"{both.usd:,.2f}" if config.env_price else "no --env-price"
        rows.append([label, f"{first.calls:,}", f"{then.calls:,}", f"{both.tokens:,}", dollars])
    return fitted_table(["at most", "calls before", "calls of the answers", "tokens", "dollars"], rows)


class SystemCost:
    """The most that a system can spend."""

    def __init__(self, setup: SystemSetup, config: EvaluateConfig) -> None:
        self.method = method = setup.system.method
        self._config = config
        spec = setup.system.environment or "mini"
        self._answer_format = choose_answer_format(config, spec)
        self._price = price_at(config.env_price, high=True)
        self._optimizer_price = price_at(config.optimizer_price or config.env_price, high=True)
        self._game = spending_of_game(setup.agent.config, spec, config.env_price, high=True)
        self._reply = _limit_of(request_fields(method, config, config.env_args))
        # What the optimiser writes: replies, and in them prompts.
        fields = parse_fields(config.optimizer_args, flag="--optimizer-args") or OPTIMIZER_FIELDS.get(method)
        self._written = _limit_of(fields or {})
        longest = ceil(MAX_LENGTH / 3) if method in ("random-search", "opro") else LONGEST_PROMPT
        self._prompt = min(longest, self._written)

    def answers(self, questions: Sequence[Question]) -> Spending:
        """All answers to all questions."""
        config, one = self._config, Spending()
        if self.method in ("untrained", "bc", "rft", "prompt-r1"):
            one = self._game
        elif self.method == "best-of-n":
            one = self._game * config.best_of
        elif self.method == "self-consistency":
            one = self._call(questions) * (config.samples or self._game.calls)
        elif self.method == "cot":  # the second call reads the first one's reply
            one = self._call(questions) + self._call(questions, also=self._reply)
        elif self.method == "cot-few-shot":
            one = self._call(questions, also=config.shots * self._case(questions))
        elif self.method in SEARCHES:
            one = self._call(questions, also=self._prompt)
        elif self.method not in WITHOUT_ENVIRONMENT:
            one = self._call(questions)
        return one * (config.repeats * len(questions))

    def before(
        self, questions: Sequence[Question], train: Sequence[Question], validation: Sequence[Question]
    ) -> Spending:
        """What the method spends before its first answer."""
        config = self._config
        if self.method == "cot-few-shot":
            return self._call(train) * min(len(train), config.shots * TRIES_PER_SHOT)
        if self.method == "self-consistency" and not config.samples:
            return self._game * min(MEASURED_GAMES, len(validation))
        if self.method == "rft":
            return self._game * ceil(config.rft_calls / self._game.calls)
        if self.method not in SEARCHES:
            return Spending()
        datasets = list(dict.fromkeys(question.dataset for question in questions))
        parts = parts_of(datasets, train, validation)
        return sum(map(self._search, parts), Spending())

    def _search(self, part: SearchPart) -> Spending:
        """One search for a prompt, within --optimize-calls."""
        config = self._config
        train, validation = len(part.train), min(config.optimize_val, len(part.validation))
        if self.method in ("random-search", "opro"):
            first = min(config.opro_train, train)  # calls that are made in any case
            optimizer = config.opro_steps * config.opro_per_step
            task = (1 + optimizer) * first
        elif self.method == "textgrad":
            first = validation
            asked = min(train, config.textgrad_updates * config.textgrad_batch)
            updates = ceil(asked / config.textgrad_batch)
            task = first + config.textgrad_epochs * (asked + updates * validation)
            optimizer = config.textgrad_epochs * 2 * (asked + updates)  # each rewrite is requested twice
        else:
            first = validation
            iteration = 2 * config.gepa_batch
            # The last iteration exceeds the limit, and its child joins the pool.
            task = max(first, config.gepa_calls + iteration + validation - 1)
            optimizer = max(0, ceil((config.gepa_calls - first) / iteration))
        calls = [self._call(part.train, also=self._prompt), self._optimizer_call(part.train)]
        # A second request of textgrad for the same rewrite may exceed the budget by one call.
        most = max(first, config.optimize_calls + 1) if config.optimize_calls else task + optimizer
        if task + optimizer <= most:
            return calls[0] * task + calls[1] * optimizer
        return max(calls, key=lambda call: (call.usd, call.tokens)) * most

    def _call(self, questions: Sequence[Question], *, also: int = 0) -> Spending:
        """The mean call of an environment that is asked once; `also` are tokens besides the question."""
        hint = STEP_BY_STEP if self.method in ("cot", "cot-few-shot", "self-consistency") else ""
        texts = [self._answer_format.user_message(one.text, hint=hint)["content"] for one in questions]
        return self._price.of_call(SYSTEM_TOKENS + also + self._tokens(texts), self._reply)

    def _optimizer_call(self, questions: Sequence[Question]) -> Spending:
        """The mean call of the optimiser. It sees prompts, and questions with their replies and answers."""
        config, case = self._config, self._case(questions)
        if self.method in ("random-search", "opro"):
            quoted = EXEMPLARS * case + SHOWN * self._prompt
        elif self.method == "textgrad":
            # The criticism of each reply, then that of the prompt, then two rewrites with all of them.
            size, criticism = config.textgrad_batch, self._prompt + case + self._written
            rewrite = self._prompt + size * criticism
            quoted = (size * (case + criticism) + 2 * rewrite) // (2 * size + 2)
        else:
            quoted = self._prompt + config.gepa_batch * case
        return self._optimizer_price.of_call(REQUEST_TOKENS + quoted, self._written)

    def _case(self, questions: Sequence[Question]) -> int:
        """The mean tokens of a question with a reply and the right answer."""
        texts = [question.text + question.answers[0] for question in questions]
        return self._tokens(texts) + self._reply

    def _tokens(self, texts: Sequence[str]) -> int:
        return ceil(fmean(map(len, texts)) / 3) if texts else 0


def _limit_of(fields: Mapping[str, object]) -> int:
    """The most tokens of a reply to requests with these fields."""
    limit = fields.get("max_tokens") or fields.get("max_completion_tokens")
    return limit if isinstance(limit, int) else LONGEST_REPLY
