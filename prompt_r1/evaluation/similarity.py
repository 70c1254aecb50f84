"""SSim: cosine similarity of embeddings.

The encoder is all-MiniLM-L6-v2, run with plain transformers in float32. An embedding is the mean of the last
hidden states of the first 256 tokens, L2-normalised. sentence-transformers gives the same numbers. If the
encoder is missing, an error is raised. There is no fallback, because another measure would not be comparable.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from prompt_r1.errors import UsageError

REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
MAX_TOKENS = 256  # This is the setting of sentence-transformers. The model's tokenizer.json has 128.


class SentenceEncoder:
    """Embeds texts as unit vectors."""

    def __init__(self, source: Path | str, *, device: torch.device | str = "cpu") -> None:
        """Load a folder, or REPOSITORY from the hub's cache. The hub is not contacted."""
        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(source, **local)
            model = AutoModel.from_pretrained(source, use_safetensors=True, dtype=torch.float32, **local)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"--ssim-model: {source} cannot be loaded as an encoder of sentences; `hf download "
                f"{REPOSITORY}` fetches one, which --ssim-model auto finds ({str(error)[:200]})"
            ) from None
        if any("CausalLM" in name for name in model.config.architectures or ()):
            raise UsageError(f"--ssim-model {source}: a causal language model, no encoder of sentences")
        self.model = model.to(device).eval()

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], *, batch_size: int = 32) -> Tensor:
        """(texts, D) unit vectors on the CPU."""
        parts = [torch.empty(0, self.model.config.hidden_size)]
        for start in range(0, len(texts), batch_size):
            batch = list(texts[start : start + batch_size])
            tokens = self.tokenizer(
                batch, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            ).to(self.model.device)
            hidden = self.model(**tokens).last_hidden_state  # (B, T, D)
            mask = tokens["attention_mask"].unsqueeze(-1)  # (B, T, 1)
            means = (hidden * mask).sum(1) / mask.sum(1)
            parts.append(torch.nn.functional.normalize(means, dim=-1).cpu())
        return torch.cat(parts)

    def similarity(
        self, predictions: Sequence[str], answers: Sequence[Sequence[str]], *, official: bool = False
    ) -> list[float]:
        """SSim of each prediction with its best gold answer.

        If one of the two texts is empty, SSim is 0 by the strict rules and 1 by the official ones.
        """
        texts = list(predictions)
        for golds in answers:
            texts += golds
        texts = list(dict.fromkeys(texts))  # Each text is embedded once.
        vectors = dict(zip(texts, self.embed(texts), strict=True))  # each (D,)

        def cosine(prediction: str, gold: str) -> float:
            if not prediction.strip() or not gold.strip():
                return float(official)
            return float(vectors[prediction] @ vectors[gold])

        best = []
        for prediction, golds in zip(predictions, answers, strict=True):
            best.append(max((cosine(prediction, gold) for gold in golds), default=0.0))
        return best


def load_encoder(name: str, device: torch.device) -> SentenceEncoder | None:
    """Load the encoder of --ssim-model: a folder, or "auto" for REPOSITORY in the hub's cache; "": none."""
    if not name:
        return None
    return SentenceEncoder(REPOSITORY if name == "auto" else Path(name), device=device)
