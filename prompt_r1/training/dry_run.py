"""`--dry-run`: calls, tokens, dollars and GPU memory of a run.

Estimates lie between two assumptions about a game. Low: one call with a short prompt and a short reply. High:
a call in every turn but the last, with prompts half as long as a turn may be and replies as long as the agent
reads; each call repeats the dialogue so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prompt_r1.cli.fitted_table import fitted_table
from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.environment import is_mini
from prompt_r1.config.train import TrainConfig
from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.environments.budget import Price, parse_prices
from prompt_r1.spending import Spending
from prompt_r1.training.memory import memory_table

SYSTEM_TOKENS = 40  # the environment's system message
LONGEST_REPLY = 1024  # tokens, where the agent reads replies of any length


@dataclass(frozen=True)
class Texts:
    """Tokens of the texts of a call."""

    system: int  # the environment's system message
    prompt: int
    reply: int


def texts_of_call(spec: str, *, prompt: int, reply: int, high: bool) -> Texts:
    """The texts at one end of the estimate: short ones, or a `prompt` and a `reply` of this length.

    Short texts of the mini world are a few words long. None is longer than the one at the high end.
    """
    if high:
        return Texts(SYSTEM_TOKENS, prompt, reply)
    if is_mini(spec):
        return Texts(0, min(5, prompt), min(1, reply))
    return Texts(SYSTEM_TOKENS, min(60, prompt), min(60, reply))


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
    _, validation = training_and_validation(
        config.data, config.val_data, seed=config.seed, limit=config.val_limit, args=config.data_args
    )
    test = len(find_questions(config.test_data, "test", config.seed, config.data_args))
    parts = parts_of_run(config, validation=len(validation), test=test)
    if config.env == "none":
        return cost_table(parts, Spending(), Spending(), priced=True)
    low, high = (spending_of_game(config, config.env, config.env_price, high=high) for high in (False, True))
    return f"{cost_table(parts, low, high, priced=bool(config.env_price))}\n\n{memory_table(config)}"


def parts_of_run(config: TrainConfig, *, validation: int, test: int) -> list[Part]:
    """The parts of a run with so many validation and test questions."""
    validations = 1 + config.steps // config.val_every + (config.steps % config.val_every > 0)
    asked = config.steps * config.questions
    return [
        Part("training", asked, asked * config.group_size),
        Part("validation", validation, validation * validations),
        Part("test", test, 3 * test),  # alone, untrained, trained
    ]


def spending_of_game(game: AgentConfig, spec: str, prices: tuple[str, ...], *, high: bool) -> Spending:
    """The spending of a game with the environment `spec`, at one end of the estimate.

    Each call sends the whole dialogue so far. Of several prices the estimate takes the lowest or the highest.
    """
    longest_reply = game.max_reply_tokens or LONGEST_REPLY
    texts = texts_of_call(spec, prompt=game.max_new // 2, reply=longest_reply, high=high)
    calls = max(game.max_turns - 1, 1) if high else 1
    price = price_at(prices, high=high)
    tokens_in = [texts.system + n * (texts.prompt + texts.reply) + texts.prompt for n in range(calls)]
    return sum((price.of_call(sent, texts.reply) for sent in tokens_in), Spending())


def price_at(prices: tuple[str, ...], *, high: bool) -> Price:
    """The lowest or the highest prices of input and of output, so that no call can be outside of them."""
    parsed, end = parse_prices(prices), max if high else min
    return Price(end(price.tokens_in for price in parsed), end(price.tokens_out for price in parsed))


def cost_table(parts: Sequence[Part], low: Spending, high: Spending, *, priced: bool) -> str:
    """The table of calls: a row for each part and their sum, from `low` to `high` per game."""
    total = Part("together", sum(part.questions for part in parts), sum(part.games for part in parts))
    rows = []
    for part in [*parts, total]:
        cells = cost_cells(low * part.games, high * part.games, priced=priced)
        rows.append([part.label, f"{part.questions:,}", f"{part.games:,}", *cells])
    return fitted_table(["", "questions", "games", "calls", "tokens", "dollars"], rows)


def cost_cells(low: Spending, high: Spending, *, priced: bool) -> list[str]:
    """Calls, tokens and dollars, from low to high."""
    dollars = span(low.usd, high.usd, ".2f") if priced else "no --env-price"
    return [span(low.calls, high.calls), span(low.tokens, high.tokens), dollars]


def span(low: float, high: float, form: str = ".0f") -> str:
    """A range; one number if both ends look alike."""
    return " to ".join(dict.fromkeys([f"{low:,{form}}", f"{high:,{form}}"]))
