"""What a request asks of the sampler, and the sampler."""

from specserve.sampling.params import Sampling, SamplingParams, resolve
from specserve.sampling.sampler import Sampler

__all__ = ["Sampler", "Sampling", "SamplingParams", "resolve"]
