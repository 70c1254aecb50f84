"""`train.py --explain`: one question through the whole algorithm, step by step.

Every printed number is what the named function of the training code returned.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import mean, stdev
from textwrap import fill

import torch

from prompt_r1.agent.engine import Engine
from prompt_r1.agent.policy import Policy
from prompt_r1.chat_template import text_of
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import start_ranks
from prompt_r1.grpo import group_advantages, grpo_loss
from prompt_r1.protocol import Codec, parse
from prompt_r1.reward import score
from prompt_r1.rollout import play
from prompt_r1.terminal import printable
from prompt_r1.training.batch import collate
from prompt_r1.training.explain_step import OptimizerStep, Snapshot, make_walkthrough
from prompt_r1.types import Reward, ScoredGame, Trajectory

WIDTH = 96
SHOWN_TOKENS = 9

Say = Callable[[str], None]


def explain(config: TrainConfig, say: Say) -> None:
    """Print one group's way through the algorithm, and the function behind each number."""
    walkthrough = make_walkthrough(config, start_ranks(config.device, config.layout))
    config, games = walkthrough.config, walkthrough.games
    say("One question of Prompt-R1, step by step. Each number comes from a function in [brackets].")
    say(f"Agent {walkthrough.agent}, environment {config.env}, seed {config.seed}.")
    totals = [(_reward(game).total, len(game.trajectory.turns)) for game in games]
    best = totals.index(max(totals))
    game = games[best].trajectory
    _explain_opening(game, walkthrough.codec, say)
    _explain_game(best, game, walkthrough.codec, config, say)
    _explain_rewards(games, config, say)
    _explain_advantages(games, say)
    _explain_loss(walkthrough.step, best, walkthrough.codec, config, say)
    _explain_step(walkthrough.step, games, config, say)


def _reward(game: ScoredGame) -> Reward:
    assert game.reward is not None, "a walkthrough has no broken games"
    return game.reward


def _heading(number: int, title: str, where: str, *functions: Callable[..., object]) -> str:
    names = ", ".join(f"{f.__module__.removeprefix('prompt_r1.')}.{f.__qualname__}" for f in functions)
    return f"\n{number}. {title} ({where})\n   [{names}]"


def _block(label: str, text: str) -> str:
    """`label`, then text that is safe on a terminal, wrapped under itself."""
    text = printable(text).replace("\n", "⏎")
    return fill(text, WIDTH, initial_indent=f"   {label:13}", subsequent_indent=" " * 16)


def _explain_opening(game: Trajectory, codec: Codec, say: Say) -> None:
    say(_heading(1, "The opening", "H_0 is empty", Codec.opening))
    opening = game.tokens[: game.opening]
    say(_block("text", text_of(codec.tokenizer, opening)))
    say(_block("tokens", f"{len(opening)}: {' '.join(map(str, opening[:12]))} … not trained on"))


def _explain_game(number: int, game: Trajectory, codec: Codec, config: TrainConfig, say: Say) -> None:
    say(_heading(2, f"Game {number + 1} of {config.group_size}", "eqs 1-11", play, Engine.generate, parse))
    parts = _parts(game)
    sampled_parts = [part for part in parts if game.sampled[part.start]]
    for turn, part in zip(game.turns, sampled_parts, strict=True):
        nats = sum(game.logprobs[part.start : part.stop])
        say(_block("agent", f"samples {len(part)} tokens, log π = {nats:.3f}"))
        say(_block("", turn.text))
        action = parse(turn.text)
        blocks = {"think": action.think, "prompt": action.prompt, "answer": action.answer}
        seen = [f"{name} {text!r}" for name, text in blocks.items() if text is not None]
        say(_block("parsed", ", ".join([*seen, "clean" if action.clean else "not clean"])))
        if turn.reply is not None:
            say(_block("environment", turn.reply))
    say(_block("end", f"{game.stop}; the gold answer is {' or '.join(map(repr, game.question.answers))}"))
    lengths = [f"{'agent' if game.sampled[part.start] else 'context'} {len(part)}" for part in parts]
    say(
        _block(
            "mask", f"{' | '.join(lengths)}: {sum(game.sampled)} of {len(game.tokens)} tokens are trained on"
        )
    )


def _parts(game: Trajectory) -> list[range]:
    """The token positions of a game in runs: context, the agent's tokens, context, …"""
    starts = [0]
    starts += [t for t in range(1, len(game.tokens)) if game.sampled[t] != game.sampled[t - 1]]
    return [range(start, stop) for start, stop in pairwise([*starts, len(game.tokens)])]


def _explain_rewards(games: list[ScoredGame], config: TrainConfig, say: Say) -> None:
    rule = config.reward_rule
    say(_heading(3, f"Rewards, rule {config.rule}", "eqs 12-15", score))
    say(
        f"   α = {rule.alpha}, β = {rule.beta}, γ = {rule.gamma}, δ = {rule.delta}, ε = {rule.epsilon}; "
        "R = -ε + R_fmt, and + R_ans once R_fmt = ε"
    )
    say("   game  turns   α Σ M_t   β A_p   γ A_n   δ C_f   R_fmt   gate     R_ans       R   answer")
    for number, game in enumerate(games, start=1):
        reward = _reward(game)
        terms = reward.terms
        gate = "open" if reward.gate_is_open else "shut"
        answer = printable(game.trajectory.answer or "–")
        parts = "   ".join(f"{part:5.2f}" for part in (terms.parsed, terms.filled, terms.complete))
        line = (
            f"   {number:4}  {len(game.trajectory.turns):5}   {terms.interactions:7.2f}   {parts}   "
            f"{reward.format:5.2f}   {gate}   {reward.answer:7.3f}  {reward.total:6.3f}   {answer}"
        )
        say(line[:WIDTH])


def _explain_advantages(games: list[ScoredGame], say: Say) -> None:
    totals = [_reward(game).total for game in games]
    say(_heading(4, "Advantages: each game against the others of its question", "eq. 16", group_advantages))
    say(f"   mean = {mean(totals):.4f}, std (n - 1) = {stdev(totals):.4f}; Â = (R - mean) / (std + 1e-6)")
    say("   " + "   ".join(f"Â{number} = {s.advantage:+.4f}" for number, s in enumerate(games, start=1)))


def _explain_loss(step: OptimizerStep, best: int, codec: Codec, config: TrainConfig, say: Say) -> None:
    say(_heading(5, "The loss", "eq. 17", collate, Policy.forward, grpo_loss))
    say(
        f"   L = Σ w [-min(r Â, clip(r, 1 - {config.clip}, 1 + {config.clip}) Â) + {config.kl_coef} KL], "
        "w = 1 / (M |u|)"
    )
    say("   Before the step the weights are those that sampled: r = 1 but for rounding. KL is to the start.")
    _explain_tokens(step.before, best, codec, say)
    _explain_games(step.before, say)


def _explain_tokens(snapshot: Snapshot, best: int, codec: Codec, say: Say) -> None:
    batch, kl = snapshot.batches[best], snapshot.losses[best].kl
    assert batch.old is not None and batch.ref is not None
    say(f"   The first tokens of game {best + 1}:")
    say("   token            log π_old    log π_θ    log π_ref          r         KL          w")
    for n, token in enumerate(batch.packed.targets.tolist()[:SHOWN_TOKENS]):
        text = repr(printable(text_of(codec.tokenizer, [token])))[:14]
        old, new, ref = (values[n].item() for values in (batch.old, snapshot.logprobs[best], batch.ref))
        ratio = math.exp(new - old)
        probabilities = f"{old:10.4f} {new:10.4f}   {ref:10.4f}"
        say(f"   {text:14}  {probabilities} {ratio:10.5f} {kl[n]:10.5f} {batch.weights[n]:10.5f}")


def _explain_games(snapshot: Snapshot, say: Say) -> None:
    say("   game  tokens        Â       loss        KL   clipped")
    for number, (batch, loss) in enumerate(zip(snapshot.batches, snapshot.losses, strict=True), start=1):
        count, advantage = len(batch.weights), batch.advantages[0].item()
        share = batch.weights.sum().item()  # 1 / M: over it, sums are means over the game's tokens
        loss_part, kl, clipped = (loss.metrics[name].item() for name in ("loss", "kl", "clip_frac"))
        means = f"{kl / share:8.5f}  {clipped / share:8.3f}"
        say(f"   {number:4}  {count:6}  {advantage:+7.4f}  {loss_part:+9.5f}  {means}")
    total = sum(loss.metrics["loss"].item() for loss in snapshot.losses)
    say(f"   {'sum':>4}  {'':6}  {'':7}  {total:+9.5f}")


def _explain_step(step: OptimizerStep, games: list[ScoredGame], config: TrainConfig, say: Say) -> None:
    say(_heading(6, "One optimiser step", f"AdamW, lr {config.lr}", torch.optim.AdamW, grpo_loss))
    say(f"   gradient norm {step.grad_norm:.4f}, clipped at {config.grad_clip}. The same games, new weights:")
    _explain_games(step.after, say)
    say("   How the step changed the log-probability of each game's own tokens, in nats per token:")
    for number, game in enumerate(games):
        old, new = (snapshot.logprobs[number].mean().item() for snapshot in (step.before, step.after))
        change = f"mean log π {old:8.5f} → {new:8.5f}  ({new - old:+.5f})"
        say(f"   game {number + 1}   Â = {game.advantage:+.4f}   {change}")
    say("\nA training step does this for more questions and takes several optimiser steps: [train.train].")
