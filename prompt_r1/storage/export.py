"""Export the agent as a Hugging Face folder."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedModel
from transformers.utils import cached_file
from yaml import YAMLError

from prompt_r1.agent.lora import adapters_removed
from prompt_r1.agent.policy import Policy
from prompt_r1.cli.tables import markdown_table
from prompt_r1.config.agent import AgentConfig
from prompt_r1.config.yaml_files import GAME_FILE, STEP_FILE, write_yaml
from prompt_r1.distributed import Ranks
from prompt_r1.storage import atomic_folder
from prompt_r1.storage.adapter_folder import ADAPTER_FOLDER, save_adapters

# Copied from the base model: training does not change the tokenizer.
COPIED = (
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

ASKING = (
    "# An agent that questions a large language model",
    "Trained with [Prompt-R1](https://arxiv.org/abs/2511.01016): the agent asks a large model, the "
    "environment, over several turns, and then answers.",
)
ALONE = (
    "# An agent that answers on its own",
    "A baseline of [Prompt-R1](https://arxiv.org/abs/2511.01016): GRPO without an environment to ask.",
)
PLACE = "path/to/this/folder"
USE = f"""```bash
python infer.py --agent {PLACE} --env MODEL --question "…"
```

The weights also load without Prompt-R1, but then nothing asks the environment:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{PLACE}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{PLACE}")
```"""


def export_agent(
    policy: Policy,
    base: Path | str,
    config: AgentConfig,
    folder: Path,
    *,
    metrics: Mapping[str, float],
    ranks: Ranks,
    card: Callable[[Path], str],
) -> str:
    """Write the agent in the dtype of its base model, replacing an older one atomically.

    Adapters are merged into the weights, and written beside them to the folder `adapter`.

    `metrics` is the metric line of the agent's step; `card` writes the model
    card, given the folder of its base. Called by every rank. Returns "", or why it failed.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def write() -> None:
        home, temporary = base_folder(base), atomic_folder.new_temporary(folder)
        try:
            fill(temporary, home)
            atomic_folder.sync_and_move(temporary, folder)
        except SafetensorError as error:
            raise OSError(str(error)) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # after a failure it would take room

    def fill(temporary: Path, home: Path) -> None:
        dtype = _save(policy.model, weights, home, temporary)
        _complete_config(temporary / "config.json", dtype)
        for pattern in COPIED:
            for path in home.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, temporary / path.name)
        write_yaml(config, temporary / GAME_FILE)
        (temporary / STEP_FILE).write_text(json.dumps(metrics, indent=1), "utf-8")
        (temporary / "README.md").write_text(card(home), "utf-8")
        if adapted:
            save_adapters(policy.model, adapted, temporary / ADAPTER_FOLDER, base=str(base))

    with adapters_removed(policy.model) as adapted:
        weights = get_model_state_dict(policy.model, options=options)  # empty on other ranks than the first
        for name, layer in adapted.items() if ranks.first else ():
            weights[f"{name}.weight"] = layer.merged_weight().cpu()
        failed = ranks.try_on_first(write)
    return f"{folder} could not be written: {failed}" if failed else ""


def base_folder(base: Path | str) -> Path:
    """The folder with the files of a model: its own, or the one in the hub cache."""
    if Path(base).is_dir():
        return Path(base)
    file = cached_file(str(base), "config.json")
    assert file is not None, "cached_file raises if the model is missing"
    return Path(file).parent


def _save(model: PreTrainedModel, weights: Mapping[str, object], home: Path, folder: Path) -> str:
    """Write the weights in the dtype of the base model; returns its name."""
    base_config = json.loads((home / "config.json").read_text("utf-8"))
    dtype = base_config.get("dtype") or base_config.get("torch_dtype")
    if dtype not in ("bfloat16", "float16"):  # trained weights fit into no integers
        dtype = "float32"
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    tied = names - dict(model.named_parameters()).keys()  # second names of weights
    kept: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in tied:
            continue
        assert isinstance(tensor, Tensor), f"{name} is a {type(tensor).__name__}"
        kept[name] = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
    model.save_pretrained(folder, state_dict=kept)
    return dtype


def _complete_config(path: Path, dtype: str) -> None:
    """Add the keys of transformers 4, which silently takes rope_theta = 10000 if it finds none.

    A model that also sees has those of its language model in `text_config`.
    """
    config = json.loads(path.read_text("utf-8"))
    for part in filter(None, (config, config.get("text_config"))):
        part |= {"dtype": dtype, "torch_dtype": dtype}
        rope = part.get("rope_parameters") or {}
        part |= _old_rope(rope.get("full_attention") or rope)
        if "sliding_attention" in rope:  # Gemma 3 has settings for each kind of layer
            part["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _old_rope(rope: Mapping[str, object]) -> dict[str, object]:
    """The settings of a rotary embedding under the names of transformers 4."""
    if "rope_theta" not in rope:
        return {}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    scaled = rope.get("rope_type", "default") != "default"
    return {"rope_theta": rope["rope_theta"], **({"rope_scaling": scaling} if scaled else {})}


def model_card(agent: str, env: str, settings: Mapping[str, str], *, seed: int, base: Path) -> str:
    """The README.md of an exported agent: how to load it, and the settings of its training."""
    environments = ", ".join(f"`{spec.split('@')[0]}`" for spec in env.split(","))
    named = {"base model": f"`{agent}`", "environment in training": environments, **settings}
    parts = [
        f"---\n{hub_metadata(agent, base, 'grpo').to_yaml()}\n---",
        *(ALONE if env == "none" else ASKING),
        USE,
        f"Every setting is in `{GAME_FILE}`, the metrics of its step in `{STEP_FILE}`.",
        markdown_table(["", ""], [[*row] for row in [*named.items(), ("seed", str(seed))]], left=2),
    ]
    return "\n\n".join(parts) + "\n"


def hub_metadata(agent: str, base: Path, method: str) -> ModelCardData:
    """What the Hub reads: the base model if it is from the Hub, and its licence if its card names one."""
    metadata = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["prompt-r1", method]
    )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", agent) and not Path(agent).exists():
        metadata.base_model = agent
    with suppress(OSError, ValueError, YAMLError):  # no card, or one that cannot be read
        licence = ModelCard.load(base / "README.md", ignore_metadata_errors=True).data.license
        if isinstance(licence, str):
            metadata.license = licence
    return metadata
