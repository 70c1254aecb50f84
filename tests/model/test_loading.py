"""Broken and hostile model folders are refused in one sentence, and nothing in them is executed."""

import gc
import json
import pickle
import shutil
import time
import weakref
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prompt_r1.errors import UsageError, is_out_of_memory
from prompt_r1.model import loading, machine
from prompt_r1.model.loading import load_policy, load_tokenizer
from prompt_r1.model.machine import memory_left
from prompt_r1.pair.agent import load_agent, load_codec
from prompt_r1.settings.agent import AgentConfig
from prompt_r1.settings.train import PRESETS, TrainConfig
from tests.support import tiny
from tests.support.damage import Attack, out_of_memory
from tests.support.games import CPU

WEIGHTS = "model.safetensors"


Break = Callable[[Path], object]


def written(name: str, text: str) -> Break:
    return lambda folder: (folder / name).write_text(text)


def removed(*patterns: str) -> Break:
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)]


def config(**changes: object) -> Break:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def save(folder: Path) -> None:
        change(tensors := load_file(folder / WEIGHTS))
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return save


def cut_weights(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def pickled_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(folder / "executed")))


def index_to_a_pickle(folder: Path) -> None:
    (folder / "x.bin").write_bytes(pickle.dumps(Attack(folder / "executed")))
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / WEIGHTS), "x.bin")}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()


def foreign_code(folder: Path) -> None:
    (folder / "code.py").write_text(f"open({str(folder / 'executed')!r}, 'w').write('executed')")
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config(auto_map=names, model_type="nosuch")(folder)


def larger_in_float32_than_memory(folder: Path) -> None:
    config(dtype="bfloat16")(folder)
    with (folder / "model-2.safetensors").open("wb") as file:
        file.truncate(memory_left(CPU) * 3 // 4)  # takes no room on the disk


QUANTISED = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NORM, BIAS = "model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.bias"
BROKEN: list[tuple[Break, str]] = [
    (removed("config.json"), "config.json"),
    (written("config.json", "[1, 2"), "config.json"),
    (config(model_type="nosuch"), "nosuch"),
    (config(hidden_size="a"), "expected int, got str"),
    (config(rope_parameters={"rope_type": "x"}), "KeyError: 'x'"),
    (removed(WEIGHTS), WEIGHTS),
    (written(WEIGHTS, ""), "header"),
    (cut_weights, "incomplete"),
    (pickled_weights, WEIGHTS),
    (index_to_a_pickle, "no causal language model"),
    (foreign_code, "custom code"),
    (
        config(intermediate_size=72),
        "of other shapes than config.json says: 6, such as model.layers.0.mlp.down_proj.weight",
    ),
    (weights(lambda tensors: tensors.pop(NORM)), f"lack tensors of the model: 1, such as {NORM}"),
    (
        weights(lambda tensors: tensors.update({BIAS: torch.ones(64)})),
        f"does not use, in layers that it does use: 1, such as {BIAS}",
    ),
    # With accelerate they were trained, and exported in a form that loads as other weights.
    (config(quantization_config=QUANTISED), "are quantised"),
    (larger_in_float32_than_memory, "GB of memory, and"),
]


def sentencepiece_only(folder: Path) -> None:
    removed("tokenizer*")(folder)
    (folder / "tokenizer.model").write_bytes(b"\n\1")
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": tiny.QWEN3_LIKE_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def foreign_tokenizer(folder: Path) -> None:
    (folder / "mine.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\nclass Mine: pass\n")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"model_type": "mine", **settings}))


def cut_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:500])


BROKEN_TOKENIZERS: list[tuple[Break, str]] = [
    (removed("tokenizer*", "chat_template*"), "there is no tokenizer.json"),
    (sentencepiece_only, "there is no tokenizer.json (sentencepiece reads a tokenizer.model"),
    (cut_tokenizer, "Unterminated string"),
    (written("tokenizer_config.json", "[]"), "no tokenizer at"),
    (foreign_tokenizer, "custom code"),
    (written("chat_template.jinja", ""), "has no chat template: give it one"),
    (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff\xfe"), "utf-8"),
]
LOADERS = {
    "model": lambda folder: load_policy(folder, device=CPU),
    "tokenizer": lambda folder: load_codec(folder, TrainConfig(**PRESETS["mini"])),
}


@pytest.mark.parametrize(
    ("part", "break_it", "cause"),
    [*(("model", *row) for row in BROKEN), *(("tokenizer", *row) for row in BROKEN_TOKENIZERS)],
    ids=[cause for _, cause in [*BROKEN, *BROKEN_TOKENIZERS]],
)
def test_a_broken_folder_is_refused_with_its_cause_and_nothing_is_executed(tmp_path, part, break_it, cause):
    LOADERS[part](tiny.save_agent(tmp_path))
    break_it(tmp_path)
    with pytest.raises(UsageError) as refused:
        LOADERS[part](tmp_path)
    message = str(refused.value)
    assert str(tmp_path) in message and cause in message and "\n" not in message, message
    assert not (tmp_path / "executed").exists()


def test_a_hub_id_is_refused_at_once_where_the_hub_cannot_be_reached(monkeypatch):
    """A bug: transformers retried for a minute before it gave up on a mistyped id."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(UsageError, match=r"no folder 'no/such'.*Hub"):
        load_tokenizer("no/such")
    assert time.monotonic() - started < 20


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(tmp_path):
    tokenizer = load_tokenizer(tiny.save_agent(tmp_path))
    tokenizer.add_tokens(["one more"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"tokenizer .* 262 tokens.* model .* 261"):
        load_agent(tmp_path, AgentConfig(), CPU)


def test_the_memory_that_a_model_needs_is_that_of_all_its_files(tmp_path, monkeypatch):
    tiny.save_agent(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tiny.model().save_pretrained(tmp_path, max_shard_size="30KB")
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 1
    monkeypatch.setattr(loading, "memory_left", lambda device: sum(sizes))
    load_policy(tmp_path, device=CPU)
    monkeypatch.setattr(loading, "memory_left", lambda device: sum(sizes) - 1)
    with pytest.raises(UsageError, match="GB of memory"):
        load_policy(tmp_path, device=CPU)


def test_weights_in_a_form_that_is_not_loaded_need_no_memory(tmp_path, monkeypatch):
    """A bug: Mistral's consolidated.safetensors counted too, so a GPU with room for the model was refused."""
    size = (tiny.save_agent(tmp_path) / WEIGHTS).stat().st_size
    shutil.copy(tmp_path / WEIGHTS, tmp_path / "consolidated.safetensors")
    monkeypatch.setattr(loading, "memory_left", lambda device: size)
    load_policy(tmp_path, device=CPU)


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs(tmp_path, monkeypatch):
    file = tiny.save_agent(tmp_path) / WEIGHTS
    monkeypatch.setattr(loading, "memory_left", lambda device: file.stat().st_size // 4)
    with pytest.raises(UsageError, match=r"needs \d\.\d\d GB of memory, and \d\.\d\d GB are free"):
        load_policy(tmp_path, device=CPU)


def test_a_model_that_nobody_holds_any_longer_is_freed_before_the_next_one_is_loaded(tmp_path, monkeypatch):
    """An engine is in a reference cycle, so the memory of the last agent seemed to be in use."""
    tiny.save_agent(tmp_path)

    class Earlier:
        def __init__(self) -> None:
            self.cycle = self

    def memory_left(device: torch.device) -> int:
        assert earlier() is None
        return 10**12

    monkeypatch.setattr(loading, "memory_left", memory_left)
    gc.disable()  # as if no automatic collection came in between
    try:
        earlier = weakref.ref(Earlier())
        load_policy(tmp_path, device=CPU)
    finally:
        gc.enable()


class GPU:
    """The memory of a GPU as torch counts it. Like torch, it resets no peak before CUDA is initialised."""

    total = 80 * 10**9

    def __init__(self) -> None:
        self.initialised = False
        self.allocated = self.peak = 0

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def free(self, size: int) -> None:
        self.allocated -= size

    def reset_peak(self, device: torch.device) -> None:
        assert self.initialised, "Invalid device argument: did you call init?"
        self.peak = self.allocated


@pytest.fixture
def gpu(monkeypatch) -> GPU:
    """A GPU that looks like `cuda` to `load_policy`. The models stay on the CPU."""
    gpu = GPU()
    monkeypatch.setattr(torch.cuda, "init", lambda: setattr(gpu, "initialised", True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu.total - gpu.allocated, gpu.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gpu.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: gpu.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", gpu.reset_peak)
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, device: model)
    return gpu


def test_a_model_has_the_room_of_an_earlier_one_that_is_gone(tmp_path, gpu):
    """A bug: the peak of the first agent with its KV cache counted for ever, so a second one was refused."""
    device = torch.device("cuda")
    file = tiny.save_agent(tmp_path) / WEIGHTS
    load_policy(tmp_path, device=device)
    gpu.allocate(gpu.total - file.stat().st_size + 1)  # a KV cache
    with pytest.raises(UsageError, match="GB of memory"):
        load_policy(tmp_path, device=device)
    gpu.free(gpu.allocated)
    load_policy(tmp_path, device=device)
    assert memory_left(device) == gpu.total
    gpu.allocate(10**9)  # an update
    gpu.free(10**9)
    assert memory_left(device) == gpu.total - 10**9, "the next update needs the room again"


def test_memory_that_runs_out_while_a_model_is_loaded_is_not_a_broken_folder(tmp_path, monkeypatch):
    """On a CPU torch raises a RuntimeError, which was shown as "no causal language model at …"."""
    tiny.save_agent(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", out_of_memory)
    with pytest.raises(RuntimeError) as error:
        load_policy(tmp_path, device=CPU)
    assert is_out_of_memory(error.value)


def test_games_that_are_longer_than_a_model_was_made_for_are_said_once(tmp_path):
    """A bug: a model of 64 positions played games of 78 tokens without a word."""
    file = tiny.save_agent(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 64}))
    load_agent(tmp_path, AgentConfig(max_tokens=64), CPU)
    with pytest.warns(UserWarning, match="78 tokens, .*model at .* 64") as said:
        load_agent(tmp_path, AgentConfig(max_tokens=78), CPU)
    assert len(said) == 1


def test_an_agent_scores_and_samples_only_the_tokens_of_its_tokenizer(tmp_path):
    model = tiny.model()
    model.resize_token_embeddings(300, mean_resizing=False)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    agent = load_agent(tmp_path, AgentConfig(), CPU)
    assert agent.policy.vocabulary == len(tiny.tokenizer()) == 261
    assert agent.policy.logits(torch.ones(1, 32)).shape == (1, 261)


def test_a_tokenizer_whose_longest_text_is_no_number_encodes(tmp_path):
    file = tiny.save_agent(tmp_path) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "many"}))
    assert load_tokenizer(tmp_path)("Who?")["input_ids"]


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch):
    """Eight ranks compared their models with all of the memory at the same moment, and could exhaust it."""
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: "MemTotal: 9\nMemAvailable:   8000 kB\n")
    monkeypatch.setattr(machine, "CGROUPS", Path("no cgroups"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert memory_left(CPU) == 1000 * 1024


def use_memory(group: Path, *, limit: str) -> None:
    """Let the processes of a cgroup use 6 MB, of which 1 MB is page cache."""
    (group / "memory.current").write_text("6000000\n")
    (group / "memory.stat").write_text(
        "anon 4000000\nfile 2500000\ninactive_file 700000\nactive_file 300000\n"
    )
    (group / "memory.max").write_text(f"{limit}\n")


def test_the_memory_of_a_container_ends_at_its_limit(tmp_path, monkeypatch):
    """A bug: the free memory of the host counted, so a model was loaded until the kernel killed the run."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    use_memory(tmp_path, limit="max")
    assert memory_left(CPU) > 8_000_000
    use_memory(tmp_path, limit="8000000")
    assert memory_left(CPU) == 3_000_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory_left(CPU) == 1_500_000


def test_the_memory_of_a_job_ends_at_its_limit_or_at_that_of_a_group_around_it(tmp_path, monkeypatch):
    """A bug: only the root of the tree was read, so `srun --mem 8G` had all memory of its node."""
    own = tmp_path / "own"
    own.write_text("1:cpu:/slurm\n0::/slurm/job/step\n")
    monkeypatch.setattr(machine, "OWN_CGROUP", own)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    step = tmp_path / "slurm" / "job" / "step"
    step.mkdir(parents=True)
    use_memory(step, limit="max")
    use_memory(step.parent, limit="8000000")
    assert memory_left(CPU) == 3_000_000
    use_memory(step, limit="7500000")
    assert memory_left(CPU) == 2_500_000
    use_memory(tmp_path / "slurm", limit="7000000")
    assert memory_left(CPU) == 2_000_000


def test_the_memory_that_a_model_of_the_hub_needs_is_known_from_its_cached_files(tmp_path, monkeypatch):
    """A bug: a hub id is no folder, so its model seemed to need nothing."""
    folder = tiny.save_agent(tmp_path / "snapshot")
    monkeypatch.setattr(loading, "cached_file", lambda name, file: str(folder / file))
    config = AutoConfig.from_pretrained(folder)
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda *_, **__: config)
    monkeypatch.setattr(loading, "memory_left", lambda device: (folder / WEIGHTS).stat().st_size - 1)
    with pytest.raises(UsageError, match=r"'organisation/model' needs .* GB of memory"):
        load_policy("organisation/model", device=CPU)


def test_a_model_in_the_cache_of_the_hub_is_loaded_without_asking_the_hub(monkeypatch):
    """Cluster nodes often have no network. The Hub is asked about a model that is not cached."""
    asked: list[str] = []

    def hub(name: str, file: str) -> bool:
        asked.append(name)
        return True

    monkeypatch.setattr(loading, "file_exists", hub)
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda name, file: "cached" in name)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda *_, **__: deepcopy(tiny.tokenizer()))
    load_tokenizer("organisation/cached")
    assert not asked
    load_tokenizer("organisation/new")
    assert asked == ["organisation/new"]
