"""`--dry-run`: estimate the calls, tokens, dollars and time of a program, without a call.

An estimate is calls × tokens × price. A call sends the system message, all prompts and whole replies of its
game so far, and its prompt. So a long reply is billed once as output, and again as input in each later call.
Three estimates differ in what they assume:

             low                        likely                        high
    calls    one; none in 1 game of 10  half of what the turns allow  as many as the turns allow
    prompt   SHORT_PROMPT tokens        as long as a question         as long as a turn (--max-new)
    reply    SHORT_REPLY tokens         REPLY tokens                  max_tokens of --env-args
    token    5 bytes of text            4 bytes                       3 bytes
    repeats  equal calls are paid once  all calls are paid            all calls are paid

Without max_tokens nothing limits a reply. Then LONG_REPLY tokens are assumed, and the high estimate is no
upper bound. Requests that are repeated because their response was lost come on top.

The time of a step on A100s, the GPUs of the paper, is calculated, not measured:

    update       2 FLOP · parameters · tokens · forwards / (GPUs · FLOPS)
    generation   the turns of the longest game, token by token; each token reads all weights from memory

docs/paper.md has the calculation for the paper's run. The measured time of a step is in metrics.jsonl, as
time/rollout and time/update.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prompt_r1.data.questions import find_questions, training_and_validation
from prompt_r1.environments.budget import Price, parse_prices
from prompt_r1.environments.environment import LONG_REPLY
from prompt_r1.environments.sources import limit_in
from prompt_r1.environments.specs import parse_fields
from prompt_r1.model.gguf import is_gguf
from prompt_r1.pair.asking import request_of
from prompt_r1.pair.named_agent import find_agent
from prompt_r1.programs.launcher import launcher_number
from prompt_r1.programs.tables import text_table
from prompt_r1.settings.agent import MINI_AGENT, EnvironmentConfig
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.run import repetition_note, with_steps
from prompt_r1.types import GameSettings, Question, Spending

SHORT_PROMPT = 10  # tokens
SHORT_REPLY = 20  # tokens
REPLY = 250  # tokens of a usual reply
CALL_SECONDS = 3.0  # how long a call takes
AGENTS_OF_TEST = 2  # The untrained and the trained agent play each test question.

TURN = 250  # tokens of the agent's usual turn
# An A100 computes at most 312e12 dense bfloat16 operations per second, and reads at most 2.0e12 bytes of its
# memory per second. The shares of these peaks are assumed.
FLOPS = 0.4 * 312e12
BANDWIDTH = 0.25 * 2.0e12

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

    def direct_call(self, request: str, question_bytes: int) -> Spending:
        """The cost of a call with a question; `request` is all the other text."""
        return self.call(self.tokens(request) + math.ceil(question_bytes / self.bytes_per_token))

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
    """The three cases. `question_bytes` is the mean length. `fields`: --env-args, sent in each call."""
    longest = limit_in(fields) or LONG_REPLY
    short, usual = min(SHORT_REPLY, longest), min(REPLY, longest)
    prompt = min(max(question_bytes // 4, SHORT_PROMPT), game.max_new)
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
    per_step = config.questions * config.group_size
    validations = 1 + math.ceil(config.steps / config.save_every)
    question_bytes = mean_bytes(training)
    prices = list(parse_prices(config.env_price, config.env.split(",")).values())
    fields = parse_fields(config.env_args)
    cases = cases_of(config.game, question_bytes, fields, prices)

    def games(count: int, *, different: int) -> Estimate:
        """The cost of `count` games.

        In the low case, equal calls are paid once, so only the `different` games count, and one game in ten
        makes no call.
        """
        counts = {"low": different * 9 // 10, "likely": count, "high": count}
        return {case.name: case.game(config.env_system) * counts[case.name] for case in cases}

    # The agents of several validations, and of the test, may make equal calls, which are paid once.
    of_training = config.steps * per_step
    of_validation = validations * len(validation)
    of_test = AGENTS_OF_TEST * len(test)
    parts = {
        f"training, {of_training:,} games": games(of_training, different=of_training),
        f"validation, {of_validation:,} games": games(of_validation, different=len(validation)),
        f"test, {of_test:,} games": games(of_test, different=len(test)),
    }
    if test and not config.without_environment:
        request = config.env_system + request_of(config.env)
        parts[f"test, {len(test):,} calls"] = {
            case.name: case.direct_call(request, mean_bytes(test)) * len(test) for case in cases
        }
    notes = [repetition_note(config, len(training))]
    if not config.without_environment:
        notes += notes_of_calls(parts, config, limited=limit_in(fields) is not None, at_once=per_step)
    _, likely, _ = cases
    notes.append(step_time(config, likely, question_bytes=question_bytes))
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


def step_time(config: TrainConfig, likely: Case, *, question_bytes: int) -> str:
    """A line about the time of a step with games of the `likely` case.

    "" for the mini agent, and for a model whose size is not known.
    """
    parameters = 0 if config.agent == MINI_AGENT else count_parameters(config.agent)
    if parameters == 0:
        return ""
    ranks = launcher_number("WORLD_SIZE", default=1)
    update = update_seconds(config, likely, question_bytes=question_bytes, parameters=parameters, ranks=ranks)
    bytes_of_weights = 2 * parameters
    generation = config.game.max_turns * min(TURN, config.max_new) * bytes_of_weights / BANDWIDTH
    hours = config.steps * (update + generation) / 3600
    return (
        f"A step on {ranks} × A100: {generation:.0f} s to generate, {update:.0f} s to update, beside its "
        f"calls; {config.steps:,} steps: {hours:,.1f} h. This is calculated, from {parameters / 1e9:.1f} "
        "billion parameters and the GPU's peak, and was not measured."
    )


def update_seconds(
    config: TrainConfig, likely: Case, *, question_bytes: int, parameters: int, ranks: int
) -> float:
    """The seconds of the update of a step. The games of a group share their opening."""
    opening = (len(config.instruction_text) + question_bytes) // 4
    read = min(likely.reply, config.max_reply_tokens or likely.reply)
    game = (likely.calls + 1) * min(TURN, config.max_new) + likely.calls * read
    tokens = config.questions * (opening + config.group_size * game)
    mini_batches = max(1.0, config.questions * config.group_size / config.mini_batch)
    forwards = 3.0  # A backward counts as two.
    if config.checkpointing:
        forwards += 1  # the recomputation
    if config.kl_coef:
        forwards += 1  # the reference
    forwards += 1 - 1 / mini_batches  # π_old of all mini-batches but the first
    return 2 * parameters * tokens * forwards / (ranks * FLOPS)


def count_parameters(agent: str) -> int:
    """The parameters of a model, from its configuration or else from its name, such as Qwen3-4B; else 0."""
    if is_gguf(agent):
        return 0
    path = find_agent(agent, seed=0)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # It was not downloaded yet, or it is no model that transformers knows.
        in_name = re.search(r"(\d+(\.\d+)?)B\b", agent)
        return round(float(in_name[1]) * 1e9) if in_name else 0
    return sum(weight.numel() for weight in model.parameters())
