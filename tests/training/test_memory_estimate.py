"""The estimate of memory against what autograd keeps, what a model weighs, and what a rank holds."""

import pytest
import torch
from transformers import Qwen3Config

from prompt_r1.agent.packing import pack
from prompt_r1.agent.policy import Policy
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.training.memory_estimate import (
    block_activations,
    memory_table,
    shape_of,
    state_bytes,
    update_bytes,
)
from tests import tiny
from tests.games import CPU, random_game
from tests.paths import ROOT

CLUSTER = (ROOT / "docs/cluster.md").read_text("utf-8")
PAPER = TrainConfig(**PRESETS["paper"])


def qwen3_4b() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, head_dim=128,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_a_shape_weighs_what_the_model_weighs(tied):
    model = tiny.model(tied=tied)
    shape = shape_of(model.config)
    assert shape.weights == sum(weight.numel() for weight in model.parameters())
    outside = sum(weight.numel() for name, weight in model.named_parameters() if ".layers." not in name)
    assert shape.root == outside


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_a_block_saves_as_much_as_the_estimate_says(weights):
    """Autograd's saved tensors of three blocks, less those of one: two blocks, without embedding and head."""
    packed = pack([[random_game(0)]], CPU)
    saved = [_saved(Policy(tiny.model(layers=layers).to(weights), compute=torch.bfloat16), packed)
             for layers in (1, 3)]  # fmt: skip
    shape = shape_of(tiny.model().config)
    expected = block_activations(shape, width=2, kept=weights.itemsize)
    assert (saved[1] - saved[0]) / 2 / len(packed.tokens) == pytest.approx(expected, rel=0.1)


def _saved(policy: Policy, packed) -> int:
    """Bytes that autograd keeps of a forward, without weights and what is cast from them."""
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []
    widths = {tuple(weight.shape) for weight in policy.parameters()}
    widths |= {shape[::-1] for shape in widths}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # else its address might be given away again
        if tuple(tensor.shape) not in widths:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.hidden_states(packed.tokens[None], position_ids=packed.positions[None])
    return sum(sizes.values())


def test_shards_of_a_model_add_up_to_the_model():
    shape = shape_of(tiny.model().config)
    common = {"width": 2, "reference": True, "offload": "none"}
    one, eight = (state_bytes(shape, shards=shards, whole=False, **common) for shards in (1, 8))
    assert one["float32 weights"] + one["gradients"] + one["AdamW's moments"] == 16 * shape.weights
    for name in one:
        assert eight[name] == one[name] / (1 if name == "copy that plays" else 8), name


def test_the_paper_s_preset_fits_eight_gpus_of_40_gb_and_not_four_as_the_readme_says(tmp_path):
    qwen3_4b().save_pretrained(tmp_path)
    rows = memory_table(TrainConfig(agent=str(tmp_path))).splitlines()
    columns = {row[:40].strip(): row[40:].split() for row in rows}
    assert columns["GB of each GPU, sharded over"] == ["1", "(whole)", "2", "4", "8", "16"]
    shown = [float(columns[name][3]) for name in list(columns)[1:8]]
    assert sum(shown) == pytest.approx(float(columns["together"][3]), abs=0.3)  # the table adds up
    assert columns["40 GB: left over"] == ["4.3", "8.4"]  # of 8 and of 16 GPUs: more are too small
    assert float(columns["40 GB: KV cache, thousand tokens"][-2]) * 1e3 > PAPER.max_tokens

    table = CLUSTER.split("| sharded over |")[1].split("\n\n")[0].replace("**", "").splitlines()[2:]
    for name, *cells in ([cell.strip() for cell in row.split("|")[1:-1]] for row in table):
        assert " ".join(cells).split() == columns[name], name


def test_recomputing_blocks_saves_most_of_the_activations():
    shape = shape_of(qwen3_4b())
    kept, recomputed = (
        update_bytes(shape, tokens=16_384, whole=False, width=2, recompute=recompute)
        for recompute in (False, True)
    )
    assert sum(kept.values()) > 8 * sum(recomputed.values())


def test_where_the_config_of_an_agent_is_not_at_hand_the_estimate_says_so(tmp_path):
    assert "not at hand" in memory_table(TrainConfig(agent=str(tmp_path)))
