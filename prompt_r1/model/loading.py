"""Load a Hugging Face model or tokenizer, or refuse it."""

import gc
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import file_exists, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from prompt_r1.errors import UsageError, first_line, is_out_of_memory
from prompt_r1.model import attention
from prompt_r1.model.machine import forget_peak, memory_left
from prompt_r1.model.policy import Policy

LAYER_TYPES = {"full_attention", "sliding_attention"}  # the kinds of layers that we support


def load_policy(
    path: str | Path,
    *,
    device: torch.device,
    compute_dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    vocabulary: int = 0,
    max_tokens: int = 0,
) -> Policy:
    """Load the Hugging Face causal model of a folder or hub id, with our attention, in evaluation mode.

        compute_dtype   the dtype of matrix products
        weights_dtype   the dtype of the weights in memory
        vocabulary      the tokens of the tokenizer; 0: as many as the model has
        max_tokens      the tokens of the longest game; 0: not known

    The caller must compare the loaded model with the unmodified model (`engine.model_check`), unless the same
    model was checked before. Raises UsageError if there is no such model, or if its files are broken. Code
    that comes with a model is never executed.
    """
    attention.register()
    transformers_logging.disable_progress_bar()
    # transformers would print a table of missing tensors. We raise an error instead.
    transformers_logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # A broken folder may raise anything.
        raise UsageError(f"no causal language model at {str(path)!r}: {first_line(error)}") from None
    _check_config(path, config)
    _check_length(path, config, max_tokens)
    gc.collect()  # Earlier engines and models are in reference cycles, so only the collector frees them.
    forget_peak(device)
    _check_memory(path, config, weights_dtype, device)
    model = _load_weights(path, config, weights_dtype)
    embedded = len(next(model.get_input_embeddings().parameters()))
    if vocabulary > embedded:
        raise UsageError(
            f"{str(path)!r}: the tokenizer has {vocabulary} tokens, and the model embeds {embedded}: resize "
            "the model's embeddings, or give it its own tokenizer"
        )
    model.to(device)  # type: ignore[arg-type]  # transformers wraps `to` in a method whose type lacks `self`.
    return Policy(model.eval(), compute_dtype=compute_dtype, temperature=temperature, vocabulary=vocabulary)


def _check_config(path: str | Path, config: PretrainedConfig) -> None:
    """Raise UsageError for a kind of model that we would compute wrongly."""
    text = config.get_text_config()
    if any(getattr(part, "quantization_config", None) for part in (config, text)):
        raise UsageError(f"the weights at {str(path)!r} are quantised: give the model in 16 or 32 bits")
    # A model whose attention cannot be replaced is refused here, by its class. The check after loading
    # (engine/model_check.py) may not notice it: if the weights are small, a wrong attention changes little.
    model_class = cast(type[PreTrainedModel] | None, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))
    if model_class and not model_class.is_backend_compatible():
        raise unsupported(config, "its attention cannot be replaced")
    if getattr(text, "final_logit_softcapping", None):
        raise unsupported(config, "its logits have a soft cap")
    # The check after loading plays only short games, which may not show what other kinds of layers do.
    layer_types = getattr(text, "layer_types", None) or []
    unknown = sorted({*layer_types} - LAYER_TYPES)
    if unknown:
        raise unsupported(config, f"it has layers of the kind {', '.join(unknown)}")


def _check_length(path: str | Path, config: PretrainedConfig, max_tokens: int) -> None:
    """Raise UsageError for games that are too long for a model.

    Warns if games may be longer than the model's context in its training.
    """
    limit = longest_game(config)
    if limit is not None and max_tokens > limit:
        raise UsageError(
            f"games of {max_tokens} tokens exceed the {limit} positions of the model at {str(path)!r}: "
            f"train it with --max-tokens {limit} or less"
        )
    trained = getattr(config.get_text_config(), "max_position_embeddings", None)
    if trained and max_tokens > trained:
        warnings.warn(
            f"games may have {max_tokens} tokens, but the model at {str(path)!r} was made for {trained}: "
            f"what it writes after that may make no sense (--max-tokens {trained} ends games there)",
            stacklevel=3,
        )


def _check_memory(
    path: str | Path, config: PretrainedConfig, weights_dtype: torch.dtype, device: torch.device
) -> None:
    """Raise UsageError if the weights of a model do not fit the free memory of the device."""
    # transformers loads model.safetensors, or model-00001-of-00002.safetensors and so on. Some folders, such
    # as Mistral's, have the weights a second time under other names. If the weights of a hub id are not
    # downloaded yet, there are no files, and nothing is refused.
    files = model_folder(path).glob("model*.safetensors")
    stored = sum(file.stat().st_size for file in files)
    # A config may name no dtype. Then its weights are taken for float32.
    stored_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    needed = stored * weights_dtype.itemsize // stored_dtype.itemsize
    free = memory_left(device)
    if needed > free:
        raise UsageError(
            f"the model at {str(path)!r} needs {needed / 1e9:.2f} GB of memory, and {free / 1e9:.2f} GB are "
            "free: make room, or give a smaller model"
        )


def _load_weights(path: str | Path, config: PretrainedConfig, weights_dtype: torch.dtype) -> PreTrainedModel:
    """Load a model with its weights. Raises UsageError if the files do not hold exactly the model's tensors.

    Pickled files are refused, because loading them may execute code.
    """
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=weights_dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # We report such tensors ourselves, in one line.
            output_loading_info=True,
        )
    except Exception as error:  # A broken folder may raise anything.
        if is_out_of_memory(error):
            raise
        raise UsageError(f"no causal language model at {str(path)!r}: {first_line(error)}") from None
    model, found = cast(tuple[PreTrainedModel, dict[str, set[Any]]], loaded)
    layers = {_layer_of(name) for name in model.state_dict()}
    # The model class may lack whole layers of the files, such as heads for multi-token prediction. But within
    # a layer that the model has, it must use every tensor.
    unused = [name for name in found["unexpected_keys"] if _layer_of(name) in layers]
    misshapen = [name for name, *_shapes in found["mismatched_keys"]]
    problems = {
        "have tensors that the model does not use, in layers that it does use": unused,
        "lack tensors of the model": found["missing_keys"],
        "have tensors of other shapes than config.json says": misshapen,
    }
    for problem, names in problems.items():
        if names:
            raise UsageError(
                f"the weight files at {str(path)!r} {problem}: {len(names)}, such as {min(names)}"
            )
    return model


def _layer_of(name: str) -> str:
    """The name of the layer that holds a tensor."""
    return name.rpartition(".")[0]


def model_folder(path: str | Path) -> Path:
    """The folder of a model's files: its own folder or, for a hub id, the folder in the cache of the Hub."""
    return Path(str(cached_file(path, "config.json"))).parent


def longest_game(config: PretrainedConfig) -> int | None:
    """How many tokens a game may have with this model; None: any number.

    The learned positions of a model end at this length. With a RoPE whose frequencies depend on the length
    of the row, a longer game changes all games in its row or in the cache.
    """
    text = config.get_text_config()
    positions: Any = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if not rope:
        return positions  # The model has learned positions, or none.
    # If each type of layer has its own RoPE, `rope` has a dictionary for each type.
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = []
    for parameters in ropes:
        match parameters.get("rope_type"):
            case "dynamic":
                limits.append(positions)
            case "longrope":
                limits.append(parameters.get("original_max_position_embeddings") or positions)
    return min(limits, default=None)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id. Raises UsageError if there is none."""
    if not Path(path).exists():
        check_hub(str(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        # If the files are missing, transformers makes up a tokenizer that knows only special tokens.
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        if len(tokenizer) <= len(special):
            raise ValueError("its files are missing")
    except Exception as error:  # A broken folder may raise anything.
        reason = first_line(error)
        if Path(path).is_dir() and not (Path(path) / "tokenizer.json").exists():
            reason = "there is no tokenizer.json (sentencepiece reads a tokenizer.model, if it is installed)"
        raise UsageError(f"no tokenizer at {str(path)!r}: {reason}") from None
    # The limit in the tokenizer's files may be missing or a text. The model's own limit counts.
    tokenizer.model_max_length = sys.maxsize
    return tokenizer


def check_hub(name: str) -> None:
    """Raise UsageError for a hub id that is not cached, if the Hub does not have it or cannot be reached.

    We ask first, because transformers would repeat every request for half a minute.
    """
    try:
        if try_to_load_from_cache(name, "config.json") or file_exists(name, "config.json"):
            return
        reason = "the Hub has no such model"
    except HfHubHTTPError:  # The Hub refused, perhaps for a missing permission. transformers explains it.
        return
    except Exception as error:
        reason = f"the Hub cannot be asked for such a model ({first_line(error)})"
    raise UsageError(f"there is no folder {name!r}, and {reason}")


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of token ids of a tokenizer: the largest id plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def unsupported(config: PretrainedConfig, cause: str) -> UsageError:
    """The error for a model that we would compute wrongly. `cause` completes the sentence."""
    return UsageError(f"models of type {config.model_type!r} are not supported: {cause}")
