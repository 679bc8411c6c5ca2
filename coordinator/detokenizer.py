"""Turns token ids into text one token at a time, holding back bytes that are no character yet.

Pure: the bytes of a token come from a callable (specmesh/tokenizer.py), so that byte-level
vocabularies whose tokens split a UTF-8 character need no look-back. The text of a sequence does
not depend on how it was cut into chunks.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """Incremental UTF-8 over the bytes of tokens.

    token_bytes: bytes of one id; empty for ids that print nothing (special tokens).
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; empty while a character is incomplete."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """End of the sequence: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
