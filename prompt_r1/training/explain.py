"""`train.py --explain`: one question through the whole algorithm, slowly.

Nothing is computed here for show: each number is what the named function returned.
"""

from collections.abc import Callable
from itertools import groupby
from statistics import mean, stdev
from textwrap import fill

import torch

from prompt_r1.agent.engine import Engine
from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import TrainConfig
from prompt_r1.distributed.ranks import start_ranks
from prompt_r1.grpo import group_advantages, grpo_loss
from prompt_r1.protocol import Codec, parse, text_of
from prompt_r1.reward import RULES, score
from prompt_r1.rollout import play
from prompt_r1.terminal import printable
from prompt_r1.training.batch import collate
from prompt_r1.training.explain_step import Look, Step, make_lesson
from prompt_r1.types import Reward, ScoredGame, Trajectory

WIDTH = 96
SHOWN_TOKENS = 9

Say = Callable[[str], None]


def explain(config: TrainConfig, say: Say) -> None:
    """Tell one lesson, part by part, and which function computed it."""
    lesson = make_lesson(config, start_ranks(config.device, config.parallel))
    config, samples = lesson.config, lesson.samples
    say("One question of Prompt-R1, slowly. Each number is what a function in [brackets] returned.")
    say(f"Agent {lesson.agent}, environment {config.env}, seed {config.seed}.")
    totals = [(_reward(sample).total, len(sample.trajectory.turns)) for sample in samples]
    best = totals.index(max(totals))
    game = samples[best].trajectory
    _tell_opening(game, lesson.codec, say)
    _tell_game(best, game, lesson.codec, config, say)
    _tell_rewards(samples, config, say)
    _tell_advantages(samples, say)
    _tell_loss(lesson.step, best, lesson.codec, config, say)
    _tell_step(lesson.step, samples, config, say)


def _reward(sample: ScoredGame) -> Reward:
    assert sample.reward is not None, "a lesson has no broken games"
    return sample.reward


def _heading(number: int, title: str, where: str, *functions: Callable[..., object]) -> str:
    names = ", ".join(f"{f.__module__.removeprefix('prompt_r1.')}.{f.__qualname__}" for f in functions)
    return f"\n{number}. {title} ({where})\n   [{names}]"


def _block(label: str, text: str) -> str:
    """`label`, then text that is safe on a terminal, wrapped under itself."""
    text = printable(text).replace("\n", "⏎")
    return fill(text, WIDTH, initial_indent=f"   {label:13}", subsequent_indent=" " * 16)


def _tell_opening(game: Trajectory, codec: Codec, say: Say) -> None:
    say(_heading(1, "The opening", "H_0 is empty", Codec.opening))
    opening = game.tokens[: game.opening]
    say(_block("text", text_of(codec.tokenizer, opening)))
    say(_block("tokens", f"{len(opening)}: {' '.join(map(str, opening[:12]))} … none of them is trained on"))


def _tell_game(number: int, game: Trajectory, codec: Codec, config: TrainConfig, say: Say) -> None:
    say(_heading(2, f"Game {number + 1} of {config.group_size}", "eqs 1-11", play, Engine.generate, parse))
    parts = [
        (own, list(part)) for own, part in groupby(range(len(game.tokens)), key=game.sampled.__getitem__)
    ]
    spoken = [columns for own, columns in parts if own]
    for turn, columns in zip(game.turns, spoken, strict=True):
        nats = sum(game.logprobs[column] for column in columns)
        say(_block("agent", f"samples {len(columns)} tokens, log π = {nats:.3f}"))
        say(_block("", turn.text))
        action = parse(turn.text)
        blocks = {"think": action.think, "prompt": action.prompt, "answer": action.answer}
        seen = [f"{name} {text!r}" for name, text in blocks.items() if text is not None]
        say(_block("parsed", ", ".join([*seen, "clean" if action.clean else "not clean"])))
        if turn.reply is not None:
            say(_block("environment", turn.reply))
    say(_block("end", f"{game.stop}; the gold answer is {' or '.join(map(repr, game.question.answers))}"))
    lengths = " | ".join(f"{'agent' if own else 'context'} {len(columns)}" for own, columns in parts)
    say(_block("mask", f"{lengths}: {sum(game.sampled)} of {len(game.tokens)} tokens are trained on"))


def _tell_rewards(samples: list[ScoredGame], config: TrainConfig, say: Say) -> None:
    rule = RULES[config.rule]
    say(_heading(3, f"Rewards, rule {config.rule}", "eqs 12-15", score))
    say(f"   α = {rule.alpha}, β = {rule.beta}, γ = {rule.gamma}, δ = {rule.delta}, ε = {rule.epsilon}; "
        "R = -ε + R_fmt, and + R_ans once R_fmt = ε")  # fmt: skip
    say("   game  turns   α Σ M_t   β A_p   γ A_n   δ C_f   R_fmt   gate     R_ans       R   answer")
    for number, sample in enumerate(samples, start=1):
        reward = _reward(sample)
        terms = reward.terms
        gate = "open" if reward.gate_is_open else "shut"
        answer = printable(sample.trajectory.answer or "–")
        parts = "   ".join(f"{part:5.2f}" for part in (terms.parsed, terms.filled, terms.complete))
        line = (
            f"   {number:4}  {len(sample.trajectory.turns):5}   {terms.interactions:7.2f}   {parts}   "
            f"{reward.format:5.2f}   {gate}   {reward.answer:7.3f}  {reward.total:6.3f}   {answer}"
        )
        say(line[:WIDTH])


def _tell_advantages(samples: list[ScoredGame], say: Say) -> None:
    totals = [_reward(sample).total for sample in samples]
    say(_heading(4, "Advantages: each game against its siblings", "eq. 16", group_advantages))
    say(f"   mean = {mean(totals):.4f}, std (n - 1) = {stdev(totals):.4f}; Â = (R - mean) / (std + 1e-6)")
    say("   " + "   ".join(f"Â{number} = {s.advantage:+.4f}" for number, s in enumerate(samples, start=1)))


def _tell_loss(step: Step, best: int, codec: Codec, config: TrainConfig, say: Say) -> None:
    say(_heading(5, "The loss", "eq. 17", collate, Policy.forward, grpo_loss))
    say(f"   L = Σ w [-min(r Â, clip(r, 1 - {config.clip}, 1 + {config.clip}) Â) + {config.kl_coef} KL], "
        "w = 1 / (M |u|)")  # fmt: skip
    say("   Before the step the weights are those that sampled: r = 1 but for rounding. KL is to the start.")
    _tell_tokens(step.before, best, codec, say)
    _tell_games(step.before, say)


def _tell_tokens(look: Look, best: int, codec: Codec, say: Say) -> None:
    batch, logprobs = look.batches[best], look.logprobs[best].tolist()
    old, ref = batch.old, batch.ref
    assert old is not None and ref is not None
    say(f"   The first tokens of game {best + 1}:")
    say("   token            log π_old    log π_θ    log π_ref          r         KL          w")
    rows = zip(batch.packed.targets.tolist(), old.tolist(), logprobs,
               ref.tolist(), look.losses[best].kl.tolist(), batch.weights.tolist(),
               strict=True)  # fmt: skip
    for token, old, new, reference, kl, weight in list(rows)[:SHOWN_TOKENS]:
        ratio = torch.tensor(new - old).exp().item()
        text = repr(printable(text_of(codec.tokenizer, [token])))[:14]
        probabilities = f"{old:10.4f} {new:10.4f}   {reference:10.4f}"
        say(f"   {text:14}  {probabilities} {ratio:10.5f} {kl:10.5f} {weight:10.5f}")


def _tell_games(look: Look, say: Say) -> None:
    say("   game  tokens        Â       loss        KL   clipped")
    for number, (batch, loss) in enumerate(zip(look.batches, look.losses, strict=True), start=1):
        count, advantage = len(batch.weights), batch.advantages[0].item()
        share = batch.weights.sum().item()  # 1 / M: over it, sums are means over the game's tokens
        loss_part, kl, clipped = (loss.metrics[name].item() for name in ("loss", "kl", "clip_frac"))
        means = f"{kl / share:8.5f}  {clipped / share:8.3f}"
        say(f"   {number:4}  {count:6}  {advantage:+7.4f}  {loss_part:+9.5f}  {means}")
    total = sum(loss.metrics["loss"].item() for loss in look.losses)
    say(f"   {'sum':>4}  {'':6}  {'':7}  {total:+9.5f}")


def _tell_step(step: Step, samples: list[ScoredGame], config: TrainConfig, say: Say) -> None:
    say(_heading(6, "One optimiser step", f"AdamW, lr {config.lr}", torch.optim.AdamW, grpo_loss))
    say(f"   gradient norm {step.grad_norm:.4f}, clipped at {config.grad_clip}. The same games, new weights:")
    _tell_games(step.after, say)
    say("   What the step did to the probability of each game's own words, in nats a token:")
    for number, sample in enumerate(samples):
        old, new = (look.logprobs[number].mean().item() for look in (step.before, step.after))
        change = f"mean log π {old:8.5f} → {new:8.5f}  ({new - old:+.5f})"
        say(f"   game {number + 1}   Â = {sample.advantage:+.4f}   {change}")
    say("\nA training step is this with more questions, and more than one optimiser step: "
        "[train.train].")  # fmt: skip
