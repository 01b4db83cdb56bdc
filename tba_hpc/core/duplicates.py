"""Finds duplicates among a prompt's completions: equal ones, or ones of similar text or meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice, pairwise

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from tba_hpc.config import BufferSection
from tba_hpc.config.variants import EditDuplicates, EmbeddingDuplicates
from tba_hpc.core.types import Ragged, Trajectories, joined


class Duplicates:
    """Decides, by ``buffer.duplicates``, which completions of a prompt stay when new ones arrive."""

    def __init__(self, config: BufferSection) -> None:
        self._config = config
        self._serials = count()

    def keys(self, group: Trajectories) -> list[int]:
        """Return a key for each completion, equal for equal tokens. If duplicates are kept, all keys differ.

        Different tokens get the same key with probability 2⁻⁶⁴. The key is Python's salted hash of bytes,
        which takes a quarter of the time of a cryptographic one.
        """
        if not self._config.deduplicate:
            return list(islice(self._serials, len(group)))
        data = group.completions.values.astype("<i4", copy=False).tobytes()
        return [
            hash(data[4 * start : 4 * end]) for start, end in pairwise(group.completions.offsets.tolist())
        ]

    def possible(self, live: Mapping[int, int], keys: Sequence[int]) -> bool:
        """Return whether new completions may be duplicates of each other or of live ones.

        live: mapping whose keys are the keys of the prompt's live completions; its values are not used. keys:
        keys of the new completions.
        """
        near = isinstance(self._config.duplicates, EditDuplicates | EmbeddingDuplicates)
        return near or len({*keys}) < len(keys) or not live.keys().isdisjoint(keys)

    def stays(
        self, live: Iterable[int], older: Sequence[Trajectories], keys: Sequence[int], group: Trajectories
    ) -> np.ndarray:
        """Return which of a prompt's M live and N new completions stay, bool [M + N], live ones first.

        live, older: keys and groups of the live completions. keys, group: keys and group of the new ones,
        which are considered in order. A new completion replaces an equal one. It replaces all similar ones if
        its reward is higher than each of their rewards; otherwise it does not stay.
        """
        place_of = {key: place for place, key in enumerate(live)}
        all_keys, first = [*place_of, *keys], len(place_of)
        reward = np.concatenate([one.record["reward"] for one in [*older, group]])
        stays = np.arange(len(all_keys)) < first
        for place, near_N in enumerate(self._near(older, group), first):
            key = all_keys[place]
            if key in place_of:
                stays[place_of[key]] = False
            else:
                rivals = np.flatnonzero(near_N & stays)
                if (reward[rivals] >= reward[place]).any():
                    continue
                stays[rivals] = False
                for rival in rivals.tolist():
                    del place_of[all_keys[rival]]
            stays[place], place_of[key] = True, place
        return stays

    def _near(self, older: Sequence[Trajectories], group: Trajectories) -> np.ndarray:
        """Return which of all completions are similar to each new one, bool [N, M + N]; live ones come first.

        Two completions are similar if their edit distance, in tokens, is below a share of the sum of their
        lengths, or if the cosine of their embeddings is above a limit. ``buffer.duplicates`` says which of
        these rules holds, if any.
        """
        together, first = [*older, group], sum(map(len, older))
        match self._config.duplicates:
            case EditDuplicates(limit=share):
                words = [word for one in together for word in _words(one.actions)]
                length_N = np.array([len(word) for word in words])
                bound = share * (length_N[first:, None] + length_N)
                most, score = int(bound.max()), Levenshtein.distance
                edits = cdist(words[first:], words, scorer=score, score_cutoff=most, dtype=np.int32)
                return np.less(edits, bound)
            case EmbeddingDuplicates(limit=cosine):
                everyone = joined([one.record["embedding"] for one in together])
                return np.greater(group.record["embedding"] @ everyone.T, cosine)
        return np.zeros((len(group), first + len(group)), np.bool_)


def _words(rows: Ragged) -> list[str]:
    """Encode rows of tokens as strings, one character per token, for edit distances."""
    text = rows.values.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
    return [text[start:end] for start, end in pairwise(rows.offsets.tolist())]
