"""A pretrained model's folder with the tokens of a task alone: small enough to copy anywhere.

trim("all-minilm-l6-v2", Count3(), "minilm-64")   # 43 MB of 90, in float32

Runs that begin with it are those that begin with the whole folder, `Run.init` included: on this
task, and on one of some of its tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from entp.config.pretrained import SHIFTED
from entp.data.tokenizer import TOKENIZER
from entp.errors import InputError
from entp.files import write_folder
from entp.hf import load, refuse_gguf
from entp.hf.export import saved_files
from entp.hf.vocabulary import Rows, own_texts, reads_own_text, rows_for
from entp.tasks.base import Task
from entp.training.export import check_new


class Trimmed(NamedTuple):
    """What was written."""

    rows: Rows
    vocab: int
    """Tokens of the whole model."""
    size: int
    """Bytes of all weights."""


def trim(
    source: str | Path, task: Task, out: str | Path, shard_mib: float | None = None
) -> Trimmed:
    """Write the new folder `out`, in HuggingFace's format and float32.

    shard_mib: no file of weights is larger than so many MiB, if no tensor is; None: one file.
    """
    folder, out = Path(source).expanduser(), Path(out)
    refuse_gguf(folder)
    check_new(out)
    model = load(folder)
    vocab, rows = model.vocab, rows_for(task, folder, model.vocab)
    if len(rows.ids) == vocab or reads_own_text(task, folder):
        raise InputError(
            f"{task.name} needs all {vocab:,} tokens of the model in {folder}: copy the folder as "
            "it is."
        )
    texts = own_texts(task, rows, folder)
    model.keep_tokens(rows.ids)
    _forget_tokens(model.network)
    files = saved_files(model.network, None, shard_mib)
    if texts:
        files[TOKENIZER] = _tokenizer(texts)
    write_folder(out, files)
    weights = [data for name, data in files.items() if name.endswith(".safetensors")]
    return Trimmed(rows, vocab, sum(map(len, weights)))


def _forget_tokens(network: Any) -> None:
    """Special tokens, which were dropped or have other numbers now; a padding token stays where
    positions depend on its number."""
    kept = ("pad_token_id",) if network.config.model_type in SHIFTED else ()
    for config in (network.config, getattr(network, "generation_config", None)):
        for name in vars(config) if config is not None else ():
            if name.endswith("_token_id") and name not in kept:
                setattr(config, name, None)


def _tokenizer(texts: dict[str, int]) -> bytes:
    """A tokenizer.json that knows these texts, each as a whole; any other is beyond the model's
    vocabulary."""
    from tokenizers import Tokenizer, models

    unknown = "[UNK]"
    known = {**texts, unknown: max(texts.values()) + 1}
    return Tokenizer(models.WordLevel(known, unk_token=unknown)).to_str(pretty=True).encode()
