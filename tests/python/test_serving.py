"""Fovea under transformers' generate and continuous batching: small models with random weights, whose tokens have to be those of
transformers' own implementation."""

import inspect

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fovea.transformers  # noqa: E402
from fovea import _core, _flash_cache  # noqa: E402

WINDOW = 8
SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # so that tokens depend on attention, and the best one stands out
}
ARCHITECTURES = {
    "grouped heads": ("Llama", {}),
    "a window": ("Mistral", {"sliding_window": WINDOW}),
    "a softcap, and a window in every other layer": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "sinks, and a window in every other layer": (
        "GptOss",
        {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}
LENGTHS = (5, 23, 1, 12, 40)
NEW_TOKENS = 8


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small take several times as long with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(architecture, device):
    """In float32 on the CPU, in bfloat16 on a GPU; transformers computes attention step by step."""
    name, settings = ARCHITECTURES[architecture]
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, f"{name}Config")(**SIZES, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    model.generation_config.eos_token_id = None
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def make_prompts():
    torch.manual_seed(2)
    return [torch.randint(2, SIZES["vocab_size"], (n,)).tolist() for n in LENGTHS]


def check_tokens(model, prompt, tokens):
    """In float32 tokens are those that the model's own attention chooses. In bfloat16 each is one that it rates best, up to rounding."""
    assert len(tokens) == NEW_TOKENS
    rows = torch.tensor([prompt + tokens], device=model.device)
    with torch.no_grad():
        logits = model(rows).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, rows[0, len(prompt) :, None])[:, 0]
    allowed = 0.0 if model.dtype == torch.float32 else 0.05
    assert bool((chosen >= logits.amax(1) - allowed * logits.std(1)).all())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("implementation", ["fovea", "fovea_flash_attention_3"])
def test_generate(architecture, implementation, device):
    model = make_model(architecture, device)
    prompts = make_prompts()
    longest = max(LENGTHS)
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in LENGTHS], device=device)
    if implementation == "fovea":
        model.set_attn_implementation("fovea")
    else:
        fovea.transformers.use_for_serving(model)
    _core.clear_plans()
    found = model.generate(padded, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert _core.plan_count() > 0
    model.set_attn_implementation("eager")
    for prompt, row in zip(prompts, found[:, longest:].tolist(), strict=True):
        check_tokens(model, prompt, row)


def serve(model, prompts):
    """The tokens that continuous batching gives each prompt, with few pages of few tokens, so that prompts are divided into chunks, and
    wait for pages that others give back."""
    configuration = getattr(transformers, "ContinuousBatchingConfig", None)
    if configuration is None or "page_size" not in inspect.signature(configuration).parameters:
        pytest.skip(f"transformers {transformers.__version__} has no ContinuousBatchingConfig with a page_size")
    fovea.transformers.use_for_serving(model)
    _core.clear_plans()
    settings = configuration(page_size=16, num_blocks=24, max_batch_tokens=16, max_requests_per_batch=4)
    generation = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=settings)
    assert _core.plan_count() > 0
    model.set_attn_implementation("eager")
    by_prompt = {tuple(each.prompt_ids): each.generated_tokens for each in found.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_continuous_batching(architecture, device):
    model = make_model(architecture, device)
    prompts = make_prompts()
    for prompt, tokens in zip(prompts, serve(model, prompts), strict=True):
        check_tokens(model, prompt, tokens)


def test_continuous_batching_over_pages_on_the_cpu(monkeypatch):
    """transformers gives tables of pages to steps of decoding on GPUs alone, unless it does not ask."""
    initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization")
    if not hasattr(initialization, "ensure_decode_fast_path_is_available"):
        pytest.skip(f"transformers {transformers.__version__} asks elsewhere")
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *arguments: None)
    steps = []
    attend = _flash_cache.attend

    def counted(*arguments, **settings):
        steps.append(arguments[0].shape[0])
        return attend(*arguments, **settings)

    monkeypatch.setattr(_flash_cache, "attend", counted)
    model = make_model("grouped heads", "cpu")
    prompts = make_prompts()
    for prompt, tokens in zip(prompts, serve(model, prompts), strict=True):
        check_tokens(model, prompt, tokens)
    assert len(steps) > NEW_TOKENS and max(steps) > 1


def test_a_cache_of_continuous_batching_needs_the_other_name():
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="use_for_serving"):
        fovea.transformers.attention_forward(None, x, x, x, None, cache=object())
