"""Train an agent to question an environment: `python train.py`, or `torchrun --nproc-per-node N train.py …`.

One step of Prompt-R1 (paper, section 3), in the loop of `train`:

    play       G games of each question: the agent asks, the environment replies     play_step
    score      each game: first its format, then its answer                          score_games
    compare    each game with the other games of its question (eq. 16)               compare_games
    learn      from the agent's own tokens: forward, loss (eq. 17), backward, step   grpo_loss, optimizer_step
    write down games, metrics, validation, the best agent, a checkpoint              record.write_down

A user may replace the paper's reward, advantages and loss by functions of their own: `run.own_reward`,
`run.own_advantages` and `run.loss_function`. Training runs in one or several processes, the *ranks*. Every
rank runs this loop, and plays its own questions. In the update, the ranks exchange games and gradients. When
the step is written down, they add up their metrics.
"""

from collections.abc import Mapping, Sequence

if __name__ == "__main__":  # Show --help and usage errors before the imports below, which take seconds.
    from prompt_r1.programs.installation import check_installation

    check_installation()
    from prompt_r1.programs.command_line import begin_imports, read_settings
    from prompt_r1.training.preflight import read_training

    chosen = read_settings(read_training)
    begin_imports()

import torch
from torch import Tensor

from prompt_r1.errors import Resumable
from prompt_r1.evaluation.after_training import compare_on_test
from prompt_r1.grpo import LossColumns, compare_games
from prompt_r1.model.policy import Policy
from prompt_r1.pair.agent import Sampling, play_question
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.launcher import is_first_rank
from prompt_r1.programs.text import printable
from prompt_r1.reward import score_games
from prompt_r1.rollout import play_groups
from prompt_r1.training.batches import Batch
from prompt_r1.training.dry_run import estimate
from prompt_r1.training.preflight import ChosenTraining, warnings_of
from prompt_r1.training.record import Record
from prompt_r1.training.resume import resume_run
from prompt_r1.training.run import Run
from prompt_r1.training.start import start_run
from prompt_r1.training.update import UpdateStats, check_gap, optimizer_step
from prompt_r1.types import Question, Trajectory


def train(run: Run, record: Record) -> None:
    """Train all steps that are not trained yet. Called by every rank.

    `record` knows which steps remain, writes down what they measured, and saves the run.
    """
    config, ranks, policy = run.config, run.ranks, run.policy
    for step in record.remaining_steps():
        # A function of the user, such as their reward, may fail on one rank only. If so, all ranks raise its
        # error, and the run is saved before it ends. The user's loss is called below, outside of this block.
        # If it fails, the run is not saved, because the weights may be between two optimiser steps.
        with record.checkpoint_on_user_error(), ranks.shared_errors():
            # Play. This rank has P of the step's questions, and plays G games of each. `questions` has them
            # by their numbers in the step. `trajectories_PG` has P groups, each with G trajectories.
            questions = run.questions.of_rank(step, ranks)
            trajectories_PG = play_step(run, step, questions)

            # Score. A game that ended with a failed call has no reward.
            rewards_PG = [
                score_games(group, rule=config.base_rule, own=run.own_reward) for group in trajectories_PG
            ]

            # Compare. The advantage of a game is its distance from the other games of its question.
            games_PG = compare_games(
                trajectories_PG,
                rewards_PG,
                numbers=list(questions),  # the numbers of this rank's questions
                standardise=config.advantage == "standardised",
                own=run.own_advantages,
            )

        # Learn. Each mini-batch is one optimiser step. Its games are divided into micro-batches, which fit in
        # memory. A signal (Ctrl-C, SIGTERM) does not interrupt the update.
        # If no game enters the loss, for example because calls failed in every group, there is no mini-batch,
        # and the weights stay as they are. After three such steps in a row, `write_down` ends the run.
        with run.log.phase("update"):
            stats = UpdateStats()
            mini_batches = run.mini_batches(games_PG)
            # π_old is the policy that played. For later mini-batches, measure it before the weights move.
            old_logprobs = [measure_old(policy, micro_batches) for micro_batches in mini_batches[1:]]
            for mini_number, micro_batches in enumerate(mini_batches):
                # With FSDP, all ranks compute each forward together. So they have equally many micro-batches.
                for micro_number, batch in enumerate(micro_batches):
                    output = policy(batch.packed)
                    # In the first mini-batch the weights have not moved: its own forward is π_old.
                    # `old_logprobs` begins with the second mini-batch.
                    if mini_number == 0:
                        old = output.logprobs.detach()
                    else:
                        old = old_logprobs[mini_number - 1][micro_number]
                    columns = LossColumns(
                        old=old,
                        # The reference is a frozen copy of the agent before training. With kl_coef 0 there is
                        # none, and `grpo_loss` measures the KL to π_old.
                        reference=run.reference_logprobs(batch.packed),
                        engine=batch.engine,
                        advantages=batch.advantages,
                        weights=batch.weights,
                        game=batch.game,
                    )
                    loss = run.loss_function(output.logprobs, columns)
                    loss.total.backward()
                    stats.add(columns, output, loss)
                if mini_number == 0:
                    # Engine and policy must give the tokens of the games the same log-probabilities.
                    # Otherwise, the engine did not play with the policy's weights.
                    check_gap(policy, ranks, stats, run.gap_limit)
                optimizer_step(policy, run.optimizer, ranks, stats)
            run.refresh()  # play the next games with the new weights

        # Write down games, metrics, validation, the best agent and a checkpoint. If a signal came, stop here.
        record.write_down(step, games_PG, stats)


@torch.no_grad()
def measure_old(policy: Policy, micro_batches: Sequence[Batch]) -> list[Tensor]:
    """Measure log π_old (N,) of the N agent tokens of each micro-batch. Called by every rank.

    Why not the engine's log-probabilities? In float32 they are almost the same, but their last bits depend on
    which games decoded at the same time. This differs from run to run if replies come over a network, so no
    run could be repeated exactly.
    """
    return [policy(batch.packed).logprobs for batch in micro_batches]


def play_step(run: Run, step: int, questions: Mapping[int, Question]) -> list[list[Trajectory]]:
    """Play G games of each of this rank's questions, all concurrently: P × G trajectories.

    `questions` has the questions by their numbers in the step. The seeds of the games follow from these
    numbers, so the games do not depend on the number of ranks. Called by every rank. Raises Resumable if a
    signal came, which cancels the games.
    """
    config = run.config

    async def play_one(question: Question, *, number: int, sample: int) -> Trajectory:
        game = await play_question(
            run.agent,
            run.environment,
            question,
            Sampling(seed=f"{config.seed}/{step}/{number}/{sample}", temperature=config.temperature),
            sample=sample,
            # An environment that samples gives a question new replies in each epoch.
            epoch=run.questions.epoch(step, number),
        )
        run.log.count_game()
        return game

    with run.log.phase("rollout"):
        return run.wait_for(play_groups(questions, config.group_size, play_one))


def main(chosen: ChosenTraining) -> None:
    """Train, or only estimate the cost (--dry-run)."""
    config = chosen.config
    if is_first_rank():
        for warning in warnings_of(config):
            print(printable(f"Note: {warning}"))
        if config.dry_run:
            print(estimate(config))
    if config.dry_run:
        return
    with start_run(chosen) as run:
        record = resume_run(run)  # The run begins at its newest checkpoint, or with step 0.
        run.interrupt.training_began = True  # From now on, a signal saves the run, and then ends it.
        try:
            # A new run begins with step 0, which only validates the untrained agent. If a run stopped between
            # an update and the end of its step, for example in the validation, the resumed run does the rest.
            record.finish_step()
            train(run, record)
            if run.questions.test:
                record.free_for_test()  # the memory of optimiser, reference and KV cache
                with record.checkpoint_on_user_error():
                    run.log.say("\n" + compare_on_test(run))
            record.say_results()
        except Resumable as error:  # A signal came, a limit was reached, or the environment fails.
            raise record.save_and_explain(error) from None


if __name__ == "__main__":
    run_program(main, chosen, then="resumes from the last checkpoint")
