"""The digest that identifies a model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from prompt_r1.errors import UsageError
from prompt_r1.model.model_digest import FIRST_NUMBERS, digest_of_model
from tests.support import tiny


def test_the_start_of_a_run_is_identified_by_its_weights(tmp_path):
    """The folder of --agent was replaced by another model of the same shape, and the run went on with it."""
    first = tiny.save_agent(tmp_path / "first")
    digest = digest_of_model(first)
    assert digest_of_model(shutil.copytree(first, tmp_path / "copy")) == digest
    path = first / "model.safetensors"
    tensors = load_file(path)
    trained = {"model.norm.weight": tensors["model.norm.weight"] + 1e-6}
    for change in (trained, {"another.bias": torch.zeros(2)}):
        save_file(tensors | change, path)
        assert digest_of_model(first) != digest
    save_file(tensors, path, metadata={"format": "pt", "of": "another writer"})
    assert digest_of_model(first) == digest


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_the_start_of_a_run_is_identified_by_its_configuration_and_tokenizer(name, tmp_path):
    """Other frequencies of RoPE, another tokenizer or chat template: the run went on without a word."""
    start = tiny.save_agent(tmp_path / "start")
    digest = digest_of_model(start)
    values = json.loads((start / name).read_text())
    (start / name).write_text(json.dumps(values | {"rope_theta": 1.0}))
    assert digest_of_model(start) != digest


def test_of_each_tensor_only_the_first_numbers_are_read_to_identify_a_start(tmp_path):
    """A digest of all numbers of a large model would take minutes at each start."""
    start = tiny.save_agent(tmp_path / "start")
    digest = digest_of_model(start)
    path = start / "model.safetensors"
    tensors = load_file(path)
    embeddings = tensors["model.embed_tokens.weight"].flatten()
    changed = {}
    for position in (FIRST_NUMBERS - 1, FIRST_NUMBERS):
        numbers = embeddings.clone()
        numbers[position] += 1
        changed[position] = numbers.view_as(tensors["model.embed_tokens.weight"])
    save_file(tensors | {"model.embed_tokens.weight": changed[FIRST_NUMBERS]}, path)
    assert digest_of_model(start) == digest
    save_file(tensors | {"model.embed_tokens.weight": changed[FIRST_NUMBERS - 1]}, path)
    assert digest_of_model(start) != digest


def test_a_broken_file_of_weights_is_named(tmp_path):
    start = tiny.save_agent(tmp_path / "start")
    path = start / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"model\.safetensors cannot be read"):
        digest_of_model(start)
