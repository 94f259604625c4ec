"""How far loading a target's weights has got: the share of its tensors that are placed, and the size of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WEIGHTS = (".safetensors", ".bin", ".gguf")
LOADING = "Loading weights"  # transformers' name of the progress bar that counts tensors as they are placed


@contextmanager
def weights_placed(model: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Within, `tell` is given "43 % of 54.0 GB" for each tensor that transformers places, whether it draws a bar or
    not; "43 % of the weights" for a hub id, whose size is not known."""
    from transformers.utils import logging

    size = _size(Path(model))

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") != LOADING or not args:
            return factory(*args, **options)
        return factory(_counted(args[0], size, tell), *args[1:], **{"total": len(args[0]), **options})

    before = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _size(folder: Path) -> str:
    files = [path for path in folder.glob("*") if path.suffix in WEIGHTS]
    return f"{sum(path.stat().st_size for path in files) / 1e9:.1f} GB" if files else "the weights"


def _counted(items: Any, size: str, tell: Callable[[str], None]) -> Iterator[Any]:
    for number, item in enumerate(items):
        yield item
        tell(f"{(number + 1) / len(items):.0%} of {size}".replace("%", " %"))
