"""From logits to accepted tokens: penalties, masks, draws, verification, log probabilities."""

from hotshoe.worker.sampling.acceptance import AcceptanceRule, Leviathan, Typical
from hotshoe.worker.sampling.logprobs import Scores, prompt_logprobs, score_prompt
from hotshoe.worker.sampling.processors import check_logits_processors
from hotshoe.worker.sampling.records import SampledTokens, SamplingStep
from hotshoe.worker.sampling.started import StartedSampling
from hotshoe.worker.sampling.token_sampler import TokenSampler
from hotshoe.worker.sampling.verify import verify

__all__ = [
    "AcceptanceRule",
    "Leviathan",
    "SampledTokens",
    "SamplingStep",
    "Scores",
    "StartedSampling",
    "TokenSampler",
    "Typical",
    "check_logits_processors",
    "prompt_logprobs",
    "score_prompt",
    "verify",
]
