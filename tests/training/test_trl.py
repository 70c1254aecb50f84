"""The loss and its gradients against TRL's GRPO trainer (slow: it takes seconds to import).

Where the definitions agree: clipped surrogate, k3 KL (TRL with `use_bias_correction_kl=False`), and

    TRL's loss_type    ours
    grpo               the sequence mean of eq. 17; TRL's needs equally many games in all batches
    dapo               the token mean
    dr_grpo            weights 1 / (games × max_completion_length), by `collate`'s weight function: no flag

Where they do not: TRL's default KL is multiplied by the ratio, its advantages divide by std + 1e-4 instead of
1e-6 (here both get the same), and `bnpo` averages over the tokens of a micro-batch, as the release does.
"""

import random
from functools import partial

import pytest
import torch

from benchmarks.update_rivals import padded, trl_backward, trl_trainer
from prompt_r1.agent.packing import pack
from prompt_r1.grpo import grpo_loss
from prompt_r1.training.batch import collate, sequence_mean_weight, token_mean_weight
from prompt_r1.types import ScoredGame
from tests import tiny
from tests.games import CPU, random_scored_games, record_logprobs_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # TRL's own
]
LONGEST = 64  # max_completion_length


def stale_samples(policy) -> list[ScoredGame]:
    """Six games of two questions, whose old log-probabilities are some steps old."""
    samples, rng = record_logprobs_of(policy, random_scored_games(6)), random.Random(0)
    for sample in samples:
        game = sample.trajectory
        game.logprobs = [
            lp + rng.uniform(-0.4, 0.4) * own for lp, own in zip(game.logprobs, game.sampled, strict=True)
        ]
    return samples


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_loss_and_gradient_equal_those_of_trl(loss_type, kl_coef):
    pytest.importorskip("trl")
    policy, reference, theirs = tiny.policy(), tiny.policy(seed=1), tiny.model()
    theirs.config._attn_implementation = "sdpa"  # TRL pads at the left, too
    samples = stale_samples(policy)
    tokens = sum(sum(sample.trajectory.sampled) for sample in samples)
    weight = {
        "grpo": partial(sequence_mean_weight, games=6),
        "dapo": partial(token_mean_weight, tokens=tokens),
        "dr_grpo": lambda _: 1 / (6 * LONGEST),
    }[loss_type]
    with torch.no_grad():
        references = [reference(pack([[sample.trajectory]], CPU)).logprobs for sample in samples]

    trainer = trl_trainer(
        theirs, rows=3, batches=2, loss_type=loss_type, kl_coef=kl_coef, max_completion_length=LONGEST
    )
    rows = [padded(samples[at : at + 3], references[at : at + 3]) for at in (0, 3)]
    for micro_batch in rows:
        micro_batch["num_items_in_batch"] = torch.tensor(tokens)
    loss_of_trl = trl_backward(trainer, rows)

    loss = 0.0
    for batch in collate(samples, weight, tokens_per_batch=70, device=CPU):
        with torch.no_grad():
            ref = reference(batch.packed).logprobs
        logprobs = policy(batch.packed).logprobs
        loss_of_batch = grpo_loss(
            logprobs, batch.engine, ref, batch.advantages, batch.weights, clip=0.2, kl_coef=kl_coef
        )
        part = loss_of_batch.total
        part.backward()
        loss += part.item()

    assert loss == pytest.approx(loss_of_trl, rel=1e-5)
    pairs = [(a.grad, b.grad) for a, b in zip(policy.parameters(), theirs.parameters(), strict=True)]
    error = sum((ours - trl).norm() ** 2 for ours, trl in pairs) ** 0.5
    assert error < 1e-5 * sum(trl.norm() ** 2 for _, trl in pairs) ** 0.5
