"""Streams text to a terminal, each token in the colour of where it came from."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.request import Tokens
from outrider.speculation.accept_reject import Origin

if TYPE_CHECKING:
    from rich.console import Console

STYLES: Final = {
    Origin.ACCEPTED: "green",
    Origin.CORRECTION: "bold red",
    Origin.BONUS: "bold cyan",
    Origin.STORED: "dim",
}


class TokenLengths:
    """How many characters each token adds to the text, by the target's own tokenizer."""

    def __init__(self, directory: str) -> None:
        """`directory` holds the tokenizer; without one nothing is known."""
        self._tokenizer: Any = None
        path = Path(directory) / "tokenizer.json"
        if directory and path.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
            self.begin()

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def begin(self) -> None:
        """Another text follows."""
        if self.known:
            from tokenizers.decoders import DecodeStream

            self._stream: Any = DecodeStream(skip_special_tokens=True)

    def length(self, token_id: int) -> int:
        """Characters that became certain with the token; 0 while they are incomplete."""
        return len(self._stream.step(self._tokenizer, token_id) or "")


class OriginPainter:
    """Prints text as it comes. A delta may lag behind its tokens, and then catches up."""

    def __init__(self, console: Console, lengths: TokenLengths) -> None:
        self._console = console
        self._lengths = lengths
        self._waiting: deque[tuple[Origin, int]] = deque()
        """Origins of tokens whose text has not come, and how long it is."""

    def show(self, event: Tokens) -> None:
        """Prints an event's text. Where the tokens' lengths are not known, all of it has the
        colour that most of its tokens have."""
        text = event.text_delta
        if not self._lengths.known:
            common = max(event.origins, key=event.origins.count, default=Origin.BONUS)
            self._print(text, common)
            return
        for token_id, origin in zip(event.token_ids, event.origins, strict=True):
            self._waiting.append((origin, self._lengths.length(token_id)))
        while text and self._waiting:
            origin, length = self._waiting.popleft()
            self._print(text[:length], origin)
            if length > len(text):
                self._waiting.appendleft((origin, length - len(text)))
            text = text[length:]
        self._print(text, Origin.BONUS)

    def legend(self) -> str:
        """What the colours mean, in Rich's markup."""
        return "  ".join(f"[{style}]{origin}[/]" for origin, style in STYLES.items())

    def _print(self, text: str, origin: Origin) -> None:
        if text:
            self._console.print(
                text, style=STYLES[origin], end="", markup=False, highlight=False, soft_wrap=True
            )
