"""`--dry-run`: estimate the calls, tokens, dollars and time of a program, without a call.

A call sends the system message, all prompts and whole replies of its game so far, and its prompt. So a long
reply is billed once as output, and again as input in each later call. Three estimates differ in what they
assume:

             low                        likely                        high
    calls    one; none in 1 game of 10  half of what the turns allow  as many as the turns allow
    prompt   SHORT_PROMPT tokens        as long as a question         as long as a turn (--max-new)
    reply    SHORT_REPLY tokens         REPLY tokens                  max_tokens of --env-args
    token    5 bytes of text            4 bytes                       3 bytes
    repeats  equal calls are paid once  all calls are paid            all calls are paid

Without max_tokens nothing limits a reply. Then LONG_REPLY tokens are assumed, and the high estimate is no
upper bound. Requests that are repeated because their response was lost come on top.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.environments.budget import Price, parse_prices
from prompt_r1.environments.environment import LONG_REPLY
from prompt_r1.environments.sources import limit_in
from prompt_r1.environments.specs import parse_fields
from prompt_r1.pair.asking import request_of
from prompt_r1.programs.launcher import launcher_number
from prompt_r1.programs.tables import text_table
from prompt_r1.settings.agent import EnvironmentConfig
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.questions import repetition_note, with_steps
from prompt_r1.training.step_time import step_time
from prompt_r1.types import GameSettings, Question, Spending

SHORT_PROMPT = 10  # tokens
SHORT_REPLY = 20  # tokens
REPLY = 250  # tokens of a usual reply
CALL_SECONDS = 3.0  # how long a call takes
GAMES_OF_TEST = 2  # The untrained and the trained agent play each test question.

Estimate = Mapping[str, Spending]
"""What something costs, by the name of the case: low, likely and high."""


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
        """The cost of a call that sends so many tokens."""
        return self.price.of_call(sent, self.reply)

    def direct_call(self, request: str, question: int) -> Spending:
        """The cost of a call with a question of so many bytes; `request` is all the other text."""
        return self.call(self.tokens(request) + math.ceil(question / self.bytes_per_token))

    def game(self, system: str) -> Spending:
        """The cost of a game under a system message. Each call repeats the dialogue before it."""
        spent = Spending()
        for number in range(self.calls):
            dialogue_so_far = number * (self.prompt + self.reply)
            spent += self.call(self.tokens(system) + dialogue_so_far + self.prompt)
        return spent


def cases_of(
    game: GameSettings, question: int, fields: Mapping[str, object], prices: Sequence[Price]
) -> list[Case]:
    """The three cases. `question`: the mean bytes of a question. `fields`: --env-args, sent in each call."""
    longest = limit_in(fields) or LONG_REPLY
    short, usual = min(SHORT_REPLY, longest), min(REPLY, longest)
    prompt = min(max(question // 4, SHORT_PROMPT), game.max_new)
    most_calls = game.max_turns - 1  # The prompt of the last turn is not sent; alone, an agent has one turn.
    usual_calls = math.ceil(most_calls / 2)
    ordered = sorted(prices, key=lambda price: price.tokens_in + price.tokens_out)
    mean = Price(fmean(one.tokens_in for one in prices), fmean(one.tokens_out for one in prices))
    return [
        Case("low", min(1, most_calls), min(SHORT_PROMPT, game.max_new), short, 5, ordered[0]),
        Case("likely", usual_calls, prompt, usual, 4, mean),
        Case("high", most_calls, game.max_new, longest, 3, ordered[-1]),
    ]


def estimate(config: TrainConfig) -> str:
    """The text of train.py --dry-run. Reads the questions, and no weights. Raises UsageError."""
    training, validation = training_and_validation(
        config.data, config.val_data, seed=config.seed, limit=config.val_limit
    )
    config = with_steps(config, len(training))
    test = find_questions(config.test_data, "test", config.seed)
    games = {
        "training": config.steps * config.questions * config.group_size,
        "validation": len(validation) * (1 + math.ceil(config.steps / config.save_every)),
        "test": len(test) * GAMES_OF_TEST,
    }
    # The agents of several validations, and of the test, may make equal calls, which are paid once.
    least = {
        "training": games["training"] * 9 // 10,
        "validation": len(validation) * 9 // 10,
        "test": len(test) * 9 // 10,
    }
    prices = list(parse_prices(config.env_price, config.env.split(",")).values())
    fields = parse_fields(config.env_args)
    cases = cases_of(config.game, mean_bytes(training), fields, prices)
    parts: dict[str, Estimate] = {}
    for part, count in games.items():
        parts[f"{part}, {count:,} games"] = {
            case.name: case.game(config.env_system) * (least[part] if case.name == "low" else count)
            for case in cases
        }
    if test and not config.without_environment:
        request = config.env_system + request_of(config.env)
        parts[f"test, {len(test):,} calls"] = {
            case.name: case.direct_call(request, mean_bytes(test)) * len(test) for case in cases
        }
    notes = [repetition_note(config, len(training))]
    if not config.without_environment:
        at_once = config.questions * config.group_size
        notes += notes_of_calls(parts, config, limited=limit_in(fields) is not None, at_once=at_once)
    likely = cases[1]
    notes.append(step_time(config, question=mean_bytes(training), calls=likely.calls, reply=likely.reply))
    return "\n".join([cost_table(parts, priced=any(config.env_price)), "", *filter(None, notes)])


def mean_bytes(questions: Sequence[Question]) -> int:
    """The mean length of the questions, in bytes of UTF-8."""
    return round(fmean(len(one.text.encode(errors="replace")) for one in questions)) if questions else 0


def total_of(parts: Mapping[str, Estimate]) -> Estimate:
    """The sum over all parts."""
    total: dict[str, Spending] = {}
    for part in parts.values():
        for name, spent in part.items():
            total[name] = total.get(name, Spending()) + spent
    return total


def cost_table(parts: Mapping[str, Estimate], *, priced: bool) -> str:
    """For each part, and for all together, a row for each case."""
    rows = []
    used = {part: cases for part, cases in parts.items() if cases["high"].calls}
    for part, cases in {**used, "together": total_of(parts)}.items():
        rows.append([part, "", "", "", ""])
        for name, spent in cases.items():
            tokens = [shown_tokens(spent.tokens_in), shown_tokens(spent.tokens_out)]
            rows.append([f"  {name}", f"{spent.calls:,}", *tokens, f"{spent.usd:,.2f}" if priced else "–"])
    return text_table(["", "calls", "tokens in", "tokens out", "dollars"], rows)


def shown_tokens(tokens: int) -> str:
    """A number of tokens, in millions from ten million on."""
    return f"{tokens:,}" if tokens < 10_000_000 else f"{tokens / 1e6:,.1f} M"


def notes_of_calls(
    parts: Mapping[str, Estimate], config: EnvironmentConfig, *, limited: bool, at_once: int
) -> list[str]:
    """What a reader must know about the table: the price, the bound, and how long the calls take."""
    notes = []
    if not any(config.env_price):
        notes.append("Dollars need a price: --env-price IN,OUT, per million tokens.")
    if not limited:
        notes.append(
            f"high is no upper bound: it assumes replies of {LONG_REPLY:,} tokens, but nothing limits them; "
            "give --env-args '{\"max_tokens\": 1024}'."
        )
    total = total_of(parts)
    ranks = launcher_number("WORLD_SIZE", default=1)
    slots = min(config.env_concurrency * ranks, at_once)
    if config.requests_per_minute:
        per_second = config.requests_per_minute / 60
        where = f"at {config.requests_per_minute:,} requests per minute"
    else:
        per_second = slots / CALL_SECONDS
        where = f"at {CALL_SECONDS:g} s per call (assumed), {slots} at once; see --requests-per-minute"
    low, likely, high = (duration(total[name].calls / per_second) for name in ("low", "likely", "high"))
    notes.append(f"The calls alone take {low} to {high}, likely {likely}, {where}.")
    return notes


def duration(seconds: float) -> str:
    """A time in its usual unit, such as "14 h"."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.0f} s"
