"""Compares libfa3's output on layer3.safetensors with what the model itself computed.

    compare_with_model.py layer3.safetensors output.safetensors

The two differ because query, key and value were rounded to float16 for the file, and both
outputs after that. What that can change is bounded here, element by element, in float64; twice
the bound leaves room for float32 arithmetic, whose rounding is 2^13 times finer.
"""

import sys

import numpy as np
from safetensors.numpy import load_file

HALF = 2.0**-11  # the largest relative rounding error of float16
TINY = 2.0**-25  # the largest absolute one below its normal range


def rounding(x):
    return HALF * np.abs(x) + TINY


stored = load_file(sys.argv[1])
query, key, value, expected = (
    np.moveaxis(stored[name].astype(np.float64), 2, 1) for name in ("q", "k", "v", "model_output")
)
output = np.moveaxis(load_file(sys.argv[2])["output"].astype(np.float64), 2, 1)

scale = query.shape[-1] ** -0.5
scores = scale * query @ key.swapaxes(-1, -2)
weights = np.exp(scores - scores.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)

# Scores move by at most `moved`; a weight by a factor within exp(+-2 * the row's largest).
moved = scale * (
    rounding(query) @ np.abs(key).swapaxes(-1, -2)
    + np.abs(query) @ rounding(key).swapaxes(-1, -2)
    + rounding(query) @ rounding(key).swapaxes(-1, -2)
)
factor = np.exp(2 * moved.max(-1, keepdims=True))
bound = (factor - 1) * (weights @ np.abs(value)) + factor * (weights @ rounding(value))
bound = 2 * (bound + rounding(expected) + rounding(output))

error = np.abs(output - expected)
if not (error <= bound).all():
    worst = np.unravel_index(np.nanargmax(np.where(error <= bound, 0, 1)), error.shape)
    sys.exit(f"at (batch, head, row, column) {worst}: {output[worst]} is not {expected[worst]}")
print(
    f"largest difference from the model's own output: {error.max():.2g} "
    f"(largest output {np.abs(expected).max():.2g}; at most {(error / bound).max():.2f} of the bound)"
)
