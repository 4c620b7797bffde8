"""What a request asks of the sampler, and the sampler."""

from specserve.sampling.params import Sampling, SamplingParams, choices_of, resolve
from specserve.sampling.sampler import Sampler

__all__ = ["Sampler", "Sampling", "SamplingParams", "choices_of", "resolve"]
