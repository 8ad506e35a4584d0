"""From logits to tokens: the border check of parameters, the sampler, stop strings."""
