"""Train an agent to question an environment: `python train.py`, or `torchrun --nproc-per-node N train.py …`.

One step of Prompt-R1 (paper, section 3), in the loop of `train`:

    play      G games of each question: the agent asks, the environment replies     rollout.play
    score     each game: first its format, then its answer                          reward.score_games
    compare   each game with the other games of its question                        grpo.compare_games
    update    the agent towards what its better games did                           grpo.grpo_loss
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.programs.installation import check_installation

    check_installation()
    from prompt_r1.programs.command_line import read_settings
    from prompt_r1.training.preflight import read_train_config

    settings = read_settings(read_train_config)

import torch

from prompt_r1.grpo import Loss, compare_games, grpo_loss
from prompt_r1.pair.agent import play_question
from prompt_r1.programs.command_line import run_program
from prompt_r1.reward import score_games
from prompt_r1.rollout import play_groups
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.batches import Batch, micro_batches_of, mini_batches_of
from prompt_r1.training.lifecycle import lifecycle
from prompt_r1.training.run import Run, launch
from prompt_r1.training.update import Reference, Update, limit_of
from prompt_r1.types import Question, Trajectory


def train(run: Run) -> None:
    """Train from the start, or from the newest checkpoint, to the last step; then test.

    Called by every rank. Each rank plays its own questions; only the update moves games between ranks.
    """
    config, ranks, rule = run.config, run.ranks, run.config.reward_rule
    loss_of = partial(grpo_loss, clip=config.clip, clip_high=config.clip_high, kl_coef=config.kl_coef)
    with lifecycle(run) as life:  # resumes, and tests at the end; saves when a signal or an error stops it
        for step in life.steps():
            questions = run.questions.of_rank(step, ranks)  # by their numbers in the step
            with run.log.phase("rollout"):
                trajectories_PG = run.wait_for(play_step(run, step, questions))
            rewards_PG = [score_games(group, rule=rule) for group in trajectories_PG]
            games_PG = compare_games(trajectories_PG, rewards_PG, numbers=list(questions))
            with run.log.phase("update"):
                tokens, token_mean = config.tokens_per_batch, config.loss == "token-mean"
                mini_batches = [
                    micro_batches_of(games, ranks, tokens_per_batch=tokens, token_mean=token_mean)
                    for games in mini_batches_of(games_PG, ranks, mini_batch=config.mini_batch)
                ]
                update = Update(run.policy, run.optimizer, ranks, gap_limit=limit_of(run.policy))
                learn(update, mini_batches, run.reference_logprobs, loss_of)
                run.refresh()  # play with the new weights
            life.finish_step(step, games_PG, update)


async def play_step(run: Run, step: int, questions: Mapping[int, Question]) -> list[list[Trajectory]]:
    """The games of this rank's questions of a step, which are given by their numbers in the step."""
    config, epoch = run.config, run.questions.epoch(step)
    # Seeds do not depend on the rank: any number of ranks plays the same games.
    seeds = [f"{config.seed}/{step}/{number}" for number in questions]
    play = partial(play_question, run.agent, run.environment, temperature=config.temperature, epoch=epoch)

    async def play_one(question: Question, *, seed: str, sample: int) -> Trajectory:
        game = await play(question, seed=seed, sample=sample)
        run.log.progress.update(1 / (len(questions) * config.group_size))
        return game

    return await play_groups(list(questions.values()), config.group_size, play_one, seeds=seeds)


def learn(
    update: Update, mini_batches: Sequence[list[Batch]], reference: Reference, loss_of: Callable[..., Loss]
) -> None:
    """One optimiser step on the loss of eq. 17 for each mini-batch; `update` collects the metrics.

    `loss_of` is `grpo_loss` with its settings. Called by every rank. FSDP forwards are collective: every rank
    has equally many micro-batches.
    """
    policy, cap = update.policy, update.importance_cap
    # π_old, the policy before the first of these steps. In float32 the engine's log-probabilities would do,
    # but their last bits depend on which games decoded together: no run over a network would repeat itself.
    with torch.no_grad():
        old_of = [[policy(batch.packed).logprobs for batch in batches] for batches in mini_batches[1:]]
    for number, batches in enumerate(mini_batches):
        for index, batch in enumerate(batches):
            scores = policy(batch.packed)
            # In the first mini-batch the weights have not moved yet: its own forward is the old one.
            old = old_of[number - 1][index] if number else scores.logprobs.detach()
            ref = reference(batch.packed)  # None if kl_coef is 0: then the KL to π_old is logged
            loss = loss_of(scores.logprobs, old, old if ref is None else ref, batch, importance_cap=cap)
            loss.total.backward()
            update.record(batch, scores, loss)
        update.take_step()


def main(config: TrainConfig) -> None:
    """Train, or only estimate the cost (--dry-run)."""
    launch(config, train)


if __name__ == "__main__":
    run_program(main, settings, then="resumes from the last checkpoint")
