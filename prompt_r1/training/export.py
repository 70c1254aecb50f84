"""Export the agent as a Hugging Face folder."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import cached_file

from prompt_r1.model.distributed import Ranks
from prompt_r1.model.lora import LoRA, adapters_removed
from prompt_r1.model.policy import Policy
from prompt_r1.programs import files
from prompt_r1.settings.agent import GAME_FILE, STEP_FILE, AgentConfig
from prompt_r1.settings.fields import write_yaml
from prompt_r1.training.checkpoint import resumable_writes

# Copied from the base model: training changes neither the architecture nor the tokenizer.
COPIED = (
    "config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",  # of a model that also sees: servers refuse it without
)


def export_agent(
    policy: Policy, base: str, config: AgentConfig, folder: Path, *, metrics: dict[str, float], ranks: Ranks
) -> None:
    """Write the agent in the dtype of its base model, replacing an older one atomically.

    Adapters are merged into the weights, and also written to its folder `adapter`, so that both are replaced
    at once. `base` is the folder or hub id of the base model, `metrics` the metric line of the agent's step.
    Called by every rank. Raises Resumable if it fails.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def write() -> None:
        with resumable_writes(folder, ranks):
            # The folder of the base model: its own, or the one in the hub cache.
            home = Path(str(cached_file(base, "config.json"))).parent
            temporary = files.new_temporary(folder)
            merged = {f"{name}.weight": layer.merged_weight().cpu() for name, layer in adapted.items()}
            _save(policy.model, weights | merged, home, temporary)
            for pattern in COPIED:
                for path in home.glob(pattern):
                    if path.is_file():
                        shutil.copyfile(path, temporary / path.name)
            write_yaml(config, temporary / GAME_FILE)
            (temporary / STEP_FILE).write_text(json.dumps(metrics, indent=1), "utf-8")
            if adapted:
                save_adapters(adapted, temporary / "adapter", base=base)
            files.sync_and_move(temporary, folder)

    with adapters_removed(policy.model) as adapted:
        weights = get_model_state_dict(policy.model, options=options)  # empty on other ranks than the first
        ranks.from_first(write)


def _save(model: PreTrainedModel, weights: Mapping[str, Any], home: Path, folder: Path) -> None:
    """Write the weights in the dtype of the base model."""
    dtype = AutoConfig.from_pretrained(home).dtype
    if dtype not in (torch.bfloat16, torch.float16):  # trained weights fit into no integers
        dtype = torch.float32
    kept = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
        if name not in model.all_tied_weights_keys  # second names of weights
    }
    model.save_pretrained(folder, state_dict=kept)


def save_adapters(adapted: Mapping[str, LoRA], folder: Path, *, base: str) -> None:
    """Write adapters, by the names of their layers, in float32, as a folder that peft loads."""
    folder.mkdir()
    tensors = {}
    for name, layer in adapted.items():
        for part, weight in (("lora_A", layer.a), ("lora_B", layer.b)):
            tensors[f"base_model.model.{name}.{part}.weight"] = weight.detach().cpu().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": len(layer.a),
        "lora_alpha": layer.scale * len(layer.a),
        "target_modules": sorted(adapted),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
