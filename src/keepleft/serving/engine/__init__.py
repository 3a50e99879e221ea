"""The continuous-batching engine: scheduler, prefix cache, sampler. No HTTP here."""
