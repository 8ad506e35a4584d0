"""The promise of reproducible serving: tokens and logits, bit by bit, do not depend on the block size, the chunk
size, the batch, or on being preempted; on every backend, weight type and instruction set at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.backends.native import NativeBackend, available_isas
from octavo.backends.numpy_ref import NumpyBackend
from octavo.backends.ops import Backend
from octavo.config import EngineConfig
from octavo.core import invariants
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import assemble
from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest
from octavo.models.config import ModelConfig
from octavo.weights.checkpoint import expected_shapes
from octavo.weights.config_gguf import gguf_name
from octavo.weights.loader import open_checkpoint

TINY = Path(__file__).parent.parent / "golden" / "tiny"
Result = tuple[list[list[int]], dict[tuple[int, int], str]]  # tokens by request; (request, position) → hash

NATIVE = [pytest.param(lambda isa=isa: NativeBackend(isa=isa), id=isa) for isa in available_isas()]
BACKENDS = [pytest.param(NumpyBackend, id="numpy"), *NATIVE]


def record_logits(engine: Engine) -> dict[tuple[int, int], str]:
    """Hash every row of logits that is sampled from, under its sequence and output position."""
    seen: dict[tuple[int, int], str] = {}
    sampler = engine.executor._sampler
    original = sampler.sample

    def sample(states, logits, best, peaks):
        for state, row in zip(states, logits, strict=True):
            seen[state.seq_id - 1, state.position] = hashlib.sha1(row.tobytes()).hexdigest()
        return original(states, logits, best, peaks)

    sampler.sample = sample
    return seen


def serve(
    path: Path,
    backend: Backend,
    prompts: list[list[int]],
    num_out: int,
    one_by_one: bool = False,
    n: int = 1,
    **options,
) -> tuple[Result, Engine]:
    """Run all prompts, at once or one after another."""
    checkpoint = open_checkpoint(path)
    defaults = {"num_blocks_override": 4096 // options.get("block_size", 16), "max_num_batched_tokens": 256}
    engine = assemble(EngineConfig(**(defaults | {"max_num_seqs": 64} | options)), checkpoint, backend)
    checkpoint.close()
    seen = record_logits(engine)
    tokens: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True, n=n)
    for i, prompt in enumerate(prompts):
        engine.add_request(GenerateRequest(str(i), prompt, params))
        if one_by_one:
            drain(engine, tokens)
    drain(engine, tokens)
    invariants.check_idle(engine.scheduler.allocator)
    return (tokens, seen), engine


def drain(engine: Engine, tokens: list[list[int]]) -> None:
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.finish_reason != "error", delta.error
            tokens[int(delta.request_id)] += delta.token_ids


def prompts_of(count: int, vocab: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocab, rng.integers(1, longest)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def baseline() -> Callable[..., Result]:
    """The same requests one by one, whole prompts, block size 16; computed once for each setting."""
    known: dict[tuple, Result] = {}

    def of(model: str, make: Callable[[], Backend], dtype: str, kv: str) -> Result:
        backend = make()
        key = (model, backend.description, dtype, kv)
        if key not in known:
            options = {"weight_dtype": dtype, "kv_cache_dtype": kv}
            known[key], _ = serve(TINY / model, backend, PROMPTS, 12, one_by_one=True, **options)
        return known[key]

    return of


WITH_INT8_WEIGHTS = pytest.mark.parametrize("kv", ["fp16", "int8"])
PROMPTS = prompts_of(9, vocab=125, longest=40)
SHAPES = [
    *(pytest.param({"block_size": b}, id=f"block{b}") for b in (1, 2, 8, 16, 32, 128)),
    *(
        pytest.param({"max_num_batched_tokens": c, "max_num_seqs": min(c, 64)}, id=f"chunk{c}")
        for c in (1, 2, 3, 7, 64)
    ),
    pytest.param({"block_size": 1, "num_blocks_override": 60}, id="preempted-block1"),
    pytest.param({"block_size": 4, "num_blocks_override": 15}, id="preempted-block4"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "kv"), [("float32", "fp32"), ("int8", "fp16"), ("int8", "int8")])
@pytest.mark.parametrize("make", BACKENDS)
def test_shape_of_serving_changes_no_bit(baseline, make, dtype, kv, shape):
    result, engine = serve(
        TINY / "llama", make(), PROMPTS, 12, weight_dtype=dtype, kv_cache_dtype=kv, **shape
    )
    tokens, seen = baseline("llama", make, dtype, kv)
    assert result[0] == tokens
    assert result[1] == seen
    if "num_blocks_override" in shape:
        assert engine.scheduler.counters.num_preemptions > 0


HALVES = {  # of the types that gguf cannot make: values of about 0.2 and their places
    Q.Q4_K: {0: 1e-3, 2: 7.5e-3},
    Q.Q5_K: {0: 5e-4, 2: 7.5e-3},
    Q.Q6_K: {208: 1.5e-4},
}
KINDS = {  # by the end of the name; all others are Q4_1
    "0.q": Q.Q4_K,
    "0.k": Q.Q4_K,
    "0.v": Q.Q6_K,
    "0.o": Q.Q5_1,
    "0.gate": Q.Q5_K,
    "0.up": Q.Q5_K,
    "0.down": Q.Q6_K,
    "1.o": Q.Q4_0,
    "1.down": Q.Q8_0,
    "lm_head": Q.Q5_0,
}


def quantised(rng: np.random.Generator, shape: tuple[int, ...], kind: Q) -> np.ndarray:
    """Random stored bytes [out, row_bytes]."""
    if kind not in HALVES:
        return gguf.quants.quantize((rng.standard_normal(shape) * 0.2).astype(np.float32), kind)
    length, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // length, size)).astype(np.uint8)
    for start, value in HALVES[kind].items():
        blocks[..., start : start + 2] = np.float16([value]).view(np.uint8)
    return blocks.reshape(shape[0], -1)


@pytest.fixture(scope="module")
def quantised_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with a random tiny Llama of 128 tokens and weights of every type that has a kernel."""
    config = ModelConfig(
        model_type="llama",
        hidden_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        intermediate_size=512,
        vocab_size=128,
        max_position=512,
    )
    rng = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("quantised") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for name, shape in expected_shapes(config):
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), rng.standard_normal(shape).astype(np.float32))
            continue
        kind = KINDS.get(name.removeprefix("layers."), Q.Q4_1)
        writer.add_tensor(gguf_name(name), quantised(rng, shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", BACKENDS)
def test_weights_as_stored_keep_the_promise(baseline, quantised_path, make, shape):
    result, engine = serve(quantised_path, make(), PROMPTS, 12, weight_dtype="native", **shape)
    assert result == baseline(str(quantised_path), make, "native", "int8")
    if "num_blocks_override" in shape:
        assert engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_number_of_threads_changes_no_bit_of_weights_as_stored(baseline, quantised_path, num_threads, kv):
    backend = NativeBackend(num_threads=num_threads)
    result, _ = serve(quantised_path, backend, PROMPTS, 12, weight_dtype="native", kv_cache_dtype=kv)
    assert result == baseline(str(quantised_path), NativeBackend, "native", kv)


@pytest.mark.parametrize("model", ["gemma3", "mistral_window", "qwen2", "qwen3", "llama_yarn"])
@pytest.mark.parametrize("make", NATIVE)
@WITH_INT8_WEIGHTS
def test_other_families_keep_the_promise(baseline, make, model, kv):
    result, _ = serve(
        TINY / model,
        make(),
        PROMPTS,
        12,
        weight_dtype="int8",
        kv_cache_dtype=kv,
        block_size=2,
        max_num_batched_tokens=9,
        max_num_seqs=9,
    )
    assert result == baseline(model, make, "int8", kv)


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@WITH_INT8_WEIGHTS
def test_preemption_of_either_kind_changes_no_bit(baseline, make, mode, kv):
    options = {"preemption_mode": mode, "swap_space_bytes": 1 << 24, "debug": True}
    options |= {"weight_dtype": "int8", "kv_cache_dtype": kv, "block_size": 4, "num_blocks_override": 15}
    result, engine = serve(TINY / "llama", make(), PROMPTS, 12, **options)
    assert result == baseline("llama", make, "int8", kv)
    counters = engine.scheduler.counters
    assert counters.num_preemptions > 0
    assert (counters.num_preemptions_swap > 0) == (mode == "swap")


@pytest.mark.parametrize("make", [NumpyBackend, NativeBackend])
@WITH_INT8_WEIGHTS
def test_windows_keep_the_promise_when_preempted(baseline, make, kv):
    """5 groups with a window of 8 hold 5 blocks of 4 each when a chunk is 9, the full one 13 for 52 tokens."""
    num_blocks = 5 * 5 + 13
    options = {"block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 9, "kv_cache_dtype": kv}
    result, engine = serve(
        TINY / "gemma3", make(), PROMPTS, 12, num_blocks_override=num_blocks, weight_dtype="int8", **options
    )
    assert result == baseline("gemma3", make, "int8", kv)
    assert engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize(("n", "num_blocks"), [(1, 48), (1, 52), (2, 96), (2, 104)])
def test_steps_are_cut_where_the_pool_holds_windows_only_of_smaller_ones(num_blocks, n):
    """46 tokens decoded one by one hold 5 windows of 3 blocks and 12 more, but 6 times 12 if they are computed
    again, after a preemption, in one step of up to 64."""
    prompts = prompts_of(3, vocab=125, longest=7)
    options = {"block_size": 4, "max_num_batched_tokens": 64, "prefix_caching": False, "debug": True}
    (tokens, seen), _ = serve(TINY / "gemma3", NumpyBackend(), prompts, 40, n=n, **options)
    result, engine = serve(
        TINY / "gemma3", NumpyBackend(), prompts, 40, n=n, num_blocks_override=num_blocks, **options
    )
    assert result == (tokens, seen)
    assert engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("model", ["gemma3", "mistral_window"])
@pytest.mark.parametrize("make", [NumpyBackend, NativeBackend])
@WITH_INT8_WEIGHTS
def test_windows_keep_the_promise_on_prefix_hits(make, model, kv):
    """Prompts that begin alike for 24 tokens, three times the window."""
    start = np.random.default_rng(3).integers(3, 125, 24).tolist()
    prompts = [start + tail for tail in prompts_of(6, vocab=125, longest=12)]
    options = {"block_size": 4, "one_by_one": True, "weight_dtype": "int8", "kv_cache_dtype": kv}
    cached, engine = serve(TINY / model, make(), prompts, 12, **options)
    assert cached == serve(TINY / model, make(), prompts, 12, prefix_caching=False, **options)[0]
    assert engine.scheduler.counters.num_prompt_tokens_cached == 5 * 24


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@WITH_INT8_WEIGHTS
def test_number_of_threads_changes_no_bit(baseline, num_threads, kv):
    def make() -> Backend:
        return NativeBackend(num_threads=num_threads)

    result, _ = serve(TINY / "llama", make(), PROMPTS, 12, weight_dtype="int8", kv_cache_dtype=kv)
    assert result == baseline("llama", NativeBackend, "int8", kv)


@pytest.mark.model
@pytest.mark.parametrize(
    ("dtype", "kv"),
    [("float32", "fp32"), ("int8", "fp16"), ("int8", "int8"), ("native", "fp16"), ("native", "int8")],
)
def test_smollm2_alone_in_a_crowd_in_chunks_and_preempted(default_model_path, dtype, kv):
    """Batch of 1 and of 32, chunks, odd blocks; and a pool in which all but the first are preempted."""
    common = {"weight_dtype": dtype, "kv_cache_dtype": kv}
    prompts = prompts_of(32, vocab=49000, longest=12)
    alone, _ = serve(default_model_path, NativeBackend(), prompts, 6, one_by_one=True, **common)
    for options in (
        {},
        {"block_size": 1, "max_num_batched_tokens": 33, "max_num_seqs": 33},
        {"block_size": 128, "max_num_batched_tokens": 48, "max_num_seqs": 32},
    ):
        crowd, _ = serve(default_model_path, NativeBackend(), prompts, 6, **common, **options)
        assert crowd == alone, options
    few = prompts_of(4, vocab=49000, longest=8)
    alone, _ = serve(default_model_path, NativeBackend(), few, 24, one_by_one=True, **common)
    tiny_pool = {"block_size": 2, "num_blocks_override": 32, "max_num_batched_tokens": 64}
    crowd, engine = serve(default_model_path, NativeBackend(), few, 24, **common, **tiny_pool)
    assert crowd == alone
    assert engine.scheduler.counters.num_preemptions >= 2
