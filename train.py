"""Train an agent to question an environment: `python train.py`, or `torchrun --nproc-per-node N train.py …`.

One step of Prompt-R1 (paper, section 3), in the loop of `train`:

    play      G games of each question: the agent asks, the environment replies     rollout.play_groups
    score     each game: first its format, then its answer                          reward.score
    compare   each game with the other games of its question                        grpo.group_advantages
    update    the agent towards what its better games did                           grpo.grpo_loss
"""

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.cli.command_line import check_usage, train_config

    check_usage(train_config)

from functools import partial

import torch

from prompt_r1.agent.agent import Agent, check_question_lengths
from prompt_r1.cli.command_line import run_program
from prompt_r1.data.named import find_questions, sample_questions
from prompt_r1.data.sampler import QuestionSampler
from prompt_r1.distributed.ranks import assign_questions
from prompt_r1.environments.opening import Environments
from prompt_r1.grpo import group_advantages, grpo_loss, importance_weights
from prompt_r1.reward import Rule, score_games
from prompt_r1.rollout import play, play_groups
from prompt_r1.training.launch import launch
from prompt_r1.training.run import Run
from prompt_r1.training.update import Update, split
from prompt_r1.training.validation import compare_on_test, validate
from prompt_r1.training.weights import load_models
from prompt_r1.types import Question, ScoredGame, Trajectory


def train(run: Run) -> None:
    """Train from the start, or from the newest checkpoint, to the last step and the table at the end.

    Called by every rank. Each rank plays its own questions; only the update moves games between ranks.
    """
    config, ranks = run.config, run.ranks
    environment = Environments(config, seed=config.seed, folder=run.folder, ranks=ranks).open(config.env)
    run.wait_for(environment.check())
    models = load_models(config, ranks, run.folder)
    policy = models.policy  # learns; `models.agent` plays
    sampler = QuestionSampler(find_questions(config.data, "train", config.seed), seed=config.seed)
    validation = sample_questions(config.val_data, "validation", config.seed, config.val_limit)
    test = find_questions(config.test_data, "test", config.seed)
    check_question_lengths([*sampler.questions, *validation, *test], models.agent.codec, config.max_tokens)
    optimizer = torch.optim.AdamW(
        policy.trained_parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=ranks.device.type == "cuda",  # one kernel, no temporary tensors as large as the weights
    )
    update = Update(
        policy,
        models.reference,
        optimizer,
        ranks,
        grad_clip=config.grad_clip,
        token_mean=config.loss == "token-mean",
        tokens_per_batch=config.tokens_per_batch,
        importance_cap=config.importance_cap,
        ratio=config.ratio,
    )

    async def play_one(agent: Agent, question: Question, seed: str, sample: int) -> Trajectory:
        generate = partial(agent.generate, temperature=config.temperature)
        ask = environment.ask_in_game(seed, sample=sample, session=question.id, deadline=config.game_deadline)
        trajectory = await play(question, generate, ask, agent.codec, agent.game, seed=seed)
        trajectory.usd = ask.usd
        return trajectory

    async def play_step(step: int, agent: Agent) -> tuple[list[int], list[list[Trajectory]]]:
        questions = sampler.take(config.questions)
        mine = assign_questions([len(question.text) for question in questions], ranks.count)[ranks.rank]
        # Seeds do not depend on the rank: any number of ranks plays the same games.
        seeds = [f"{config.seed}/{step}/{number}" for number in mine]
        counted = run.counted(partial(play_one, agent), len(mine) * config.group_size)
        games = play_groups([questions[n] for n in mine], config.group_size, counted, seeds=seeds)
        return mine, await games

    validation_metrics = partial(validate, run, questions=validation, environment=environment)
    run.begin(models, update, sampler, environment, play_step, validation_metrics)
    with run.saved_on_stop():
        for step in run.steps():  # resumes, validates, saves, obeys signals and alarms
            mine, trajectories_PG = run.games_of(step)  # from play_step; --ahead 1: begun an update earlier
            games_PG = run.assign_credit(score_and_compare(trajectories_PG, config.reward_rule))
            with run.clock.phase("update"):
                mini_batches = split(
                    games_PG,
                    games=config.questions * config.group_size,
                    group_size=config.group_size,
                    mini_batch=config.games_per_update,
                    numbers=mine,
                    drop_even=config.drop_even_groups,
                )
                metrics = learn(update, mini_batches, clip=config.clip_range, kl_coef=config.kl_coef)
            run.finish_step(step, games_PG, metrics)
            with run.clock.phase("update"):
                models.refresh()  # play with the new weights
        if test:
            run.log.say("\n" + compare_on_test(run, models.start, test, environment))


def score_and_compare(trajectories_PG: list[list[Trajectory]], rule: Rule) -> list[list[ScoredGame]]:
    """Score each game once (eqs 12-15), and compare it with the other games of its question (eq. 16)."""
    rewards_PG = [score_games(group, rule=rule) for group in trajectories_PG]
    advantages_PG = group_advantages(
        [[reward.total if reward else None for reward in rewards] for rewards in rewards_PG]
    )
    columns_P = zip(trajectories_PG, rewards_PG, advantages_PG, strict=True)
    return [list(map(ScoredGame, *columns)) for columns in columns_P]


def learn(
    update: Update, mini_batches: list[list[ScoredGame]], *, clip: float | tuple[float, float], kl_coef: float
) -> dict[str, float]:
    """One optimiser step on the loss of eq. 17 for each mini-batch; the metrics of the steps.

    Called by every rank with the games that it played. FSDP forwards are collective, so `prepare` gives every
    rank equally many micro-batches, of about equal size.
    """
    for micro_batches in update.prepare(mini_batches):
        for batch in micro_batches:
            scores = update.policy(batch.packed)
            # In the first mini-batch the weights have not moved yet: its own forward is the old one.
            old = scores.logprobs.detach() if batch.old is None else batch.old
            # Without a reference, the KL is to the policy that sampled.
            ref = old if batch.ref is None else batch.ref
            loss = grpo_loss(
                scores.logprobs,
                old,
                ref,
                batch.advantages,
                batch.weights,
                clip=clip,
                kl_coef=kl_coef,
                importance=importance_weights(old, batch.engine, cap=update.importance_cap),
                ratio_of=partial(update.ratio, batch.games),
            )
            loss.total.backward()
            update.record(batch, scores, loss)
        update.take_step()
    return update.metrics()


def main(arguments: list[str]) -> None:
    """Train from a command line, or only estimate (--dry-run) or explain (--explain)."""
    launch(arguments, train)


if __name__ == "__main__":
    run_program(main)
