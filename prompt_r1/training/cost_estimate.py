"""What a run will ask of its environment and of its GPUs, before it asks: `train.py --dry-run`.

Low and high, from two plain pictures of a game. Low: each game asks once, a short question with a short
reply. High: each game asks at every turn but the last, in prompts half as long as a turn may be, and each
reply is as long as the agent would read; each call repeats the dialogue so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prompt_r1.config.train import TrainConfig
from prompt_r1.data.named import find_questions
from prompt_r1.environments.budget import Price, Spending
from prompt_r1.environments.opening import parse_prices
from prompt_r1.training.memory_estimate import memory_table

SYSTEM_TOKENS = 40  # the environment's system message
LOW_PROMPT, LOW_REPLY = 60, 60  # tokens
LONGEST_REPLY = 1024  # tokens, where the agent reads replies of any length


@dataclass(frozen=True)
class Games:
    """A part of a run: so many questions, played so many times in all."""

    label: str
    questions: int
    games: int


def estimate(config: TrainConfig) -> str:
    """The tables of --dry-run. Reads the questions and the agent's config; loads no model and asks nobody."""
    find_questions(config.data, "train", config.seed)  # a missing file is told now
    validation = len(find_questions(config.val_data, "validation", config.seed)[: config.val_limit])
    test = len(find_questions(config.test_data, "test", config.seed))
    validations = 1 + config.steps // config.val_every + (config.steps % config.val_every > 0)
    asked = config.steps * config.questions
    parts = [
        Games("training", asked, asked * config.group_size),
        Games("validation", validation, validation * validations),
        Games("test", test, 3 * test),  # alone, untrained, trained
    ]
    prices = parse_prices(config.env_price)
    cheap, dear = (
        choose(prices, key=lambda price: price.tokens_in + price.tokens_out) for choose in (min, max)
    )
    high_prompt = config.max_new // 2
    high_reply = config.max_reply_tokens or LONGEST_REPLY
    if config.env == "none":
        return table(parts, Spending(), Spending(), priced=True)
    low_game = spending_of_game(1, LOW_PROMPT, min(LOW_REPLY, high_reply), cheap)
    high_game = spending_of_game(max(config.max_turns - 1, 1), high_prompt, high_reply, dear)
    calls = table(parts, low_game, high_game, priced=bool(config.env_price))
    return f"{calls}\n\n{memory_table(config)}"


def spending_of_game(calls: int, prompt: int, reply: int, price: Price) -> Spending:
    """A game of some calls, each of which sends the whole dialogue before it."""
    tokens_in = [SYSTEM_TOKENS + (number + 1) * prompt + number * reply for number in range(calls)]
    return sum((price.of_call(sent, reply) for sent in tokens_in), Spending())


def table(parts: Sequence[Games], low: Spending, high: Spending, *, priced: bool) -> str:
    """The lines about calls: each part, and all together, between the low game and the high one."""
    lines = [f"{'':12}{'questions':>11}{'games':>11}{'calls':>24}{'tokens':>32}{'dollars':>26}"]
    games = sum(part.games for part in parts)
    for part in [*parts, Games("together", sum(part.questions for part in parts), games)]:
        calls = f"{low.calls * part.games:,} to {high.calls * part.games:,}"
        tokens = f"{low.tokens * part.games:,} to {high.tokens * part.games:,}"
        dollars = (
            f"{low.usd * part.games:,.2f} to {high.usd * part.games:,.2f}" if priced else "no --env-price"
        )
        lines.append(
            f"{part.label:12}{part.questions:>11,}{part.games:>11,}{calls:>24}{tokens:>32}{dollars:>26}"
        )
    return "\n".join(lines)
