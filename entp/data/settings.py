"""What decides the tokens of a prepared corpus, by which corpora are told apart."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from entp.data.manifest import VERSION, Manifest
from entp.data.sources import Source, format_of
from entp.data.splits import Fractions, as_settings
from entp.data.tokenizer import Tokenizer
from entp.errors import InputError

Settings = dict[str, Any]


def settings_for(
    source: Source,
    kind: str,
    vocab: int,
    given: Tokenizer | None,
    fractions: Fractions,
    shard_tokens: int,
) -> Settings:
    """All that decides what is written."""
    if shard_tokens < 1:
        raise InputError(f"shard_tokens is {shard_tokens}: it must be at least 1.")
    return {
        "version": VERSION,
        "sources": source.described(),
        "tokenizer": {"kind": kind, "sha256": given.sha256 if given else None},
        "vocab": vocab if kind == "bpe" and given is None else None,
        "fractions": as_settings(fractions),
        "shard_tokens": shard_tokens,
    }


def settings_of(manifest: Manifest) -> Settings:
    """The settings that a finished corpus was prepared with."""
    about, others = manifest["tokenizer"], manifest.get("settings", {})
    learned = about["kind"] == "bpe" and others.get("vocab") is not None
    return {
        "version": manifest["version"],
        "sources": manifest["sources"],
        "tokenizer": {"kind": about["kind"], "sha256": None if learned else about["sha256"]},
        **others,
    }


def differences(there: Settings, wanted: Settings) -> list[str]:
    """The names of settings that are not the same, whatever the files are called."""
    there, wanted = _unnamed(there), _unnamed(wanted)
    return [key for key in wanted if there.get(key) != wanted[key]]


def cache_name(label: str, kind: str, settings: Settings) -> str:
    """A folder for these settings alone."""
    text = json.dumps(_unnamed(settings), sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^0-9A-Za-z_.-]+', '_', label)}-{kind}-{key}"


def _unnamed(settings: Settings) -> Settings:
    """Of the names of files only their formats: the same bytes are read differently by them."""
    sources = [{**one, "name": format_of(one.get("name", ""))} for one in settings["sources"]]
    return {**settings, "sources": sources}
