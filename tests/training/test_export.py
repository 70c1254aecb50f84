"""Exported agents: the dtype of their weights, the files beside them, and what rounding takes."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prompt_r1.model.loading import load_policy
from prompt_r1.model.lora import adapters_of, add_lora
from prompt_r1.model.policy import Policy
from prompt_r1.pair.named_agent import STEP_FILE
from prompt_r1.programs import folders
from prompt_r1.settings.train import TrainConfig
from tests.support import tiny
from tests.support.exports import export, load_tensors
from tests.support.games import CPU

CONFIG = TrainConfig(agent="tiny", data=("own.jsonl",))
METRICS = {"step": 1, "reward/mean": 0.5, "val/em": 0.75}


@pytest.fixture
def base(tmp_path) -> Path:
    """A model that is stored in bfloat16."""
    folder = tmp_path / "base"
    tiny.model().bfloat16().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"transformers_version": "4.51.0"}')
    (folder / "preprocessor_config.json").write_text('{"of": "a model that also sees"}')
    return folder


def trained(base: Path, *, compute_dtype: torch.dtype = torch.bfloat16, change: float = 0.1) -> Policy:
    """The float32 weights that learn, each changed relatively by `change`."""
    policy = load_policy(base, device=CPU, compute_dtype=compute_dtype)
    with torch.no_grad():
        for weight in policy.parameters():
            weight *= 1 + change
    return policy


def exported(policy: Policy, base: Path) -> Path:
    return export(policy, base, CONFIG, base.parent / "agent", METRICS)


def test_an_agent_that_plays_in_16_bits_is_exported_in_those_of_its_base_model(base):
    policy = trained(base)
    folder = exported(policy, base)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert torch.equal(next(model.parameters()), next(policy.parameters()).bfloat16())
    assert AutoTokenizer.from_pretrained(folder).chat_template == tiny.QWEN3_LIKE_TEMPLATE


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_an_agent_that_plays_in_float32_is_exported_in_float32(base, key):
    """Validation had played float32 weights, and the export lost 99 % of what had changed in them."""
    config = json.loads((base / "config.json").read_text())
    config[key] = config.pop("dtype")  # the key of transformers 5, or of its older versions
    (base / "config.json").write_text(json.dumps(config))
    policy = trained(base, compute_dtype=torch.float32, change=1e-5)
    folder = exported(policy, base)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.float32
    for weight, learned in zip(loaded.parameters(), policy.parameters(), strict=True):
        assert torch.equal(weight, learned)
    assert json.loads((folder / "config.json").read_text()) == config | {key: "float32"}
    assert json.loads((folder / STEP_FILE).read_text()) == METRICS


def test_the_share_of_changed_weights_that_rounding_takes_is_measured_written_and_warned_of(base, caplog):
    """bfloat16 has 8 digits: a weight that has changed by a ten-thousandth is the old one again."""
    policy = trained(base, change=1e-4)
    weights = list(policy.parameters())
    unchanged, large = weights[1], weights[2]
    with torch.no_grad():
        unchanged /= 1 + 1e-4
        unchanged.copy_(unchanged.bfloat16())
        large *= 1.5
    changed = sum(weight.numel() for weight in weights) - unchanged.numel()
    share = json.loads((exported(policy, base) / STEP_FILE).read_text())["export/rounded_away"]
    assert share == pytest.approx(1 - large.numel() / changed, abs=1e-3)
    assert f" {100 * share:.0f} % of the weights" in caplog.text


def test_the_share_that_rounding_takes_is_also_measured_for_merged_adapters(base):
    """A bug: merging had rounded to bfloat16 already, so the share was always 0."""
    policy = load_policy(base, device=CPU, compute_dtype=torch.bfloat16, weights_dtype=torch.bfloat16)
    add_lora(policy.model, rank=1, alpha=1)
    with torch.no_grad():
        for layer in adapters_of(policy.model).values():
            layer.a.fill_(1e-3)
            layer.b.fill_(1e-3)  # The product changes each weight by a millionth.
    step = json.loads((exported(policy, base) / STEP_FILE).read_text())
    assert step["export/rounded_away"] > 0.9


def test_a_change_that_16_bits_can_hold_raises_no_warning(base, caplog):
    folder = exported(trained(base, change=0.1), base)
    assert json.loads((folder / STEP_FILE).read_text()) == METRICS | {"export/rounded_away": 0.0}
    assert caplog.text == ""


def test_an_export_has_tied_weights_once_and_buffers_too(base):
    policy = trained(base)
    assert policy.model.config.tie_word_embeddings
    policy.model.register_buffer("scale", torch.tensor([2.0]))
    names = set(load_tensors(exported(policy, base)))
    assert names == {name for name, _ in policy.model.named_parameters()} | {"scale"}
    assert "lm_head.weight" not in names


def test_the_configuration_and_the_tokenizer_are_copied_byte_for_byte(base):
    """The config of transformers 5 lacks keys of version 4, which silently takes others in their place."""
    folder = exported(trained(base), base)
    names = [path.name for path in base.iterdir() if path.name != "model.safetensors"]
    expected = ["chat_template.jinja", "config.json", "generation_config.json", "preprocessor_config.json"]
    assert sorted(names) == [*expected, "tokenizer.json", "tokenizer_config.json"]
    assert all((base / name).read_bytes() == (folder / name).read_bytes() for name in names)


@pytest.fixture
def file_events(monkeypatch) -> list[str]:
    """In order: the name of each file or folder that is synced, and "old -> new" for each that is renamed."""
    events: list[str] = []
    fsync, replace_path = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        events.append(f"{Path(source).name} -> {Path(target).name}")
        replace_path(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return events


def test_an_export_syncs_its_files_before_it_gets_its_name(base, file_events):
    """As a checkpoint: a power cut could keep the name and lose the weights. The folder is synced last."""
    policy = trained(base)
    add_lora(policy.model, rank=4, alpha=8)
    folder = exported(policy, base)
    renamed = file_events.index(f"{folders.TEMPORARY} -> agent")
    synced = {path.name for path in folder.rglob("*")} | {folders.TEMPORARY}
    events = {
        event for event in file_events[:renamed] if " -> " not in event
    }  # config files are renamed, too
    assert synced == events and file_events[renamed - 1] == folders.TEMPORARY
    assert file_events[renamed + 1 :] == [folder.parent.name]
