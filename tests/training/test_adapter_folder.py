"""Runs with adapters: their checkpoints, and the folders that other libraries load."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prompt_r1.errors import UsageError
from prompt_r1.model.lora import adapters_of, add_lora
from prompt_r1.model.policy import Policy
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training.log import read_metrics
from prompt_r1.training.run_folder import checkpoints_of
from tests.support import tiny
from tests.support.adapters import TOKENS, with_random_adapters
from tests.support.exports import export, load_tensors
from tests.support.programs import run_here
from tests.support.tiny import logits_of

SETTINGS = """
    --data mini:ood --env mini --val-data none --test-data none --device cpu --questions 1 --group-size 4
    --mini-batch 4 --loss token-mean --lr 1e-2 --max-new 30 --max-turns 2 --max-tokens 500 --save-every 1
    --instruction short --adapter-rank 4
"""


def exported(folder: Path, model, base: Path) -> Path:
    """Export a model with adapters of rank 4 that are not zero; returns the folder."""
    with_random_adapters(model, rank=4, alpha=8)
    config = TrainConfig(agent=str(base), adapter_rank=4)
    return export(Policy(model, compute_dtype=torch.float32), base, config, folder, {"step": 1})


@pytest.fixture
def base(tmp_path) -> Path:
    return tiny.save_agent(tmp_path / "base")


def test_the_exported_agent_has_the_adapters_merged_into_its_weights(base, tmp_path):
    model = tiny.model()
    plain = {name: weight.clone() for name, weight in model.state_dict().items()}
    folder = exported(tmp_path / "agent", model, base)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert merged.state_dict().keys() == plain.keys()
    torch.testing.assert_close(logits_of(merged, TOKENS), logits_of(model, TOKENS), rtol=1e-5, atol=1e-5)
    for name, layer in adapters_of(model).items():
        assert torch.equal(layer.base.weight, plain[f"{name}.weight"]), (
            "the export changed the frozen weights"
        )


def test_the_adapter_folder_has_the_documented_form(base, tmp_path):
    """peft, "LoRA checkpoint format": base_model.model.NAME.lora_A.weight (r, in), lora_B.weight (out, r)."""
    model = tiny.model()
    folder = exported(tmp_path / "agent", model, base) / "adapter"
    names = {path.name for path in folder.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert config["target_modules"] == sorted(adapters_of(model))
    assert config["base_model_name_or_path"] == str(base)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 28 and {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name, layer in adapters_of(model).items():
        assert torch.equal(tensors[f"base_model.model.{name}.lora_A.weight"], layer.a)
        assert torch.equal(tensors[f"base_model.model.{name}.lora_B.weight"], layer.b)


@pytest.mark.filterwarnings("ignore")  # peft's own
def test_peft_loads_the_adapter_folder_with_equal_outputs(base, tmp_path):
    peft = pytest.importorskip("peft")
    model, theirs = (AutoModelForCausalLM.from_pretrained(base).eval() for _ in range(2))
    before = logits_of(model, TOKENS)
    folder = exported(tmp_path / "agent", model, base)
    loaded = peft.PeftModel.from_pretrained(theirs, folder / "adapter").eval()
    assert (logits_of(loaded, TOKENS) - before).abs().max() > 0.1
    torch.testing.assert_close(logits_of(loaded, TOKENS), logits_of(model, TOKENS), rtol=1e-5, atol=1e-5)


def trained(folder: Path, agent: Path, *line: object) -> Path:
    run_here("train.py", "--agent", agent, "--out", folder, *SETTINGS.split(), *line)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of three steps, with checkpoints of the last two, and its agent beside it."""
    folder = tmp_path_factory.mktemp("run")
    tiny.save_asking_agent(folder / "start")
    return trained(folder / "whole", folder / "start", "--steps", 3)


def killed_copy(whole: Path, folder: Path) -> Path:
    """The run as a kill in step 3 leaves it: with newer metric lines than its checkpoint."""
    shutil.copytree(whole, folder)
    shutil.rmtree(checkpoints_of(folder)[-1])
    return folder


def test_a_run_with_adapters_resumes_bit_for_bit_from_the_checkpoint_before_a_kill(whole, tmp_path):
    run = trained(killed_copy(whole, tmp_path / "run"), whole.parent / "start", "--steps", 3)
    for file in ("agent/model.safetensors", "agent/adapter/adapter_model.safetensors"):
        assert (whole / file).read_bytes() == (run / file).read_bytes()
    one, other = (load_tensors(checkpoints_of(folder)[-1]) for folder in (whole, run))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    same = ("step", "reward/mean", "loss", "kl", "grad_norm")
    lines = [[[line.get(name) for name in same] for line in read_metrics(folder)] for folder in (whole, run)]
    assert lines[0] == lines[1] and len(lines[0]) == 4


@pytest.mark.parametrize("other", [{"seed": 1}, {"layers": 3}])
def test_a_run_is_not_resumed_on_another_start(whole, tmp_path, other):
    """The folder of --agent got other weights, and the run went on: its KL rose from 0 to 5.6.

    If the weights had another shape, the error was that of a checkpoint with other tensors.
    """
    start = shutil.copytree(whole.parent / "start", tmp_path / "start")
    run = trained(tmp_path / "run", start, "--steps", 1)
    tiny.save_agent(start, **other)
    with pytest.raises(UsageError, match=r"step-000001 .*an agent that differs"):
        trained(run, start, "--steps", 2)


def test_a_checkpoint_holds_the_adapters_and_their_moments_only(whole):
    saved = load_tensors(checkpoints_of(whole)[-1])
    names = {name.split("/")[1] for name in saved}
    policy = tiny.policy()
    add_lora(policy.model, rank=4, alpha=8)
    adapters = policy.trained_parameters()
    assert len(names) == len(adapters) and all(name.endswith((".a", ".b")) for name in names)
    entries = sum(tensor.numel() for tensor in saved.values() if tensor.dim() == 2)
    assert entries == 3 * sum(weight.numel() for weight in adapters)
