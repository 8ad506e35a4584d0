"""BestOf: of the `best_of` choices that were sampled, the n with the highest log-probability.

A choice can only be judged when all have ended, so nothing of such a request is sent before.
"""

from __future__ import annotations

from octavo.core.delta import TokenDelta
from octavo.core.sampling_params import SamplingParams
from octavo.engine.text_stops import TextStops


def needs_selection(params: SamplingParams) -> bool:
    return params.best_of is not None and params.best_of > params.n and params.beam_width is None


class BestOf:
    """Collects the outputs of one request."""

    def __init__(self, params: SamplingParams, stops: TextStops | None = None) -> None:
        self._params = params
        self._stops = stops
        self._token_ids: dict[int, list[int]] = {i: [] for i in range(params.num_sequences)}
        self._outputs: dict[int, list[TokenDelta]] = {i: [] for i in range(params.num_sequences)}
        self._num_running = params.num_sequences

    def is_stopped(self, output: TokenDelta) -> bool:
        """Whether a choice that would go on has completed a stop string. Asked once of each output, before
        push()."""
        token_ids = self._token_ids[output.choice]
        token_ids += output.token_ids
        if self._stops is None or output.finish_reason is not None or not output.token_ids:
            return False
        return len(token_ids) > self._params.min_tokens and self._stops.ends(token_ids)

    def push(self, output: TokenDelta) -> list[TokenDelta]:
        """Nothing until the last choice has ended, then the n best as choices 0 to n - 1, best first; of
        equals the earlier choice."""
        self._outputs[output.choice].append(output)
        if output.finish_reason is None:
            return []
        self._num_running -= 1
        if self._num_running:
            return []
        ranked = sorted(self._outputs, key=lambda index: (-self._logprob(index), index))
        chosen = []
        for new_index, index in enumerate(ranked[: self._params.n]):
            chosen += [self._renamed(output, new_index) for output in self._outputs[index]]
        # The first choice sampled has the prompt's log-probabilities, whichever choices were chosen
        chosen[0] = chosen[0]._replace(prompt_logprobs=self._outputs[0][0].prompt_logprobs)
        return chosen

    def _logprob(self, index: int) -> float:
        outputs = self._outputs[index]
        if outputs[-1].finish_reason == "error":
            return float("-inf")
        return sum(p.logprob for o in outputs for p in o.logprobs or ())

    def _renamed(self, output: TokenDelta, index: int) -> TokenDelta:
        """Log-probabilities were drawn for the ranking; they are sent only if they were asked for."""
        logprobs = output.logprobs if self._params.logprobs is not None else None
        return output._replace(choice=index, logprobs=logprobs, prompt_logprobs=None)
