"""`--dry-run`: estimate the calls, tokens and dollars of a run.

The estimate is a range. At its low end, a game has one call with a short prompt and a short reply. At its
high end, a game has a call in every turn but the last. There a prompt is half as long as a turn may be, a
reply is as long as the agent reads, and each call repeats the dialogue so far.
"""

import math
from collections.abc import Mapping

from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.environments.budget import parse_price
from prompt_r1.programs.tables import text_table
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.questions import repetition_note, with_steps
from prompt_r1.types import Spending

SYSTEM_TOKENS = 40  # the environment's system message
SHORT_TEXT = 60  # tokens of a short prompt or reply
LONGEST_REPLY = 1024  # tokens; assumed if the agent reads replies of any length


def estimate(config: TrainConfig) -> str:
    """The table of --dry-run. Reads the questions, but no model. Raises UsageError for unreadable files."""
    training, validation = training_and_validation(
        config.data, config.val_data, seed=config.seed, limit=config.val_limit
    )
    config = with_steps(config, len(training))
    test = len(find_questions(config.test_data, "test", config.seed))
    games = games_of_run(config, validation=len(validation), test=test)
    low = spending_of_game(config, high=False)
    high = spending_of_game(config, high=True)
    table = cost_table(games, low, high, priced=bool(config.env_price) or config.env == "none")
    note = repetition_note(config, len(training))
    return f"{table}\n\n{note}" if note else table


def games_of_run(config: TrainConfig, *, validation: int, test: int) -> dict[str, int]:
    """The games of each part of a run with so many validation and test questions."""
    validations = 1 + math.ceil(config.steps / config.save_every)
    return {
        "training": config.steps * config.questions * config.group_size,
        "validation": validation * validations,
        "test": test * 3,  # the environment alone, the untrained and the trained agent
    }


def spending_of_game(config: TrainConfig, *, high: bool) -> Spending:
    """The spending of a game at one end of the estimate."""
    if config.env == "none":
        return Spending()
    calls = 1
    prompt = config.max_new // 2
    reply = config.max_reply_tokens or LONGEST_REPLY
    if high:
        calls = max(config.max_turns - 1, 1)
    else:
        prompt, reply = min(prompt, SHORT_TEXT), min(reply, SHORT_TEXT)
    price = parse_price(config.env_price)
    spending = Spending()
    for call in range(calls):
        dialogue_so_far = call * (prompt + reply)
        spending += price.of_call(SYSTEM_TOKENS + dialogue_so_far + prompt, reply)
    return spending


def cost_table(games: Mapping[str, int], low: Spending, high: Spending, *, priced: bool) -> str:
    """A table with a row for each part of the run and for their sum. A game costs from `low` to `high`."""
    rows = []
    for part, count in [*games.items(), ("together", sum(games.values()))]:
        least, most = low * count, high * count
        calls = as_range(f"{least.calls:,}", f"{most.calls:,}")
        tokens = as_range(f"{least.tokens:,}", f"{most.tokens:,}")
        dollars = as_range(f"{least.usd:,.2f}", f"{most.usd:,.2f}") if priced else "no --env-price"
        rows.append([part, f"{count:,}", calls, tokens, dollars])
    return text_table(["", "games", "calls", "tokens", "dollars"], rows)


def as_range(least: str, most: str) -> str:
    """Write both ends of a range, or only one number if they are equal."""
    return least if least == most else f"{least} to {most}"
