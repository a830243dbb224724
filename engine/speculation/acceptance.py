"""Which drafts were right.

Each row was drawn as if the drafts before it were tokens of the sequence, with the number that belongs to its position.
So a draft is right exactly when it is the token that would have been drawn in its place; then the next row stands too.
No distribution is approximated: the answer is the one without drafts, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from engine.sampler import Drawn


def accept(drafts: Many[int], drawn: Many[Drawn | None]) -> list[Drawn | None]:
    """The tokens that stand, of one more row than drafts: the first row's, and one more for each draft that was right.

    Only the last can be None, which ends the sequence. Without rows nothing was to be drawn.
    """
    if not drawn:
        return []
    standing = [drawn[0]]
    for draft, following in zip(drafts, drawn[1:], strict=True):
        last = standing[-1]
        if last is None or last.token_id != draft:
            break
        standing.append(following)
    return standing
