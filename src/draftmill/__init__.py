"""draftmill trains DFlash drafters: block-diffusion models for lossless speculative decoding."""

__version__ = "0.1.0"
