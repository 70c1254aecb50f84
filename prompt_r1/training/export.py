"""Export the agent as a Hugging Face folder."""

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig

from prompt_r1.model.distributed import Ranks
from prompt_r1.model.loading import model_folder
from prompt_r1.model.lora import LoRA, adapters_removed
from prompt_r1.model.policy import Policy
from prompt_r1.pair.named_agent import SETTINGS_FILE, STEP_FILE
from prompt_r1.programs.folders import begin_folder, complete_folder
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.settings.fields import write_yaml
from prompt_r1.training.checkpoint import resumable_writes

logger = logging.getLogger(__name__)

# These files are copied from the base model, because training changes neither architecture nor tokenizer.
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
    "*processor_config.json",  # Without it, servers refuse a model that also reads images.
)
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# STEP_FILE has this key beside the metrics of the step.
ROUNDED_AWAY = "export/rounded_away"
MAX_ROUNDED_AWAY = 0.5  # A larger share is warned about.


def export_agent(
    policy: Policy, base: str, config: AgentConfig, folder: Path, *, metrics: dict[str, float], ranks: Ranks
) -> None:
    """Write the agent as a Hugging Face folder, which replaces an older one when it is complete.

    The weights are written in 16 bits if both the base model and the agent's matrix products have 16 bits,
    else in float32. The folder `adapter` has the adapters in float32, for peft. The weights are those with
    which validation played, except in two cases:

    - A base in float16 is exported in float16, also if the agent played in bfloat16 (--dtype).
    - Adapters are merged into the weights, which rounds once more.

    `base` is the folder or hub id of the base model. `metrics` is the metric line of the agent's step.
    Raises Resumable if a file cannot be written.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with adapters_removed(policy.model) as adapted:
        weights = get_model_state_dict(policy.model, options=options)  # empty on all ranks but the first

        def write() -> None:
            for name, layer in adapted.items():
                weights[f"{name}.weight"] = layer.merged_weight().cpu()
            with resumable_writes(folder, ranks):
                temporary = begin_folder(folder)
                rounding = _write_model(policy, weights, model_folder(base), temporary)
                (temporary / STEP_FILE).write_text(json.dumps(metrics | rounding, indent=1), "utf-8")
                write_yaml(config, temporary / SETTINGS_FILE)
                if adapted:
                    save_adapters(adapted, temporary / "adapter", base=base)
                complete_folder(folder)

        ranks.on_first_rank(write)


def _write_model(policy: Policy, weights: Mapping[str, Any], home: Path, folder: Path) -> dict[str, float]:
    """Write weights, configuration and tokenizer. `home` is the folder of the base model.

    Returns the metric of what the rounding to 16 bits has lost, and warns if it is much; {} in float32.
    """
    dtype = _exported_dtype(policy, home)
    _write_weights(policy, weights, dtype, folder)
    _copy_files_of_base(home, folder)
    _set_dtype(folder / "config.json", dtype)
    if dtype == torch.float32:
        return {}
    share = share_rounded_away(weights, home, dtype)
    if share > MAX_ROUNDED_AWAY:
        logger.warning(
            "%.0f %% of the weights that training has changed have their old value in the export: "
            "%s has too few digits for such small changes; give --dtype float32, or a larger --lr",
            100 * share,
            _name_of(dtype),
        )
    return {ROUNDED_AWAY: share}


def _write_weights(policy: Policy, weights: Mapping[str, Any], dtype: torch.dtype, folder: Path) -> None:
    """Write the weights in `dtype`. Tied weights are written once, by their first name."""
    second_names = policy.model.all_tied_weights_keys
    exported = {}
    for name, tensor in weights.items():
        if name not in second_names:
            exported[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    policy.model.save_pretrained(folder, state_dict=exported)


def _copy_files_of_base(home: Path, folder: Path) -> None:
    """Copy configuration and tokenizer of the base model in `home`."""
    for pattern in COPIED:
        for path in home.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def _exported_dtype(policy: Policy, home: Path) -> torch.dtype:
    """The dtype of the base model, if the agent plays in 16 bits too; float32 otherwise."""
    stored = AutoConfig.from_pretrained(home).dtype
    both_16_bits = stored in SIXTEEN_BITS and policy.compute_dtype in SIXTEEN_BITS
    return stored if both_16_bits else torch.float32


def _set_dtype(file: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the weights into config.json, from which loaders take the dtype of the model.

    Nothing else changes. If transformers 5 saved the file, keys that version 4 needs would be missing, such
    as rope_theta.
    """
    before = file.read_text("utf-8")
    after = re.sub(r'("(torch_)?dtype": *)"\w+"', rf'\1"{_name_of(dtype)}"', before)
    file.write_text(after, "utf-8")


def _name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in config.json, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def share_rounded_away(weights: Mapping[str, Any], home: Path, dtype: torch.dtype) -> float:
    """The share of the changed weights whose change is lost when they are rounded to `dtype`.

    The old values are read from the folder `home`, one tensor at a time.
    """
    changed = 0
    rounded_away = 0
    for path in sorted(home.glob("*.safetensors")):
        with safe_open(path, framework="pt") as start:
            for name in weights.keys() & set(start.keys()):
                old = start.get_tensor(name)
                new = weights[name]
                is_changed = new != old
                is_rounded_away = is_changed & (new.to(dtype) == old.to(dtype))
                changed += int(is_changed.sum())
                rounded_away += int(is_rounded_away.sum())
    return rounded_away / changed if changed else 0.0


def save_adapters(adapted: Mapping[str, LoRA], folder: Path, *, base: str) -> None:
    """Write the adapters of layers, by the layers' names, as a folder that peft loads; in float32."""
    folder.mkdir()
    tensors = {}
    for name, layer in adapted.items():
        for part, weight in (("lora_A", layer.a), ("lora_B", layer.b)):
            tensors[f"base_model.model.{name}.{part}.weight"] = weight.detach().cpu().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    first = next(iter(adapted.values()))  # all layers have the same rank and scale
    rank = len(first.a)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": first.scale * rank,
        "target_modules": sorted(adapted),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
