"""OpenAI's client with the key from the environment, and its errors in one sentence.

The key is read from OPENAI_API_KEY, handed to the client, and left out of every message.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from entp.errors import InputError

if TYPE_CHECKING:
    from openai import OpenAI

KEY = "OPENAI_API_KEY"
URL = "OPENAI_BASE_URL"
DEFAULT_URL = "https://api.openai.com/v1"
TIMEOUT = 120.0
"""Seconds that a request may take."""
REFUSALS = frozenset({400, 401, 403, 404, 405, 413, 415, 422, 429})
"""Answers which say that nothing was done; after others the service may have done it."""


def open_client(max_retries: int = 2) -> OpenAI:
    """The official client, which waits and repeats a request so many times where it is told to."""
    try:
        from openai import OpenAI
    except ImportError:
        raise InputError(
            "entp llm openai needs OpenAI's client: pip install 'entp[openai]'."
        ) from None
    return OpenAI(api_key=_key(), base_url=_base_url(), max_retries=max_retries, timeout=TIMEOUT)


def host() -> str:
    """Where requests go, without what else the address may hold."""
    parts = urlsplit(_base_url())
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.hostname}{port}"


@contextlib.contextmanager
def plain_errors(doing: str, then: str = "") -> Iterator[None]:
    """Errors of the client become an InputError: while doing what, and what to do then."""
    import openai

    try:
        yield
    except openai.OpenAIError as error:
        raise InputError(f"{doing}: {explained(error)}{f' {then}' if then else ''}") from None


def explained(error: Exception) -> str:
    """What went wrong, in a sentence without the key."""
    import openai

    match error:
        case openai.AuthenticationError():
            return f"{host()} does not accept the key in {KEY} (401). Set another."
        case openai.APITimeoutError():
            return f"{host()} did not answer within {TIMEOUT:.0f} seconds."
        case openai.APIConnectionError():
            return f"the connection to {host()} failed."
        case openai.RateLimitError():
            return f"{host()} limits the rate or the quota is spent (429): {_message(error)}"
        case openai.APIStatusError():
            return f"{host()} answered {error.status_code}: {_message(error)}"
    return without_key(f"{type(error).__name__}: {error}".rstrip(".") + ".")


def was_refused(error: Exception) -> bool:
    """Whether it is certain that the service did not do what it was asked."""
    return getattr(error, "status_code", None) in REFUSALS


def text_of(answer: Any, name: str) -> str:
    """A field of an answer that must be a text; an InputError for answers of another service."""
    value = getattr(answer, name, None)
    if not isinstance(value, str) or not value:
        raise InputError(
            f"{host()} gave an answer without {name!r}: {URL} must be the address of a service "
            "like OpenAI's, up to /v1."
        )
    return value


def without_key(text: str) -> str:
    """The text with the key, and what looks like one, left out."""
    key = os.environ.get(KEY, "").strip()
    text = text.replace(key, "(key)") if key else text
    return re.sub(r"\bsk-[\w*.-]{4,}", "(key)", text)


def _message(error: Any) -> str:
    """The service's own words on one line, at most 300 characters."""
    body = error.body if isinstance(error.body, dict) else {}
    words = " ".join(without_key(str(body.get("message") or error.message)).split())
    return words[:300].rstrip(".") + "."


def _key() -> str:
    key = os.environ.get(KEY, "").strip()
    if not key:
        raise InputError(f"{KEY} is not set: put your key into this environment variable.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(f"{KEY} holds spaces or other characters that no key has: set it again.")
    return key


def _base_url() -> str:
    url = os.environ.get(URL, "").strip() or DEFAULT_URL
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable:
        raise InputError(f"{URL} is not an address: it must be like {DEFAULT_URL}.")
    return url
