"""Log-likelihoods: chunks, gradients, refusals."""

import pytest
import torch
from families import tiny_ids, tiny_model

from heapr_lab.errors import HeaprLabError, LayoutError
from heapr_lab.models import likelihood
from heapr_lab.models.likelihood import final_states, iter_log_probs, token_nll


def in_chunks_of(n_tokens, monkeypatch):
    """Let the logits of so many tokens be in memory together."""
    monkeypatch.setattr(likelihood, "_chunk_tokens", lambda _model: n_tokens)


def input_gradient(model, ids):
    """Gradient of the summed nll at the embedding's output."""
    kept = []

    def keep(_module, _args, output):
        kept.append(output.detach().requires_grad_())
        return kept[0]

    with model.get_input_embeddings().register_forward_hook(keep):
        token_nll(model, ids).sum().backward()
    return kept[0].grad


@pytest.fixture
def model():
    """A tiny qwen2_moe whose parameters want no gradient."""
    return tiny_model("qwen2_moe").requires_grad_(False)


def test_shape_and_type(model):
    """One number for each predicted token; float64 of float64, float32 of bfloat16."""
    ids = tiny_ids(n_sequences=3, seq_len=9)
    nll = token_nll(model, ids)
    assert (nll.shape, nll.dtype) == ((3, 8), torch.float64)
    assert token_nll(model.bfloat16(), ids).dtype == torch.float32


def test_logits_never_exist_whole(model, monkeypatch):
    """The head sees at most so many tokens at once, in both directions.

    The gradient at the embedding is the same with the head run again in chunks.
    """
    ids, seen = tiny_ids(n_sequences=3, seq_len=9), []
    whole = input_gradient(model, ids)
    model.lm_head.register_forward_hook(
        lambda _module, _args, output: seen.append(output.shape[:-1].numel())
    )
    in_chunks_of(5, monkeypatch)
    parts = input_gradient(model, ids)
    assert max(seen) == 5
    assert sum(seen) == 2 * 24  # twice all tokens
    assert whole[:, :-1].abs().min() > 0  # the last token predicts nothing
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


def test_the_model_is_left_alone(model):
    """Neither modules nor attributes of the model are replaced."""
    before = dict(model.__dict__), dict(model.named_modules())
    token_nll(model, tiny_ids())
    assert before == (model.__dict__, dict(model.named_modules()))


def test_log_probs_come_in_chunks(model, monkeypatch):
    """They are normalised, and the chunks cover the positions in order."""
    ids = tiny_ids(n_sequences=2, seq_len=6)
    with torch.no_grad():
        states = final_states(model, ids)[:, :-1]
        nll = token_nll(model, ids)
        in_chunks_of(4, monkeypatch)
        chunks = list(iter_log_probs(model, states))
    assert [len(chunk) for chunk in chunks] == [4, 4, 2]
    log_p = torch.cat(chunks)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(10).double())
    gathered = -log_p.gather(1, ids[:, 1:].reshape(-1, 1)).view(2, 5)
    torch.testing.assert_close(gathered, nll)


def test_infinite_logits_are_an_error(model):
    """A model that overflows is an error that names the first token concerned."""
    with torch.no_grad():
        model.lm_head.weight.fill_(float("inf"))
    with pytest.raises(HeaprLabError, match=r"24 of 24 tokens.*window 0, position 1"):
        token_nll(model, tiny_ids())


def test_a_model_without_head(model):
    """A bare body is refused by name."""
    with pytest.raises(LayoutError, match="Qwen2MoeModel has no body apart"):
        token_nll(model.model, tiny_ids())
