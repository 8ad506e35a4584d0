"""choose_weights: what the matrices become when --weight-dtype is auto, and the line at start that says why."""

from __future__ import annotations

from math import prod

from octavo.backends.ops import WeightDtype
from octavo.config import EngineConfig
from octavo.weights.checkpoint import Checkpoint, expected_shapes

# Up to so many rows a step reads more than it computes, and the stored integers are less to read.
FEW_SEQUENCES = 4
MIB = 1 << 20


def choose_weights(config: EngineConfig, checkpoint: Checkpoint) -> tuple[WeightDtype, str]:
    """The form of the weights, and in words what it is and what speaks for another."""
    if config.weight_dtype != "auto":
        return config.weight_dtype, f"weights {config.weight_dtype}, as asked for"
    if not checkpoint.has_grouped:
        return "int8", "weights int8 (auto): fast, and the model has no integers to keep; float32 is exact"
    model = checkpoint.config
    rounded = sum(prod(shape) for _, shape in expected_shapes(model))  # bytes that a step reads as int8
    table = model.vocab_size * model.hidden_size * (1 + model.tie_embeddings)  # what float16 adds to them
    sizes = f"{checkpoint.num_bytes / MIB:,.0f} MiB instead of {(rounded + table) / MIB:,.0f} MiB"
    is_less = checkpoint.num_bytes < rounded
    few = f", the fastest for up to {FEW_SEQUENCES} sequences at once" if is_less else ""
    if is_less and config.max_num_seqs <= FEW_SEQUENCES:
        return "native", f"weights native (auto): the file's integers, {sizes}{few}"
    return "int8", (
        f"weights int8 (auto): the fastest{' for many sequences at once' if is_less else ''}; "
        f"--weight-dtype native keeps the file's integers, {sizes}, closer to the model{few}"
    )
