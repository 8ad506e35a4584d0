"""State-space operations of the NumPy backend: one sequence at a time, one token after another.

They are the specification of conv1d, ssm_scan and gated_rms_norm in ops.py. The recurrence is never cut into
chunks that are summed differently, so a token's result is the same bits wherever a step begins. Which block
holds a sequence's state is the business of numpy_cache.py; here it is a plain array.
"""

from __future__ import annotations

import numpy as np

from octavo.backends.ops import F32, Scan


def silu(x: F32) -> F32:
    """x · sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return np.asarray(x / (np.float32(1.0) + np.exp(-x)), np.float32)


def softplus(x: F32) -> F32:
    """log(1 + e^x), rounded once."""
    return np.logaddexp(0.0, x.astype(np.float64)).astype(np.float32)


def causal_conv(x: F32, inputs: F32, weight: F32, bias: F32 | None) -> F32:
    """silu(convolution) of x [n, C], where `inputs` [W-1, C] came before → [n, C].

    `inputs` is overwritten with the last W-1 of all.
    """
    num_tokens, channels = x.shape
    taps = weight.reshape(-1, channels)  # [W, C]
    padded = np.concatenate([inputs, x])  # [W-1 + n, C]
    total = np.zeros_like(x, order="C") if bias is None else np.tile(bias, (num_tokens, 1))  # [n, C]
    for w, tap in enumerate(taps):
        total += padded[w : w + num_tokens] * tap
    inputs[:] = padded[num_tokens:]
    return silu(total)


def selective_scan(x: F32, dt: F32, b: F32, c: F32, scan: Scan, state: F32) -> F32:
    """x [n, H·P], dt [n, H], b and c [n, G·Z] → [n, H·P]; `state` [H, Z, P] is brought up to date."""
    num_tokens, heads = len(x), scan.num_heads
    inputs = x.reshape(num_tokens, heads, scan.head_size)  # [n, H, P]
    b, c = _per_head(b, scan), _per_head(c, scan)  # [n, H, Z]
    steps = np.clip(softplus(dt + scan.dt_bias), np.float32(scan.dt_min), np.float32(scan.dt_max))  # [n, H]
    decays = np.exp(steps * scan.decay)  # [n, H]
    out = np.empty_like(inputs, order="C")  # [n, H, P]
    for t in range(num_tokens):
        scaled = steps[t, :, None] * inputs[t]  # [H, P]
        state *= decays[t, :, None, None]
        state += b[t, :, :, None] * scaled[:, None, :]
        out[t] = (c[t, :, :, None] * state).sum(axis=1) + scan.skip[:, None] * inputs[t]
    return out.reshape(num_tokens, heads * scan.head_size)


def gated_rms_norm(x: F32, gate: F32, weight: F32, eps: float, group_size: int) -> F32:
    """RMS norm of x · silu(gate) [T, width] over groups of columns."""
    groups = (x * silu(np.ascontiguousarray(gate))).reshape(len(x), -1, group_size)  # [T, groups, size]
    mean = np.mean(groups * groups, axis=-1, keepdims=True)  # [T, groups, 1]
    return np.asarray((groups / np.sqrt(mean + np.float32(eps))).reshape(x.shape) * weight, np.float32)


def _per_head(x: F32, scan: Scan) -> F32:
    """[n, G·Z] → [n, H, Z]: every head's copy of its group's row."""
    groups = x.reshape(len(x), scan.num_groups, scan.state_size)
    return groups.repeat(scan.num_heads // scan.num_groups, axis=1)
