from run_helpers import cli, conversations, prepared, tiny_target

__all__ = ["cli", "conversations", "prepared", "tiny_target"]
