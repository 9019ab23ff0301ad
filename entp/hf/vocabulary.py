"""A task's tokens as tokens of a pretrained model.

| the task's tokens | become |
|---|---|
| those of the folder's own tokenizer.json | themselves: the whole vocabulary is kept |
| with a text that is one token of the folder's tokenizer, such as "31" | that token |
| any other | the model's first tokens that are not taken, in their order |

All other tokens of the model are dropped. None are added: no [CLS], no end token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from entp.data.json_tokenizer import file_name
from entp.data.tokenizer import TOKENIZER, load_library
from entp.data.tokenizers import make_tokenizer, read_tokenizer
from entp.errors import InputError
from entp.tasks.base import Task
from entp.tasks.tokens import tokenizer_name


class Rows(NamedTuple):
    """The model's token for each token of a task."""

    ids: list[int]
    new: int = 0
    """Further tokens of the task, which its tokenizer does not have and no text contains."""
    by_text: int = 0
    """How many were found by their text."""

    @property
    def told(self) -> str:
        """For a person."""
        if self.by_text == len(self.ids):
            return f"All {len(self.ids)} tokens are the model's own tokens of the same text."
        return (
            f"{self.by_text} of {len(self.ids)} tokens are the model's own tokens of the same "
            "text; the others are its first tokens that are not taken."
        )


def rows_for(task: Task, folder: Path, vocab: int) -> Rows:
    """Which of a model's `vocab` tokens stand for those of the task."""
    needed = task.model_needs().get("vocab")
    if needed is None:
        raise InputError(
            f"{task.name} has vectors as inputs, and pretrained models read tokens: leave --init "
            "out, or train on a task of tokens."
        )
    path = folder / TOKENIZER
    if reads_own_text(task, folder):
        if needed < vocab:
            return Rows(list(range(needed)), 0, needed)
        return Rows(list(range(vocab)), needed - vocab, vocab)
    if needed > vocab:
        raise InputError(
            f"{task.name} has {needed} tokens and the model in {folder} only {vocab}: give a model "
            "of a larger vocabulary."
        )
    return _by_text(task, needed, _encoder(path) if path.is_file() else None, vocab)


def reads_own_text(task: Task, folder: Path) -> bool:
    """Whether the task's texts are cut into tokens by the folder's own tokenizer."""
    return (folder / TOKENIZER).is_file() and _tokenizer_of(task) in _names(folder)


def _tokenizer_of(task: Task) -> str | None:
    """The name of the tokenizer whose tokens a task has; None for tokens of its own."""
    named = getattr(task, "tokenizer", None)
    if isinstance(named, str):
        return named
    file = task.files().get(TOKENIZER)
    return None if file is None else tokenizer_name(make_tokenizer(file))


def _names(folder: Path) -> set[str]:
    """What tasks call the tokenizer of a folder."""
    names = {file_name((folder / TOKENIZER).read_bytes())}
    try:
        return names | {tokenizer_name(read_tokenizer(folder))}
    except InputError:  # not byte-level BPE with an end token, as tasks on text have it
        return names


def _encoder(path: Path) -> Any:
    library = load_library()
    try:
        found = library.Tokenizer.from_file(str(path))
    except Exception as error:
        raise InputError(
            f"{path} cannot be read by tokenizers {library.__version__} ({error})."
        ) from None
    found.no_padding()
    found.no_truncation()
    return found


def own_texts(task: Task, rows: Rows, folder: Path) -> dict[str, int]:
    """The task's tokens that are the model's own of the same text, by that text; none where the
    folder has no tokenizer."""
    path = folder / TOKENIZER
    if not path.is_file():
        return {}
    encoder = _encoder(path)
    texts = {task.to_text([token]): token for token in reversed(range(len(rows.ids)))}
    return {text: token for text, token in texts.items() if _one(encoder, text) == rows.ids[token]}


def _by_text(task: Task, needed: int, encoder: Any, vocab: int) -> Rows:
    found: dict[int, int] = {}
    taken: set[int] = set()
    for token in range(needed) if encoder is not None else ():
        row = _one(encoder, task.to_text([token]))
        if row is not None and row < vocab and row not in taken:
            found[token] = row
            taken.add(row)
    free = (row for row in range(vocab) if row not in taken)
    ids = [found[token] if token in found else next(free) for token in range(needed)]
    return Rows(ids, 0, len(found))


def _one(encoder: Any, text: str) -> int | None:
    """The token that a text is; None where it is several, or none."""
    ids = encoder.encode(text, add_special_tokens=False).ids
    return ids[0] if len(ids) == 1 else None
