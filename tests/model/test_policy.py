"""Log-probabilities of packed games against log_softmax over the logits of each game on its own."""

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from prompt_r1.model import policy as policy_module
from prompt_r1.model.attention import causal_mask
from prompt_r1.model.packing import Packed, pack
from prompt_r1.model.policy import Policy
from prompt_r1.types import Trajectory
from tests.support import tiny
from tests.support.games import CPU, naive_logprobs, play_with, siblings
from tests.support.operations import RecordedOperations


def some_groups() -> list[list[Trajectory]]:
    """Five games of one question, a single game of another, two of a third."""
    return [siblings(0, 5), siblings(1, 1), siblings(2, 2)]


def some_batch() -> Packed:
    return pack(some_groups(), CPU)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_logprobs_and_gradients_of_packed_games_equal_those_of_each_game_alone(monkeypatch, tied, rows):
    """Openings are computed once and logits in chunks; the oracle is log_softmax over all logits of each game
    on its own, in float64.
    """
    monkeypatch.setitem(policy_module.CHUNK_TOKENS, "cpu", rows)
    packed = some_batch()
    weights = torch.rand(len(packed.targets), generator=torch.Generator().manual_seed(1))
    model, twin = tiny.model(tied=tied).double(), tiny.model(tied=tied).double()

    scores = Policy(model, compute_dtype=torch.float64, temperature=0.8)(packed)
    (scores.logprobs * weights).sum().backward()
    expected = torch.cat([naive_logprobs(twin, game, 0.8) for group in some_groups() for game in group])
    (expected * weights).sum().backward()

    assert torch.allclose(scores.logprobs, expected.float(), atol=1e-5)
    for (name, got), (_, want) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert (got.grad - want.grad).norm() <= 1e-6 * want.grad.norm(), name


def test_the_masks_of_a_packed_row_are_freed_with_the_graph_of_its_forward(monkeypatch):
    """A bug would only cost memory: masks that live as long as the batch are kept during the whole update."""
    masks: list[weakref.ref[torch.Tensor]] = []

    def noted_mask(*shape):
        mask = causal_mask(*shape)
        masks.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr("prompt_r1.model.packing.causal_mask", noted_mask)
    policy, packed = tiny.policy(), some_batch()
    for _ in range(2):
        scores = policy(packed)
        scores.logprobs.sum().backward()
        del scores
    assert masks and all(mask() is None for mask in masks)
    with torch.no_grad():
        policy(packed)
    assert all(mask() is None for mask in masks)


def test_the_layers_of_a_forward_share_their_masks(monkeypatch):
    """A bug would only cost memory and time: of 36 layers, each would keep its own masks for backward."""
    shapes: list[tuple[object, ...]] = []

    def noted_mask(*shape):
        shapes.append(shape)
        return causal_mask(*shape)

    monkeypatch.setattr("prompt_r1.model.packing.causal_mask", noted_mask)
    tiny.policy(layers=3)(some_batch())
    assert shapes and len(set(shapes)) == len(shapes)


def test_with_checkpointing_autograd_keeps_nothing_from_within_a_layer():
    """A bug would only cost memory. No saved tensor has the width of the MLP, except its weights."""
    policy = tiny.policy()
    width = policy.model.config.intermediate_size
    kept: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    def of_mlps() -> list[torch.Size]:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            policy(some_batch())
        return [shape for shape in kept if shape[-1:] == (width,) and shape[0] == 1]

    assert of_mlps()
    policy.checkpoint_activations()
    assert kept and not of_mlps()


def padded_policy() -> Policy:
    """A model whose head has 40 rows more than its tokenizer has tokens, all of them very likely."""
    model, extra = tiny.model(tied=False), 40
    model.resize_token_embeddings(len(tiny.tokenizer()) + extra, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[-extra:] = 2 * model.get_output_embeddings().weight[:extra]
    return Policy(model, compute_dtype=torch.float32, vocabulary=len(tiny.tokenizer()))


def test_rows_of_the_head_beyond_the_tokenizer_are_neither_sampled_nor_scored():
    """A bug: 18 of 40 games of a padded model held ids that stand for no token, and their texts lacked words.

    Masked in only one of the two places, the engine and the policy would disagree.
    """
    policy, known = padded_policy(), len(tiny.tokenizer())
    engine = tiny.engine(policy, max_tokens=128, kv_tokens=2000)
    openings = [tiny.random_tokens(20, seed=number) for number in range(10)]
    games = play_with(engine, openings, max_new=20, temperature=1.0)
    assert all(token < known for game in games for token in game.tokens)
    with torch.no_grad():
        scored = policy(pack([[game] for game in games], CPU)).logprobs
        expected = torch.cat([short_logprobs(policy, game) for game in games])
    recorded = [x for game in games for x, own in zip(game.logprobs, game.sampled, strict=True) if own]
    assert torch.allclose(scored, torch.tensor(recorded), atol=1e-4)
    assert torch.allclose(scored, expected.float(), atol=1e-4)


def short_logprobs(policy: Policy, game: Trajectory) -> torch.Tensor:
    """The log-probabilities of the agent's tokens under a softmax over the tokens of the tokenizer."""
    tokens = torch.tensor(game.tokens)
    logits = tiny.logits_of(policy.model, tokens[None])[0, :-1, : policy.vocabulary]
    log_p = logits.double().log_softmax(-1).gather(1, tokens[1:, None])
    return log_p[torch.tensor(game.sampled[1:]), 0]


def test_rows_of_the_head_beyond_the_tokenizer_get_no_gradient():
    policy, known = padded_policy(), len(tiny.tokenizer())
    policy(some_batch()).logprobs.sum().backward()
    gradient = policy.model.get_output_embeddings().weight.grad
    assert gradient[:known].norm() > 0 and not gradient[known:].any()


def test_entropy_is_the_entropy_of_the_next_token_distribution():
    policy, (game,) = tiny.policy(), siblings(3, 1)
    with torch.no_grad():
        logits = tiny.logits_of(policy.model, game.tokens)[0, :-1]
    expected = torch.distributions.Categorical(logits=logits[torch.tensor(game.sampled[1:])]).entropy()
    assert torch.allclose(policy(pack([[game]], CPU)).entropy, expected, atol=1e-4)


def test_autograd_keeps_no_logits(monkeypatch):
    """No saved tensor has the vocabulary's width, except the weights of the head."""
    monkeypatch.setitem(policy_module.CHUNK_TOKENS, "cpu", 4)
    policy = tiny.policy()
    shapes: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy(some_batch()).logprobs.sum().backward()
    vocabulary = policy.model.config.vocab_size
    assert not [shape for shape in shapes if shape[-1:] == (vocabulary,) and shape[0] != vocabulary]


def test_weights_and_gradients_stay_in_float32_with_bfloat16_products():
    policy = Policy(tiny.model(), compute_dtype=torch.bfloat16)
    scores = policy(some_batch())
    scores.logprobs.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters())
    exact = tiny.policy()(some_batch()).logprobs
    assert (scores.logprobs - exact).abs().mean() < 0.1


def test_every_layer_computes_its_products_in_the_compute_dtype():
    for compute in (torch.bfloat16, torch.float32):
        policy = Policy(tiny.model(), compute_dtype=compute)
        dtypes: set[torch.dtype] = set()
        for module in policy.model.base_model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda *call, dtypes=dtypes: dtypes.add(call[-1].dtype))
        policy(some_batch())
        assert dtypes == {compute}


def test_the_gradient_of_the_head_is_summed_over_chunks_in_float32(monkeypatch):
    """A sum of a thousand equal terms: in bfloat16 it stops growing when a term is too small to change it."""
    monkeypatch.setitem(policy_module.CHUNK_TOKENS, "cpu", 1)
    count = 1000
    hidden = torch.ones(count, 1, dtype=torch.bfloat16)
    targets = torch.zeros(count, dtype=torch.long)
    for weights in (torch.bfloat16, torch.float32):
        head = torch.zeros(2, 1, dtype=weights, requires_grad=True)
        logprobs, _ = policy_module._ChunkedLogprobs.apply(hidden, head, targets, 1.0, 2)
        logprobs.sum().backward()
        # Both tokens are equally likely: each term is 1 - 1/2 for the target and -1/2 for the other token.
        assert head.grad.dtype == weights
        assert head.grad[:, 0].tolist() == pytest.approx([count / 2, -count / 2], rel=1e-2)


SCALES = [1.0, 0.7]


def head_and_states() -> tuple[torch.Tensor, torch.Tensor]:
    """The head (50, 16) of a model and hidden states (9, 16) in bfloat16, with logits of up to 20."""
    generator = torch.Generator().manual_seed(0)
    head, hidden = torch.randn(50, 16, generator=generator), 2 * torch.randn(9, 16, generator=generator)
    return head.bfloat16(), hidden.bfloat16()


@pytest.mark.parametrize("scale", SCALES)
def test_logits_of_16_bit_weights_have_the_precision_of_float32(scale):
    """A bug: logits were rounded to bfloat16 before they became float32, and were up to 0.06 off."""
    policy = Policy(tiny.model().bfloat16(), compute_dtype=torch.bfloat16)
    policy.logit_scale = scale
    head = policy.model.get_output_embeddings().weight
    hidden = 4 * torch.randn(9, head.shape[1], generator=torch.Generator().manual_seed(0))
    logits = policy.logits(hidden.bfloat16())
    expected = scale * hidden.bfloat16().double() @ head.double().T
    assert logits.dtype == torch.float32 and expected.abs().max() > 10
    assert torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", SCALES)
def test_tokens_are_scored_under_the_distribution_that_sampled_them(scale, compute):
    """The engine divides the logits, not the hidden states, by the temperature."""
    policy, packed = Policy(tiny.model().to(compute), compute_dtype=compute, temperature=0.7), some_batch()
    policy.logit_scale = scale
    with torch.no_grad():
        hidden = policy.hidden_states(packed)
    log_p = (policy.logits(hidden[packed.sources]) / 0.7).log_softmax(-1)
    expected = log_p.gather(1, packed.targets[:, None])[:, 0]
    assert torch.allclose(policy(packed).logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("rows", [4, 1024])
@pytest.mark.parametrize("scale", SCALES)
def test_16_bit_logprobs_and_gradients_equal_float64_up_to_one_rounding(monkeypatch, scale, rows):
    """The oracle is autograd through log_softmax in float64, on the same rounded states and weights."""
    monkeypatch.setitem(policy_module.CHUNK_TOKENS, "cpu", rows)
    head, hidden = (tensor.requires_grad_() for tensor in head_and_states())
    targets, upstream = torch.arange(9) % 50, torch.linspace(-1, 2, 9)
    logprobs, entropy = policy_module._ChunkedLogprobs.apply(hidden, head, targets, scale, 50)
    (logprobs * upstream).sum().backward()

    exact_hidden, exact_head = (t.detach().double().requires_grad_() for t in (hidden, head))
    log_p = (scale * exact_hidden @ exact_head.T).log_softmax(-1)
    chosen = log_p.gather(1, targets[:, None])[:, 0]
    (chosen * upstream).sum().backward()

    assert torch.allclose(logprobs.double(), chosen, atol=1e-5)
    assert torch.allclose(entropy.double(), -(log_p.exp() * log_p).sum(1), atol=1e-5)
    for got, want in ((hidden.grad, exact_hidden.grad), (head.grad, exact_head.grad)):
        assert (got.double() - want).norm() < 2**-7 * want.norm()


def test_on_a_gpu_one_product_writes_the_float32_logits():
    """Traced with fake tensors. It neither allocates 16-bit logits nor converts the head."""
    with FakeTensorMode():
        hidden = torch.empty(9, 16, dtype=torch.bfloat16, device="cuda")
        head = torch.empty(50, 16, dtype=torch.bfloat16, device="cuda")
        with RecordedOperations() as recorded:
            policy_module._logits(hidden, head, 1.0)
    operations = [name for name in recorded.names if name.startswith("aten.")]
    assert operations == ["aten.permute.default", "aten.mm.dtype"]


def test_of_the_gathered_weights_one_is_in_memory_at_a_time(monkeypatch):
    """A bug would only cost memory: beside the copy that plays, a second full copy of a sharded model."""
    gathered: list[weakref.ref[torch.Tensor]] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        assert all(weight() is None for weight in gathered)
        full = tensor.clone()
        gathered.append(weakref.ref(full))
        return full

    player, learner = tiny.policy(), Policy(tiny.model(seed=9), compute_dtype=torch.float32)
    monkeypatch.setattr(policy_module, "full_tensor", gather)
    player.copy_weights_from(learner)
    assert len(gathered) == len(list(learner.parameters()))
    assert all(torch.equal(*pair) for pair in zip(player.parameters(), learner.parameters(), strict=True))


def test_the_slopes_of_one_chunk_are_in_memory_at_a_time(monkeypatch):
    """A bug would only cost memory: the slopes of two chunks are twice as large as the logits of one."""
    monkeypatch.setitem(policy_module.CHUNK_TOKENS, "cpu", 4)
    slope = policy_module._slope
    slopes: list[weakref.ref[torch.Tensor]] = []

    def noted_slope(*inputs) -> torch.Tensor:
        assert all(earlier() is None for earlier in slopes)
        found = slope(*inputs)
        slopes.append(weakref.ref(found))
        return found

    monkeypatch.setattr(policy_module, "_slope", noted_slope)
    tiny.policy()(some_batch()).logprobs.sum().backward()
    assert len(slopes) > 2


def test_the_gradient_of_a_float32_head_writes_no_second_matrix_for_a_chunk():
    """A bug would only cost memory and time: the product of each chunk is as large as the head."""
    total, left, right = torch.zeros(50, 16), torch.ones(50, 4), torch.ones(4, 16)
    with RecordedOperations() as recorded:
        policy_module._subtract_product(total, left, right)
    assert recorded.names == ["aten.addmm_.default"]
    assert torch.equal(total, torch.full((50, 16), -4.0))


def test_without_gradients_no_layer_is_checkpointed(monkeypatch):
    """The decision takes torch longer than a norm, in each layer of each forward of the reference."""
    calls: list[object] = []

    def noted(forward, *inputs, **keywords):
        calls.append(forward)
        return plain(forward, *inputs, **keywords)

    plain = policy_module.checkpoint
    monkeypatch.setattr(policy_module, "checkpoint", noted)
    policy = tiny.policy(layers=3)
    policy.checkpoint_activations()
    with torch.no_grad():
        policy(some_batch())
    assert not calls
    policy(some_batch())
    assert len(calls) == 3


def test_copied_weights_are_gathered_in_the_dtype_of_the_copy_and_written_in_place(monkeypatch):
    """CUDA graphs read the tensors of the player, and gathering float32 would send twice the bytes."""
    dtypes: set[torch.dtype] = set()

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        dtypes.add(tensor.dtype)
        return tensor

    monkeypatch.setattr(policy_module, "full_tensor", gather)
    player = Policy(tiny.model().bfloat16(), compute_dtype=torch.bfloat16)
    places = [weight.data_ptr() for weight in player.parameters()]
    player.copy_weights_from(tiny.policy())
    assert dtypes == {torch.bfloat16}
    assert [weight.data_ptr() for weight in player.parameters()] == places
