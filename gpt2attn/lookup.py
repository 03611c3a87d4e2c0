"""Prompt lookup: guess the next tokens from an earlier place in the text, to check them together.

A pass over a few tokens reads the weights once, as a pass over one does, so tokens that were
guessed right cost next to nothing. Where a text repeats itself, what followed its last tokens
before is a good guess. Nothing is lost: a guess counts only if the model chooses the same token.

Source: Saxena 2023, "Prompt Lookup Decoding"; the check is that of Leviathan et al. 2023, "Fast
Inference from Transformers via Speculative Decoding", for guesses without probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable

SUFFIX = 3  # tokens that must be the same: fewer match by chance too often
LONGEST_GUESS = 15  # with the newest token, one pass of the compiled step


class Lookup:
    """The text so far, and where each run of `SUFFIX` tokens in it was last followed by what."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}  # a run -> the place after it
        self._length = 4  # of the next guess
        for id in ids:
            self.append(id)

    def append(self, id: int) -> None:
        if len(self._ids) >= SUFFIX:
            self._follows[tuple(self._ids[-SUFFIX:])] = len(self._ids)
        self._ids.append(id)

    def guess(self, at_most: int) -> list[int]:
        """Up to `at_most` tokens that may come next; none if the last ones are new.

        Past the end of the text a guess copies from itself, so that it goes on with the period of
        a text that repeats its last few tokens.
        """
        place = self._follows.get(tuple(self._ids[-SUFFIX:]))
        if place is None:
            return []
        period = len(self._ids) - place
        return [self._ids[place + i % period] for i in range(min(self._length, at_most))]

    def learn(self, n_guessed: int, n_right: int) -> None:
        """Guess further after a guess that was right, less far after a wrong one."""
        if n_guessed:
            longer = 2 * n_guessed if n_right == n_guessed else n_right + 1
            self._length = max(2, min(longer, LONGEST_GUESS))
