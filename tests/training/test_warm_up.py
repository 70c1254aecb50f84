"""The micro-batch that is computed before the first game on a GPU."""

from types import SimpleNamespace

import torch

from prompt_r1.training.lifecycle import warm_up
from tests.support import tiny


def test_a_warm_up_leaves_weights_gradients_and_optimiser_as_they_were():
    policy, reference = tiny.policy(), tiny.policy()
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.1)
    run = SimpleNamespace(
        policy=policy, optimizer=optimizer, reference_logprobs=lambda packed: reference(packed).logprobs
    )
    warm_up(run, game_tokens=20, tokens=100)
    for name, weight in policy.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None, name
    assert not optimizer.state
