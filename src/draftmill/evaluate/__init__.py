"""Speculative decoding with a trained drafter: acceptance, speed, and the proof that nothing is lost."""
