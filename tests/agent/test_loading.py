"""Broken and hostile model folders are refused in one sentence, and nothing in them is executed."""

import json
import pickle
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prompt_r1.agent.agent import load_agent
from prompt_r1.agent.loading import load_policy, load_tokenizer
from prompt_r1.config.agent import AgentConfig
from prompt_r1.errors import UsageError
from tests.support import tiny
from tests.support.games import CPU

WEIGHTS = "model.safetensors"


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.write_text, (self.target, "executed")


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json"


def ugly_config(folder: Path) -> str:
    (folder / "config.json").write_text("[1, 2")
    return "config.json"


def unknown_type(folder: Path) -> str:
    change_config(folder, model_type="nosuch")
    return "nosuch"


def wrong_size(folder: Path) -> str:
    change_config(folder, hidden_size="a")
    return "expected int, got str"


def unknown_rope(folder: Path) -> str:
    change_config(folder, rope_parameters={"rope_type": "x"})
    return "KeyError: 'x'"


def no_weights(folder: Path) -> str:
    (folder / WEIGHTS).unlink()
    return WEIGHTS


def cut_weights(folder: Path) -> str:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    return "incomplete"


def empty_weights(folder: Path) -> str:
    (folder / WEIGHTS).write_bytes(b"")
    return "header"


def pickled_weights(folder: Path) -> str:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(folder / "executed")))
    return WEIGHTS


def misshapen_weights(folder: Path) -> str:
    change_config(folder, intermediate_size=72)
    return "of other shapes than config.json says: 6, such as model.layers.0.mlp.down_proj.weight"


def missing_weights(folder: Path) -> str:
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {name: tensors[name] for name in tensors if "q_norm" not in name}, folder / WEIGHTS, {"format": "pt"}
    )
    return "lack tensors of the model: 2, such as model.layers.0.self_attn.q_norm.weight"


def additional_bias(folder: Path) -> str:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.ones(64)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return "computes without: 1, such as model.layers.0.mlp.up_proj.bias"


def quantised_weights(folder: Path) -> str:
    """With accelerate they were trained, and exported in a form that loads as other weights."""
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    return "are quantised"


def index_to_a_pickle(folder: Path) -> str:
    (folder / "x.bin").write_bytes(pickle.dumps(Attack(folder / "executed")))
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / WEIGHTS), "x.bin")}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()
    return "no causal language model"


def foreign_code(folder: Path) -> str:
    (folder / "code.py").write_text(f"open({str(folder / 'executed')!r}, 'w').write('executed')")
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    change_config(folder, auto_map=names, model_type="nosuch")
    return "custom code"


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


BROKEN = [
    no_config, ugly_config, unknown_type, wrong_size, unknown_rope, no_weights, cut_weights,
    empty_weights, pickled_weights,
    misshapen_weights, missing_weights, additional_bias, quantised_weights,
    index_to_a_pickle, foreign_code,
]  # fmt: skip


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda function: function.__name__)
def test_a_broken_folder_is_refused_with_its_cause_and_nothing_is_executed(tmp_path, break_it):
    tiny.save_agent(tmp_path)
    cause = break_it(tmp_path)
    with pytest.raises(UsageError) as refused:
        load_policy(tmp_path, device=CPU)
    message = str(refused.value)
    assert str(tmp_path) in message and cause in message and "\n" not in message, message
    assert not (tmp_path / "executed").exists()


def test_a_hub_id_is_refused_at_once_where_the_hub_cannot_be_reached(monkeypatch):
    """A bug: transformers retried for a minute before it gave up on a mistyped id."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(UsageError, match="there is no folder 'no/such', and the Hub cannot be asked"):
        load_tokenizer("no/such")
    assert time.monotonic() - started < 1


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(tmp_path):
    tokenizer = load_tokenizer(tiny.save_agent(tmp_path))
    tokenizer.add_tokens(["larger", "than", "before"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="the tokenizer has 264 tokens, and the model embeds 261"):
        load_agent(tmp_path, AgentConfig(), CPU)


def test_a_tokenizer_whose_longest_text_is_no_number_encodes(tmp_path):
    file = tiny.save_agent(tmp_path) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "many"}))
    assert load_tokenizer(tmp_path)("Who?")["input_ids"]


def test_a_broken_agent_is_one_sentence_and_exit_code_2(tmp_path, call_here):
    cut_weights(tiny.save_agent(tmp_path / "agent"))
    done = call_here(tmp_path, "infer.py", "--agent", "agent", "--question", "?", "--env", "mini")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no causal language model at" in done.stderr.splitlines()[-1], done.stderr
