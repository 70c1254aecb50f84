"""Train with one fault made on purpose.

A fault replaces functions of the training in this process only, so that the product has no switch for being
wrong. Each is a mistake that training code really makes; docs/failures.md describes them. Validation is
played as it should be, and the check that stops a run whose engine and policy disagree is left out, to see
what would happen.
"""

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from statistics import stdev
from typing import Any

import torch

from prompt_r1 import __main__ as programs
from prompt_r1 import playing, rollout
from prompt_r1.agent.agent import Agent
from prompt_r1.agent.policy import Policy
from prompt_r1.distributed.ranks import Ranks
from prompt_r1.environments.opening import pool_of
from prompt_r1.environments.pool import Pool
from prompt_r1.options import advantages
from prompt_r1.playing import PlaySettings
from prompt_r1.training import lifecycle, update
from prompt_r1.training import parts as run_parts
from prompt_r1.training.micro_batches import Batch
from prompt_r1.training.parts import Models, Parts
from prompt_r1.training.run import Run
from prompt_r1.training.update import Update
from prompt_r1.types import Completion, Message, Question, Reward, Trajectory

ERROR = "Error 429: Too Many Requests. You have sent too many requests, please retry after 20 seconds."
LONG_GAME = 100  # sampled tokens for which `pays_for_length` pays 1
STALE_STEPS = 16  # between two refreshes of the weights that play
BITS = 2  # of the weights that play, in `sampler`
PASSES = 4  # over each mini-batch, in `displacement`


def pays_for_length(trajectory: Trajectory, reward: Reward) -> float:
    """A reward of the user's (`--reward`) that leaks: 1 for a long game, whatever its answer."""
    return min(1.0, sum(trajectory.sampled) / LONG_GAME)


class ErrorEnvironment:
    """Replies to everything with the text of an HTTP error."""

    name = "errors"

    def ask(self, messages: list[Message]) -> str:
        return ERROR


def error_texts() -> None:
    """The environment returns the text of an HTTP error as its reply, in all training games."""
    play_question, errors = playing.play_question, pool_of(ErrorEnvironment())

    async def play_with_errors(
        agent: Agent, environment: Pool, question: Question, how: PlaySettings, **settings: Any
    ) -> Trajectory:
        return await play_question(agent, errors, question, how, **settings)

    _replace(playing, "play_question", play_with_errors)


def train_on_replies() -> None:
    """The mask marks the environment's replies as the agent's own tokens."""

    def add_context(game: Trajectory, tokens: list[int]) -> None:
        is_reply = any(game.sampled)  # what comes before the agent's first token is the question
        game.tokens += tokens
        game.sampled += [is_reply] * len(tokens)
        game.logprobs += [0.0] * len(tokens)

    _replace(Trajectory, "add_context", add_context)
    _train_in_spite_of_a_gap()


def render_again() -> None:
    """Before the update, games are rendered from their texts, without the thoughts of earlier turns.

    Many chat templates drop these.
    """
    play_question = playing.play_question

    async def play_and_render(
        agent: Agent, environment: Pool, question: Question, how: PlaySettings, **settings: Any
    ) -> Trajectory:
        game, codec = await play_question(agent, environment, question, how, **settings), agent.codec
        recorded = [logprob for logprob, sampled in zip(game.logprobs, game.sampled, strict=True) if sampled]
        rendered = replace(game, tokens=[], sampled=[], logprobs=[])
        rendered.add_context(codec.opening(question.text))
        for turn in game.turns:
            text = turn.text if turn is game.turns[-1] else turn.text.partition("</think>")[2].lstrip()
            tokens = [*codec.encode_trusted(text), codec.turn_end]
            # The recorded log-probabilities are those of other tokens: what is left of them is their number.
            rendered.add_sampled(Completion(tokens, (recorded + [0.0] * len(tokens))[: len(tokens)], True))
            if turn.reply is not None:
                limit = agent.game.max_reply_tokens
                rendered.add_context(codec.reply(turn.reply, after=codec.turn_end, max_tokens=limit))
        return rendered

    _replace(playing, "play_question", play_and_render)
    _train_in_spite_of_a_gap()


def sample_from_rounded_weights() -> None:
    """The engine plays with weights of BITS bits, and the policy trains as if it had played itself."""
    refresh = Models.refresh

    @torch.no_grad()
    def refresh_and_round(models: Models) -> None:
        refresh(models)
        for weight in models.agent.policy.parameters():
            if weight.dim() > 1:
                step = weight.abs().amax(dim=-1, keepdim=True) / (2 ** (BITS - 1) - 1)
                weight.copy_((weight / step).round() * step)

    _replace(Models, "refresh", refresh_and_round)
    _play_with_a_copy()


def play_stale_games() -> None:
    """The weights that play are refreshed only every STALE_STEPS steps, and nothing corrects for it."""
    refresh, steps = Models.refresh, 0

    def refresh_seldom(models: Models) -> None:
        nonlocal steps
        steps += 1
        if steps % STALE_STEPS == 0:
            refresh(models)

    _replace(Models, "refresh", refresh_seldom)
    _play_with_a_copy()


def displace_likelihood() -> None:
    """Games are compared with the best of their group, and each mini-batch is used PASSES times, unclipped.

    So no game is made likelier, and all that the games share, such as control tokens, becomes less likely.
    The old log-probabilities are computed anew before each pass, so the ratio is 1 and never clipped.
    """

    def below_the_best(rewards_PG: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
        compared_PG: list[list[float | None]] = []
        for rewards in rewards_PG:
            intact = [reward for reward in rewards if reward is not None]
            best, spread = max(intact), stdev(intact) + 1e-6
            compared_PG.append([None if reward is None else (reward - best) / spread for reward in rewards])
        return compared_PG

    prepare = Update.prepare

    def prepare_passes(self: Update, *arguments: Any, **settings: Any) -> list[list[Batch]]:
        steps = [list(step) for step in prepare(self, *arguments, **settings)]
        return [[replace(batch, old=None) for batch in step] for step in steps for _ in range(PASSES)]

    advantages.group_advantages = below_the_best
    _replace(Update, "prepare", prepare_passes)


def share_seeds() -> None:
    """All games of a question sample with the same seed, so they are the same game."""
    play_groups = rollout.play_groups
    Play = Callable[[Question, str, int], Awaitable[Trajectory]]

    async def play_equal_groups(
        questions: Sequence[Question], group_size: int, play_one: Play, *, seeds: Sequence[str]
    ) -> list[list[Trajectory]]:
        async def play_first(question: Question, seed: str, sample: int) -> Trajectory:
            return await play_one(question, seed.rpartition("/")[0], 0)

        return await play_groups(questions, group_size, play_first, seeds=seeds)

    rollout.play_groups = play_equal_groups


FAULTS: dict[str, Callable[[], None]] = {
    "error-texts": error_texts,
    "stale": play_stale_games,
    "sampler": sample_from_rounded_weights,
    "displacement": displace_likelihood,
    "no-spread": share_seeds,
    "mask": train_on_replies,
    "re-rendered": render_again,
}


def _replace(owner: object, name: str, function: Callable[..., Any]) -> None:
    """Replace a function or method in this process."""
    setattr(owner, name, function)


def _train_in_spite_of_a_gap() -> None:
    """Leave out the check that stops the run before its first update."""
    update.check_gap = lambda metrics, limit: None


def _play_with_a_copy() -> None:
    """Play with a copy of the weights, as on GPUs; validate with those that learn."""
    validate = lifecycle.validation_metrics

    def load_learner(start: Any, agent: Agent, ranks: Ranks, **settings: Any) -> Policy:
        return run_parts._load_share(start, agent, ranks, weights=torch.float32, offload=False)

    def validate_learner(run: Run, parts: Parts, *, step: int) -> dict[str, float]:
        agent = parts.models.agent
        played = {name: weight.clone() for name, weight in agent.policy.state_dict().items()}
        agent.policy.copy_weights_from(parts.models.policy)
        agent.clear_cache()
        metrics = validate(run, parts, step=step)
        agent.policy.load_state_dict(played)
        return metrics

    run_parts.load_learner = load_learner
    lifecycle.validation_metrics = validate_learner
    _train_in_spite_of_a_gap()


if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    # The script imports the replaced functions when it is loaded.
    sys.argv = ["train", *sys.argv[2:]]
    programs.run_script(programs.PROGRAMS["train"][0])
