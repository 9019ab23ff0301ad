"""Tokenizers like those of pretrained models, of 403 tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from small_texts import documents

from entp.data.tokenizer import Tokenizer
from entp.data.tokenizers import train_bpe
from entp.data.vocabulary import BYTE_OF, END


@cache
def small_bpe() -> Tokenizer:
    return train_bpe(documents(200), 400)


def changed(change: dict[str, object]) -> bytes:
    return json.dumps({**json.loads(small_bpe().file() or b""), **change}).encode()


def changed_model(change: dict[str, object]) -> bytes:
    return changed({"model": {**json.loads(small_bpe().file() or b"")["model"], **change}})


def added(number: int, text: str, special: bool = True, **more: bool) -> dict[str, object]:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": special, **usual, **more}


LLAMA_CUT = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {"Regex": r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"},
            "behavior": "Isolated",
            "invert": False,
        },
        {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
    ],
}
"""Cut like Llama 3: words, up to three digits, marks, spaces."""
DIGITS_CUT = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {**LLAMA_CUT["pretokenizers"][1], "use_regex": True},  # type: ignore[index]
    ],
}
SPECIAL = [added(400, "<|begin_of_text|>"), added(401, "<|end_of_text|>"), added(402, "<x>", False)]


def pretrained_file(cut: object = LLAMA_CUT, tokens: object = SPECIAL, **more: object) -> bytes:
    """Tokens of the small BPE, of which the old end token is a word now."""
    model = json.loads(small_bpe().file() or b"")["model"]
    model["vocab"]["qzq"] = model["vocab"].pop(END)
    return changed({"model": model, "pre_tokenizer": cut, "added_tokens": tokens, **more})


@cache
def text_file(kind: str) -> bytes:
    """A tokenizer.json of another kind, trained on the small texts.

    bert: WordPiece of words in lower case. llama2: BPE of characters with a space before each text,
    and bytes for what it does not know. t5: Unigram.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    how = {"vocab_size": 300, "show_progress": False}
    if kind == "bert":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(special_tokens=names, **how)
    elif kind == "llama2":
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        before, spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        made.normalizer = normalizers.Sequence([before, spaces])
        text = decoders.Replace("▁", " ")
        parts = [text, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(parts)
        names = ["<unk>", "<s>", "</s>"]
        trainer = trainers.BpeTrainer(special_tokens=names, **how)
    else:
        made = Tokenizer(models.Unigram())
        made.normalizer, made.decoder = normalizers.NFKC(), decoders.Metaspace()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        names = ["<pad>", "</s>", "<unk>"]
        trainer = trainers.UnigramTrainer(special_tokens=names, unk_token="<unk>", **how)
    made.train_from_iterator(documents(200), trainer)
    file = json.loads(made.to_str())
    if kind == "llama2":
        known = file["model"]["vocab"]
        known |= {f"<0x{byte:02X}>": len(known) + byte for byte in range(256)}
    return json.dumps(file).encode()


def gpt2_like(folder: Path, merges: int = 50_000) -> Path:
    """Files of GPT-2's size: every pair of bytes is a merge, in order, until there are enough."""
    letters = list(BYTE_OF)
    pairs = [(a, b) for a in letters for b in letters][:merges]
    tokens = [*letters, *(a + b for a, b in pairs), END]
    (folder / "encoder.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in pairs), ""]
    (folder / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    return folder
