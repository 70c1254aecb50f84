"""`train.py --dry-run`: the calls, tokens and dollars of a run, and the GPU memory it needs.

Estimates lie between two assumptions about a game. Low: one call with a short prompt and a short reply. High:
a call in every turn but the last, with prompts half as long as a turn may be and replies as long as the agent
reads; each call repeats the dialogue so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prompt_r1.config.train import TrainConfig
from prompt_r1.data.named import find_questions
from prompt_r1.environments.budget import Price, Spending, parse_prices
from prompt_r1.training.memory_estimate import memory_table

SYSTEM_TOKENS = 40  # the environment's system message
LOW_PROMPT, LOW_REPLY = 60, 60  # tokens
LONGEST_REPLY = 1024  # tokens, where the agent reads replies of any length


@dataclass(frozen=True)
class Part:
    """A part of a run: training, validation or test."""

    label: str
    questions: int
    games: int  # in all


def estimate(config: TrainConfig) -> str:
    """The tables of --dry-run. Reads the questions and the agent's config, but loads no model.

    Raises UsageError for files that cannot be read.
    """
    find_questions(config.data, "train", config.seed)
    validation = min(len(find_questions(config.val_data, "validation", config.seed)), config.val_limit)
    test = len(find_questions(config.test_data, "test", config.seed))
    validations = 1 + config.steps // config.val_every + (config.steps % config.val_every > 0)
    asked = config.steps * config.questions
    parts = [
        Part("training", asked, asked * config.group_size),
        Part("validation", validation, validation * validations),
        Part("test", test, 3 * test),  # alone, untrained, trained
    ]
    if config.env == "none":
        return cost_table(parts, Spending(), Spending(), priced=True)
    prices = sorted(parse_prices(config.env_price), key=lambda price: price.tokens_in + price.tokens_out)
    longest_prompt = config.max_new // 2
    longest_reply = config.max_reply_tokens or LONGEST_REPLY
    most_calls = max(config.max_turns - 1, 1)
    low = spending_of_game(1, LOW_PROMPT, min(LOW_REPLY, longest_reply), prices[0])
    high = spending_of_game(most_calls, longest_prompt, longest_reply, prices[-1])
    return f"{cost_table(parts, low, high, priced=bool(config.env_price))}\n\n{memory_table(config)}"


def spending_of_game(calls: int, prompt: int, reply: int, price: Price) -> Spending:
    """The spending of a game of `calls` calls, each of which sends the whole dialogue so far.

    `prompt` and `reply` are tokens of one call.
    """
    tokens_in = [SYSTEM_TOKENS + (number + 1) * prompt + number * reply for number in range(calls)]
    return sum((price.of_call(sent, reply) for sent in tokens_in), Spending())


def cost_table(parts: Sequence[Part], low: Spending, high: Spending, *, priced: bool) -> str:
    """The lines about calls: a row for each part and their sum, from `low` to `high` per game."""
    lines = [f"{'':12}{'questions':>11}{'games':>11}{'calls':>24}{'tokens':>32}{'dollars':>26}"]
    games = sum(part.games for part in parts)
    for part in [*parts, Part("together", sum(part.questions for part in parts), games)]:
        calls = f"{low.calls * part.games:,} to {high.calls * part.games:,}"
        tokens = f"{low.tokens * part.games:,} to {high.tokens * part.games:,}"
        dollars = (
            f"{low.usd * part.games:,.2f} to {high.usd * part.games:,.2f}" if priced else "no --env-price"
        )
        lines.append(
            f"{part.label:12}{part.questions:>11,}{part.games:>11,}{calls:>24}{tokens:>32}{dollars:>26}"
        )
    return "\n".join(lines)
