"""`evaluate.py --dry-run`: calls, tokens and dollars.

Calls follow from the algorithms. Where they also depend on the models, the estimate is a range:

              low                                         high
    games     one call                                    a call in every turn but the last
    opro      each new instruction repeats the first      no instruction is repeated
    textgrad  each rewrite has its tags                   each rewrite is requested twice
    gepa      each parent is perfect                      none is, and the last child joins the pool
    examples  each is right at once (`cot-few-shot`)      each attempt fails

Texts of models are short in the low estimate, and as long as the limits allow in the high one. Questions have
their own lengths. Nothing is subtracted for calls that a journal or earlier answers save.
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
from prompt_r1.environments.opening import parse_fields
from prompt_r1.evaluation.systems import WITHOUT_ENVIRONMENT, SystemSetup
from prompt_r1.spending import Spending
from prompt_r1.training.dry_run import (
    LONGEST_REPLY,
    cost_cells,
    price_at,
    span,
    spending_of_game,
    texts_of_call,
)
from prompt_r1.types import Question

LONGEST_PROMPT = 2000  # tokens, where the optimiser may write more


def estimate_evaluation(
    setups: Sequence[SystemSetup], questions: Sequence[Question], config: EvaluateConfig, seed: int
) -> str:
    """The table of --dry-run: a row for each system, and their sum.

    Reads the training questions if a method needs them, and loads no model.
    """
    train, validation = preparation_questions((setup.system.method for setup in setups), config, seed)
    spendings = []  # before the answers, then of the answers; each low and high
    for setup in setups:
        ends = [SystemCost(setup, config, high=high) for high in (False, True)]
        before = [end.before(questions, train, validation) for end in ends]
        spendings.append([*before, *(end.answers(questions) for end in ends)])
    spendings.append([sum(column, Spending()) for column in zip(*spendings, strict=True)])
    labels = [*(str(setup.system) for setup in setups), "together"]
    rows = []
    for label, (low_before, high_before, low, high) in zip(labels, spendings, strict=True):
        calls = [span(low_before.calls, high_before.calls), span(low.calls, high.calls)]
        costs = cost_cells(low_before + low, high_before + high, priced=bool(config.env_price))
        rows.append([label, *calls, *costs[1:]])
    return fitted_table(["system", "calls before", "calls of the answers", "tokens", "dollars"], rows)


class SystemCost:
    """What a system spends, at the low or at the high end of the estimate."""

    def __init__(self, setup: SystemSetup, config: EvaluateConfig, *, high: bool) -> None:
        self.method = method = setup.system.method
        self._high = high
        self._config = config
        spec = setup.system.environment or "mini"
        self._answer_format = choose_answer_format(config, spec)
        self._price = price_at(config.env_price, high=high)
        self._optimizer_price = price_at(config.optimizer_price or config.env_price, high=high)
        self._game = spending_of_game(setup.agent.config, spec, config.env_price, high=high)
        reply = _limit_of(request_fields(method, config, config.env_args))
        asked = texts_of_call(spec, prompt=0, reply=reply, high=high)
        self._system, self._reply = asked.system, asked.reply
        # What the optimiser writes: replies, and in them prompts.
        fields = parse_fields(config.optimizer_args, flag="--optimizer-args") or OPTIMIZER_FIELDS.get(method)
        limit = _limit_of(fields or {})
        longest = ceil(MAX_LENGTH / 3) if method in ("random-search", "opro") else LONGEST_PROMPT
        written = texts_of_call(spec, prompt=longest, reply=limit, high=high)
        self._prompt, self._written = min(written.prompt, limit), written.reply

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
            examples = config.shots * self._case(questions) if self._high else 0
            one = self._call(questions, also=examples)
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
            asked = config.shots * TRIES_PER_SHOT if self._high else config.shots
            return self._call(train) * min(len(train), asked)
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
        config, high = self._config, self._high
        train, validation = len(part.train), min(config.optimize_val, len(part.validation))
        if self.method in ("random-search", "opro"):
            first = min(config.opro_train, train)  # calls that are made in any case
            optimizer = config.opro_steps * config.opro_per_step
            task = (1 + optimizer) * first if high else first
            unused = config.opro_per_step - 1  # calls of the budget, at most
        elif self.method == "textgrad":
            first = validation
            asked = min(train, config.textgrad_updates * config.textgrad_batch)
            updates = ceil(asked / config.textgrad_batch)
            task = first + config.textgrad_epochs * (asked + updates * validation)
            optimizer = config.textgrad_epochs * (2 * asked + updates * (2 if high else 1))
            unused = 3 * config.textgrad_batch + validation
        else:
            first = validation
            iteration = 2 * config.gepa_batch
            task = max(first, config.gepa_calls + (iteration + validation - 1 if high else 0))
            optimizer = max(0, ceil((config.gepa_calls - first) / iteration)) if high else 0
            unused = iteration + validation
        task_call = self._call(part.train, also=self._prompt)
        optimizer_call = self._optimizer_call(part.train)
        budget = config.optimize_calls
        # A second request of textgrad for the same rewrite may exceed the budget by one call.
        most = max(first, budget + 1 if high else budget - unused)
        if not budget or task + optimizer <= most:
            return task_call * task + optimizer_call * optimizer
        cheap, dear = sorted((task_call, optimizer_call), key=lambda call: (call.usd, call.tokens))
        return (dear if high else cheap) * most

    def _call(self, questions: Sequence[Question], *, also: int = 0) -> Spending:
        """The mean call of an environment that is asked once; `also` are tokens besides the question."""
        hint = STEP_BY_STEP if self.method in ("cot", "cot-few-shot", "self-consistency") else ""
        texts = [self._answer_format.user_message(one.text, hint=hint)["content"] for one in questions]
        return self._price.of_call(self._system + also + self._tokens(texts), self._reply)

    def _optimizer_call(self, questions: Sequence[Question]) -> Spending:
        """The mean call of the optimiser. It sees prompts, and questions with their replies and answers."""
        config, case = self._config, self._case(questions)
        frame = 250 if self._high else 30  # tokens besides what it quotes
        if self.method in ("random-search", "opro"):
            quoted = EXEMPLARS * case + (SHOWN * self._prompt if self._high else 0)
        elif self.method == "textgrad":
            # The criticism of each reply, then that of the prompt, then the rewrite with all of them.
            size, rewrites = config.textgrad_batch, 2 if self._high else 1
            criticism = self._prompt + case + self._written
            rewrite = self._prompt + size * criticism
            quoted = (size * (case + criticism) + rewrites * rewrite) // (2 * size + rewrites)
        else:
            quoted = self._prompt + config.gepa_batch * case
        return self._optimizer_price.of_call(frame + quoted, self._written)

    def _case(self, questions: Sequence[Question]) -> int:
        """The mean tokens of a question with a reply and the right answer."""
        texts = [question.text + question.answers[0] for question in questions]
        return self._tokens(texts) + self._reply

    def _tokens(self, texts: Sequence[str]) -> int:
        characters = fmean(map(len, texts)) if texts else 0.0
        return ceil(characters / 3) if self._high else int(characters / 4)


def _limit_of(fields: Mapping[str, object]) -> int:
    """The most tokens of a reply to requests with these fields."""
    limit = fields.get("max_tokens") or fields.get("max_completion_tokens")
    return limit if isinstance(limit, int) else LONGEST_REPLY
