"""`--dry-run`: estimate the calls, tokens and dollars of a program, without a call.

An estimate is calls × tokens × price. A call sends the system message, all prompts and whole replies of its
game so far, and its prompt. So a long reply is billed once as output, and again as input in each later call.
Two estimates differ in what they assume:

             likely                        high
    calls    half of what the turns allow  as many as the turns allow
    prompt   as long as a question         as long as a turn (--max-new)
    reply    REPLY tokens                  max_tokens of --env-args
    token    4 bytes of text               3 bytes

The high estimate is no upper bound in three cases. Without max_tokens nothing limits a reply; then LONG_REPLY
tokens are assumed. A text may have fewer bytes per token, such as digits with some tokenizers. And a request
may be repeated because its response was lost. Both estimates assume that all calls are paid, although equal
calls may share a reply.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from prompt_r1.environments.asking import request_of
from prompt_r1.environments.budget import Price, parse_prices
from prompt_r1.environments.environment import LONG_REPLY
from prompt_r1.environments.sources import limit_in
from prompt_r1.environments.specs import parse_fields
from prompt_r1.programs.tables import text_table
from prompt_r1.settings.agent import names_of
from prompt_r1.settings.train import TrainConfig
from prompt_r1.spending import Spending
from prompt_r1.training.run import RunQuestions, repetition_note, with_steps
from prompt_r1.types import GameSettings, Question

REPLY = 250  # tokens of a usual reply

Estimate = Mapping[str, Spending]
"""What something costs, by the name of the case: likely and high."""


@dataclass(frozen=True)
class Case:
    """What an estimate assumes of every game and call. Lengths are in tokens."""

    name: str
    calls: int  # calls of the environment in a game
    prompt: int
    reply: int
    bytes_per_token: int
    price: Price

    def tokens(self, text: str) -> int:
        """The tokens of a text."""
        return math.ceil(len(text.encode(errors="replace")) / self.bytes_per_token)

    def call(self, sent: int) -> Spending:
        """The cost of a call that sends `sent` tokens."""
        return self.price.of_call(sent, self.reply)

    def direct_call(self, questions: Sequence[Question], text: str, *, more: int = 0) -> Spending:
        """The cost of a call with one of these questions, `text`, and `more` tokens."""
        question = math.ceil(mean_bytes(questions) / self.bytes_per_token)
        return self.call(question + self.tokens(text) + more)

    def game(self, system: str) -> Spending:
        """The cost of a game under a system message. Each call repeats the dialogue before it."""
        spent = Spending()
        for number in range(self.calls):
            dialogue_so_far = number * (self.prompt + self.reply)
            spent += self.call(self.tokens(system) + dialogue_so_far + self.prompt)
        return spent


def cases_of(
    game: GameSettings, question_bytes: int, fields: Mapping[str, object], prices: Sequence[Price]
) -> list[Case]:
    """The two cases. `question_bytes` is the mean length. `fields`: --env-args, sent in each call."""
    longest = limit_in(fields) or LONG_REPLY
    # The prompt of the last turn is not sent. With --env none there is one turn, and no call.
    most_calls = game.max_turns - 1
    price = prices_of_cases(prices)
    return [
        Case(
            "likely",
            calls=math.ceil(most_calls / 2),
            prompt=min(question_bytes // 4, game.max_new),
            reply=min(REPLY, longest),
            bytes_per_token=4,
            price=price["likely"],
        ),
        Case(
            "high",
            calls=most_calls,
            prompt=game.max_new,
            reply=longest,
            bytes_per_token=3,
            price=price["high"],
        ),
    ]


def prices_of_cases(prices: Sequence[Price]) -> dict[str, Price]:
    """The price of a call to one of several environments, by the name of the case.

    "likely" has the mean price. "high" has the highest input price and the highest output price, perhaps of
    different environments.
    """
    tokens_in = [price.tokens_in for price in prices]
    tokens_out = [price.tokens_out for price in prices]
    return {
        "likely": Price(fmean(tokens_in), fmean(tokens_out)),
        "high": Price(max(tokens_in), max(tokens_out)),
    }


def estimate(config: TrainConfig) -> str:
    """The text of train.py --dry-run. Reads the questions, and no weights."""
    questions = RunQuestions.read(config)
    training, validation, test = questions.training, questions.validation, questions.test
    config = with_steps(config, len(training))
    prices = list(parse_prices(config.env_price, names_of(config.env)).values())
    fields = parse_fields(config.env_args)
    cases = cases_of(config.game, mean_bytes(training), fields, prices)

    validations = 1 + math.ceil(config.steps / config.save_every)  # The first is before training.
    games_of = {
        "training": config.steps * config.questions * config.group_size,
        "validation": validations * len(validation),
        "test": 2 * len(test),  # The untrained and the trained agent play each question.
    }
    parts: dict[str, Estimate] = {}
    for name, games in games_of.items():
        costs = {case.name: case.game(config.env_system) * games for case in cases}
        parts[f"{name}, {games:,} games"] = costs
    if test and not config.without_environment:
        request = config.env_system + request_of(config.env)
        parts[f"test, {len(test):,} calls"] = {
            case.name: case.direct_call(test, request) * len(test) for case in cases
        }
    shown = shown_estimate(parts, priced=any(config.env_price), limited=limit_in(fields) is not None)
    note = repetition_note(config, len(training))
    return f"{shown}\n{note}" if note else shown


def mean_bytes(questions: Sequence[Question]) -> int:
    """The mean length of the questions, in bytes of UTF-8."""
    lengths = [len(question.text.encode(errors="replace")) for question in questions]
    return round(fmean(lengths)) if lengths else 0


def shown_estimate(parts: Mapping[str, Estimate], *, priced: bool, limited: bool) -> str:
    """The table of an estimate, and notes about it. Each part has two rows, and so has the total.

    `priced`: whether the user has given a price. `limited`: whether the length of a reply is limited.
    """
    total = {"likely": Spending(), "high": Spending()}
    for cases in parts.values():
        for name, spent in cases.items():
            total[name] += spent
    has_calls = {part: cases for part, cases in parts.items() if cases["high"].calls}
    rows = []
    for part, cases in {**has_calls, "together": total}.items():
        rows.append([part, "", "", "", ""])
        for name, spent in cases.items():
            counts = [f"{count:,}" for count in (spent.calls, spent.tokens_in, spent.tokens_out)]
            rows.append([f"  {name}", *counts, f"{spent.usd:,.2f}" if priced else "–"])
    lines = [text_table(["", "calls", "tokens in", "tokens out", "dollars"], rows), ""]
    if has_calls and not priced:
        lines.append("Dollars need a price: --env-price IN,OUT, per million tokens.")
    if has_calls and not limited:
        lines.append(
            f"high is no upper bound: it assumes replies of {LONG_REPLY:,} tokens, but nothing limits them; "
            "give --env-args '{\"max_tokens\": 1024}'."
        )
    return "\n".join(lines)
