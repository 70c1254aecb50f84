"""Write adapters as a folder that peft loads."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from prompt_r1.agent.lora import LoRA

ADAPTER_FOLDER = "adapter"  # in the folder of the agent, so that both are replaced at once


def save_adapters(adapted: Mapping[str, LoRA], folder: Path, *, base: str) -> None:
    """Write adapters, by the names of their layers, in float32.

    `base` is the folder or hub id of the model without them.
    """
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
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(adapted),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
