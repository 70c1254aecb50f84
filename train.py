"""Train an agent to question an environment: `python train.py`, or `torchrun --nproc-per-node N train.py …`.

One step of Prompt-R1 (paper, section 3), in the loop of `train`:

    play      G games of each question: the agent asks, the environment replies     rollout.play
    score     each game: first its format, then its answer                          reward.score
    compare   each game with the other games of its question                        grpo.group_advantages
    update    the agent towards what its better games did                           grpo.grpo_loss
"""

from collections.abc import Sequence

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.cli.installation import check_installation

    check_installation()
    from prompt_r1.cli.command_line import check_usage
    from prompt_r1.cli.preflight import check_train

    check_usage(check_train)

from prompt_r1.cli.command_line import run_program
from prompt_r1.grpo import compare_games, grpo_loss
from prompt_r1.playing import PlaySettings, play_question
from prompt_r1.reward import score_games
from prompt_r1.rollout import play_groups
from prompt_r1.training.batches import Batch, mini_batches_of
from prompt_r1.training.launch import launch
from prompt_r1.training.lifecycle import lifecycle
from prompt_r1.training.parts import load_parts
from prompt_r1.training.run import Run
from prompt_r1.training.update import Reference, Update
from prompt_r1.types import Question, Trajectory


def train(run: Run) -> None:
    """Train from the start, or from the newest checkpoint, to the last step; then test.

    Called by every rank. Each rank plays its own questions; only the update moves games between ranks.
    """
    config, ranks, parts = run.config, run.ranks, load_parts(run)
    how = PlaySettings(temperature=config.temperature)
    rule = config.reward_rule

    async def play_step(step: int) -> list[list[Trajectory]]:
        # By its number in the step, each question of this rank.
        mine, epoch = parts.questions.of_rank(step, ranks), parts.questions.epoch(step)
        # Seeds do not depend on the rank: any number of ranks plays the same games.
        seeds = [f"{config.seed}/{step}/{number}" for number in mine]

        async def play_one(question: Question, seed: str, sample: int) -> Trajectory:
            return await play_question(
                parts.models.agent, parts.environment, question, how, seed=seed, sample=sample, epoch=epoch
            )

        counted = run.console.counted(play_one, len(mine) * config.group_size)
        return await play_groups(list(mine.values()), config.group_size, counted, seeds=seeds)

    with lifecycle(run, parts) as life:  # resumes; saves when a signal or an error stops it
        for step in life.steps():
            with run.clock.phase("rollout"):
                trajectories_PG = run.wait_for(play_step(step))
            rewards_PG = [score_games(group, rule=rule) for group in trajectories_PG]
            games_PG = compare_games(
                trajectories_PG,
                rewards_PG,
                numbers=list(parts.questions.of_rank(step, ranks)),
                use_std=config.advantages == "group",
            )
            with run.clock.phase("update"):
                mini_batches = mini_batches_of(
                    games_PG,
                    ranks,
                    games=config.questions * config.group_size,
                    mini_batch=config.mini_batch,
                    drop_even=config.drop_even_groups,
                )
                metrics = learn(
                    parts.update,
                    parts.update.prepare(mini_batches),
                    parts.models.reference_logprobs,
                    clip=config.clip,
                    clip_high=config.clip_high,
                    kl_coef=config.kl_coef,
                )
                parts.models.refresh()  # play with the new weights
            life.finish_step(step, games_PG, metrics)
        life.test()


def learn(
    update: Update,
    mini_batches: Sequence[Sequence[Batch]],
    reference: Reference,
    *,
    clip: float,
    clip_high: float,
    kl_coef: float,
) -> dict[str, float]:
    """One optimiser step on the loss of eq. 17 for each mini-batch; the metrics of the steps.

    Called by every rank. FSDP forwards are collective: every rank has equally many micro-batches.
    """
    settings = {
        "clip": clip,
        "clip_high": clip_high,
        "kl_coef": kl_coef,
        "importance_cap": update.importance_cap,
    }
    for micro_batches in mini_batches:
        for batch in micro_batches:
            ref = reference(batch.packed)  # log-probabilities (N,) of the frozen reference
            scores = update.policy(batch.packed)
            # In the first mini-batch the weights have not moved yet: its own forward is the old one.
            old = scores.logprobs.detach() if batch.old is None else batch.old
            # Without a reference (kl_coef is 0), the KL to the old policy is logged.
            loss = grpo_loss(scores.logprobs, old, old if ref is None else ref, batch, **settings)
            loss.total.backward()
            update.record(batch, scores, loss)
        update.take_step()
    return update.metrics()


def main(arguments: list[str]) -> None:
    """Train from a command line, or only estimate its cost (--dry-run)."""
    launch(arguments, train)


if __name__ == "__main__":
    run_program(main)
