"""Conversion of GPT-2's weights to and from Hugging Face's format: exact, with the same logits."""

import pytest
import torch
from torch import Tensor

from tests.models.test_gpt2 import batch, whole_model
from torchtitan_scape.data import BYTE_TOKENIZER
from torchtitan_scape.models.gpt2 import GPT2, GPT2_ARGS, GPT2StateDictAdapter

ARGS = GPT2_ARGS["tiny"]


def uneven() -> GPT2:
    """Return a model of distinct weights and sharp attention, in which a wrong order of heads changes the logits."""
    model, generator = whole_model(), torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        for name, parameter in model.named_parameters():
            if name.endswith(("wq.weight", "wk.weight")):
                parameter.mul_(8)
    return model


@pytest.mark.parametrize("folder", [None, "/nowhere", str(BYTE_TOKENIZER)])
def test_round_trip_is_exact(folder: str | None) -> None:
    """Also of the rows of the embedding without a token: without them the softmax, and thus the loss, is another."""
    ours, adapter = dict(uneven().state_dict()), GPT2StateDictAdapter(ARGS, folder)
    theirs = adapter.to_hf(ours)
    assert theirs["transformer.h.1.attn.c_attn.weight"].shape == (64, 192)
    assert all(value.is_contiguous() for value in theirs.values()) and "lm_head.weight" not in theirs
    back = adapter.from_hf(theirs)
    assert back.keys() == ours.keys() and all(torch.equal(back[name], ours[name]) for name in ours)


def test_missing_rows_become_the_mean() -> None:
    """Of a published GPT-2, whose embedding has no further rows than tokens."""
    adapter = GPT2StateDictAdapter(ARGS, None)
    theirs = adapter.to_hf(dict(uneven().state_dict()))
    rows = theirs["transformer.wte.weight"][:258]
    model = uneven()
    model.load_state_dict(adapter.from_hf({**theirs, "transformer.wte.weight": rows}))
    assert torch.equal(model.tok_embeddings.weight[:258], rows)
    assert torch.allclose(model.tok_embeddings.weight[258:], rows.mean(dim=0).expand(2, -1))
    with torch.no_grad():
        logits = model(batch()[0])
    more = logits.logsumexp(dim=-1) - logits[..., :258].logsumexp(dim=-1)
    assert 0 < float(more.max()) <= 2 / 258


def test_older_keys_are_accepted_and_an_untied_head_is_refused() -> None:
    ours, adapter = dict(uneven().state_dict()), GPT2StateDictAdapter(ARGS, None)
    old: dict[str, Tensor] = {name.removeprefix("transformer."): v for name, v in adapter.to_hf(ours).items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 128, 128).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    old["lm_head.weight"] = old["wte.weight"].clone()
    back = adapter.from_hf(old)
    assert back.keys() == ours.keys() and all(torch.equal(back[name], ours[name]) for name in ours)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from wte.weight.*tie it"):
        adapter.from_hf({**old, "lm_head.weight": old["wte.weight"] + 1})
    with pytest.raises(KeyError, match="rotary"):
        adapter.from_hf({**old, "h.0.attn.rotary.weight": torch.zeros(2)})


def test_transformers_has_the_same_logits() -> None:
    transformers = pytest.importorskip("transformers")
    model, adapter = uneven(), GPT2StateDictAdapter(ARGS, None)
    sizes = {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=ARGS.vocab_size, **sizes, **drops)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    missing, unexpected = theirs.load_state_dict(adapter.to_hf(dict(model.state_dict())), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    theirs.tie_weights()
    with torch.no_grad():
        tokens = batch()[0]
        expected, found = theirs(tokens).logits, model(tokens)
        assert float((found - expected).abs().max()) < 1e-5
        # The way back, from the state dict of transformers.
        again = GPT2(ARGS)
        again.load_state_dict(adapter.from_hf(dict(theirs.state_dict())))
        assert torch.equal(again(tokens), found)
        # A control: exchanged heads change the logits.
        wq = model.layers["0"].attention.wq
        wq.weight.copy_(wq.weight.view(4, 16, 64).transpose(0, 1).reshape(64, 64))
        assert float((model(tokens) - expected).abs().max()) > 1e-2
