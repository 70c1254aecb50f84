"""The models of a training: what is loaded, and how often it is checked."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from prompt_r1.environments.sources import Caller
from prompt_r1.environments.specs import check_environment
from prompt_r1.errors import FatalEnvError, Resumable, UsageError
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.lora import adapters_of
from prompt_r1.model.packing import pack
from prompt_r1.pair import agent as agent_file
from prompt_r1.pair.named_agent import resolve_agent
from prompt_r1.settings.train import TrainConfig
from prompt_r1.training import start
from prompt_r1.training.models import layout_of
from prompt_r1.training.preflight import ChosenTraining
from prompt_r1.training.run import Run
from prompt_r1.training.signals import Interrupt
from prompt_r1.training.start import open_parts
from prompt_r1.types import Message
from tests.support import tiny
from tests.support.games import CPU, ONE_RANK, Learner, random_scored_games, record_logprobs_of, siblings

ADAPTERS = TrainConfig(adapter_rank=4, data=("mini:ood",), env="mini")


def test_a_model_is_checked_when_its_agent_is_loaded_and_not_again(tmp_path, monkeypatch):
    """The check takes forwards of the whole model; the reference has the same weights."""
    checked = []
    check_model = agent_file.check_model
    monkeypatch.setattr(agent_file, "check_model", lambda policy: checked.append(check_model(policy)))
    run = run_of(tmp_path, TrainConfig(temperature=0.7, data=("mini:ood",), env="mini"))
    assert len(checked) == 1 and run.agent.policy.temperature == run.reference.temperature == 0.7
    assert run.reference is not run.policy
    assert not any(weight.requires_grad for weight in run.reference.parameters())


def run_of(folder, config: TrainConfig, ranks: Ranks = ONE_RANK) -> Run:
    agent = tiny.save_agent(folder / "agent")
    config = replace(config, agent=str(agent), device="cpu")
    chosen = ChosenTraining(config, resolve_agent(config.agent), check_environment(config.env, config))
    with asyncio.Runner() as runner:
        return open_parts(chosen, folder, ranks, runner, Interrupt())


class FirstOfTwo(Ranks):
    """A rank for whose parts of a run the other one need not exist."""

    def gather(self, item):
        return [item] * self.count


def test_the_ranks_of_a_run_share_its_budget(tmp_path):
    config = TrainConfig(max_env_calls=6, data=("mini:ood",), env="mini", kl_coef=0.0)
    run = run_of(tmp_path, config, FirstOfTwo(0, 2, CPU))
    with pytest.raises(Resumable, match="--max-env-calls"):
        for number in range(6):
            asyncio.run(run.environment.ask([Message(role="user", content=f"{number}?")], Caller()))
    assert run.environment.budget.charged.calls == 3


def test_weights_are_sharded_on_gpus_but_not_in_float32_on_one_rank_or_beside_adapters():
    """In float32 on one rank, agent and learner are one model, which would be loaded twice."""
    config, gpu = TrainConfig(agent="tiny", data=("own",)), torch.device("cuda")
    assert layout_of(config, gpu, world_size=1) == "hsdp"
    assert layout_of(config, CPU, world_size=8) == "ddp"
    assert layout_of(replace(config, adapter_rank=4), gpu, world_size=8) == "ddp"
    assert layout_of(replace(config, dtype="float32"), gpu, world_size=1) == "ddp"
    assert layout_of(replace(config, dtype="float32"), gpu, world_size=8) == "hsdp"
    assert layout_of(replace(config, dtype="float32", parallel="fsdp"), CPU, world_size=1) == "fsdp"


def test_one_copy_of_the_weights_plays_and_learns_and_is_the_reference_without_its_adapters(tmp_path):
    """After an update: the reference still scores like the untrained agent, bit for bit."""
    run = run_of(tmp_path, ADAPTERS)
    assert run.agent.policy is run.policy
    packed = pack([siblings(0, 3)], CPU)
    with torch.no_grad():
        start = tiny.policy()(packed).logprobs
        assert torch.equal(run.policy(packed).logprobs, start)
    games = record_logprobs_of(run.policy, random_scored_games())
    learner = Learner(run.policy, lr=1e-2, kl_coef=0.1)
    learner.reference_logprobs = run.reference_logprobs
    assert learner.learn([games, games])["kl"] > 0
    assert torch.equal(run.reference_logprobs(packed), start)
    with torch.no_grad():
        assert not torch.equal(run.policy(packed).logprobs, start)
    adapted = adapters_of(run.policy.model)
    factors = {id(weight) for layer in adapted.values() for weight in (layer.a, layer.b)}
    assert {id(weight) for weight in learner.optimizer.state} == factors and len(factors) == 28


def test_without_a_kl_there_is_no_reference(tmp_path):
    for rank in (0, 4):
        run = run_of(tmp_path, replace(ADAPTERS, kl_coef=0.0, adapter_rank=rank))
        assert run.reference is None


def test_a_model_that_reads_the_weights_of_its_layers_itself_is_a_usage_error(tmp_path, monkeypatch):
    """Then the adapter would not be applied, or an AttributeError would end the first forward."""

    def forward(self, x):
        return x @ self.up_proj.weight.T @ self.down_proj.weight.T

    monkeypatch.setattr(Qwen3MLP, "forward", forward)
    with pytest.raises(UsageError, match=r"not supported: its forward fails \(.*weight"):
        run_of(tmp_path, ADAPTERS)


def test_an_environment_that_does_not_answer_is_reported_before_a_model_is_loaded(tmp_path, monkeypatch):
    """Loading a large model takes minutes, after which a missing key would end the run."""

    def no_answer(*_: object) -> None:
        raise FatalEnvError("no key")

    monkeypatch.setattr(start, "check_on_first_rank", no_answer)
    monkeypatch.setattr(start, "load_models", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(FatalEnvError, match="no key"):
        run_of(tmp_path, ADAPTERS)
