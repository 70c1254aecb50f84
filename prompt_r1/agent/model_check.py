"""Compare a loaded model with itself: our packed rows and KV cache against its own forward.

The oracle is the unmodified model with transformers' eager attention, on the same weights, one game at a time
and without a cache. On one CPU core it takes 0.04 s for the mini agent; for a random model of 0.6 B
parameters 4 s in float32 and 3 s in bfloat16, and the peak of memory does not grow.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from prompt_r1.agent import attention
from prompt_r1.agent.attention import UnsupportedAttention
from prompt_r1.agent.decode_kernels import Chunk, Kernel, RaggedBatch
from prompt_r1.agent.fused_kernels import own_forwards
from prompt_r1.agent.kv_cache import Arena, Move
from prompt_r1.agent.packing import pack
from prompt_r1.agent.policy import Policy, attention_shape
from prompt_r1.errors import UsageError
from prompt_r1.types import Completion, Question, Trajectory

OPENING = 5  # tokens that both games begin with
WINDOW = 4  # tokens of sliding windows during the check: the games are shorter than the model's own
LENGTHS = (18, 13)  # tokens of the two games
# Cached tokens of each game after each forward of two turns: prompts, single tokens, replies.
TURNS = ((9, 0), (10, 8), (11, 9), (16, 12), (18, 13))
# The largest difference of one log-probability in float32, and the largest mean difference in 16 bits. Right
# models with large random weights differ by up to 4e-5, and in bfloat16 by 0.001 to 0.054 in the mean.
FLOAT32_LIMIT = 1e-3
MEAN_LIMIT_16_BITS = 0.2


@dataclass(frozen=True)
class Difference:
    """How far log-probabilities are from the unmodified model's, in nats."""

    packed: float  # games packed into one row, as in training: the largest
    cached: float  # turns over the KV cache, as in play: the largest


def check_model(policy: Policy) -> Difference:
    """Raise UsageError unless packed games and cached turns have the model's own log-probabilities."""
    with _short_windows(policy.model):
        return _check(policy)


def _check(policy: Policy) -> Difference:
    model = policy.model
    text = model.config.get_text_config()
    games = _random_games(text.vocab_size, padding=getattr(text, "pad_token_id", None))
    try:
        expected = _own_logprobs(policy, games)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a model that we know nothing about
        raise unsupported(model.config, f"its own forward fails ({_summary(error)})") from None
    try:
        cached = _cached_logprobs(policy, games)
        packed = _packed_logprobs(policy, games)
    except torch.OutOfMemoryError:
        raise
    except UnsupportedAttention as error:
        raise unsupported(model.config, str(error)) from None
    except Exception as error:  # of a model that we know nothing about
        raise unsupported(model.config, f"its layers do not take our rows ({_summary(error)})") from None
    return Difference(
        packed=_compare(policy, "games packed into one row", packed, expected),
        cached=_compare(policy, "turns over the KV cache", cached, expected),
    )


def unsupported(config: PretrainedConfig, cause: str) -> UsageError:
    """The error for a model that we would compute wrongly; `cause` completes the sentence."""
    return UsageError(f"models of type {config.model_type!r} are not supported: {cause}")


def _summary(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _random_games(vocabulary: int, *, padding: int | None) -> list[list[int]]:
    """Two games with a shared opening and different lengths. No padding: models may treat it apart."""
    rng = random.Random(0)
    drawn = [token for token in rng.choices(range(vocabulary), k=2 * sum(LENGTHS)) if token != padding]
    opening, first, second = drawn[:OPENING], LENGTHS[0] - OPENING, LENGTHS[1] - OPENING
    rest = drawn[OPENING:]
    return [opening + rest[:first], opening + rest[first : first + second]]


def _logprobs(logits: Tensor, tokens: list[int], temperature: float) -> Tensor:
    """(T - 1,) log-probabilities of all tokens but the first, from the logits (T, V) of a game."""
    targets = torch.tensor(tokens[1:], device=logits.device)
    log_p = torch.log_softmax(logits[:-1].float() / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0].cpu()


@torch.no_grad()
def _own_logprobs(policy: Policy, games: list[list[int]]) -> list[Tensor]:
    """The oracle: the model's own forward of each game."""
    found: list[Tensor] = []
    with eager_attention(policy.model), own_forwards(policy.model):
        for tokens in games:
            row = torch.tensor([tokens], device=policy.device)
            with torch.autocast(row.device.type, policy.compute, enabled=policy.compute.itemsize < 4):
                logits = policy.model(input_ids=row, use_cache=False).logits[0]
            found.append(_logprobs(logits, tokens, policy.temperature))
    return found


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shorten every sliding window, so that two short games show what it does."""
    kept: list[tuple[Any, int]] = []
    parts: list[Any] = [model.config, model.config.get_text_config(), *model.modules()]
    for part in parts:
        window = getattr(part, "sliding_window", None)
        if isinstance(window, int):
            kept.append((part, window))
            part.sliding_window = WINDOW
    try:
        yield
    finally:
        for part, window in reversed(kept):
            part.sliding_window = window


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute its attention as transformers does."""
    model.set_attn_implementation("eager")
    if model.config._attn_implementation != "eager":
        raise UnsupportedAttention("its attention cannot be replaced")
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)


@torch.no_grad()
def _packed_logprobs(policy: Policy, games: list[list[int]]) -> list[Tensor]:
    """The log-probabilities after the opening, from one packed row."""
    trajectories: list[Trajectory] = []
    for tokens in games:
        game = Trajectory(Question("check", "check", "", ()))
        game.add_context(tokens[:OPENING])
        game.add_sampled(Completion(tokens[OPENING:], [0.0] * (len(tokens) - OPENING), True))
        trajectories.append(game)
    scored = policy(pack([trajectories], policy.device)).logprobs.cpu()
    return list(scored.split([len(tokens) - OPENING for tokens in games]))


@dataclass
class _Counted:
    """A kernel that counts its calls."""

    kernel: Kernel
    calls: int = 0

    def __call__(self, *arguments: object) -> Tensor:
        self.calls += 1
        return self.kernel(*arguments)  # type: ignore[arg-type]


@torch.no_grad()
def _cached_logprobs(policy: Policy, games: list[list[int]]) -> list[Tensor]:
    """The log-probabilities after the opening, from two turns over the KV cache, as the engine plays them."""
    shape = attention_shape(policy.model.config)
    kernel = _Counted(policy.decode_kernel())
    arena = Arena(policy, sum(LENGTHS))
    starts = (0, LENGTHS[0])
    cached = [0, 0]  # tokens of each game
    hidden: list[list[Tensor]] = [[], []]
    for ends in TURNS:
        if ends[0] > cached[0] == TURNS[0][0]:  # the second game copies the opening, except its last token
            cached[1] = OPENING - 1
            arena.copy([Move(starts[0], starts[1], cached[1])])
        moved = [game for game in (0, 1) if ends[game] > cached[game]]
        tokens: list[int] = []
        chunks: list[Chunk] = []
        for game in moved:
            new = games[game][cached[game] : ends[game]]
            chunks.append(Chunk(len(tokens), len(new), starts[game], ends[game]))
            tokens += new
        batch = RaggedBatch(arena.keys, arena.values, chunks, policy.device, kernel)
        kernel.calls = 0
        row = torch.tensor([tokens], device=policy.device)
        states = policy.hidden_states(row, position_ids=batch.positions[None], ragged=batch)[0]
        if kernel.calls != shape.layers:
            raise UnsupportedAttention(_explain_calls(kernel.calls, shape.layers))
        for game, part in zip(moved, states.split([chunk.count for chunk in chunks]), strict=True):
            hidden[game].append(part)
        cached = list(ends)
    found: list[Tensor] = []
    for tokens, parts in zip(games, hidden, strict=True):
        new = tokens[OPENING - 1 :]
        found.append(_logprobs(policy.logits(torch.cat(parts))[-len(new) :], new, policy.temperature))
    return found


def _explain_calls(calls: int, layers: int) -> str:
    """Why a forward of this many layers calls our attention another number of times."""
    if not calls:
        return "its layers do not pass the cache on to their attention"
    if calls > layers:
        return f"its {layers} layers call attention {calls} times"
    return f"only {calls} of its {layers} layers have attention, and others keep a state of their own"


def _compare(policy: Policy, what: str, found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference in nats. Raises UsageError if it exceeds rounding in the compute dtype."""
    own = torch.cat([logprobs[OPENING - 1 :] for logprobs in expected])
    difference = (torch.cat(found) - own).abs()
    largest = float(difference.max())
    if policy.compute.itemsize < 4:
        right = float(difference.mean()) <= MEAN_LIMIT_16_BITS
    else:
        right = largest <= FLOAT32_LIMIT
    if not right:  # also when it is NaN
        raise unsupported(
            policy.model.config,
            f"the log-probabilities of {what} differ by up to {largest:.2g} nats from its own",
        )
    return largest
