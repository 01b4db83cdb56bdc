"""Rewards of one's own: the names of the arguments say what they get, see docs/own-task.md."""


def right(completion, answer):
    """1 where what follows #### is the row's answer."""
    return float(completion.partition("####")[2].strip() == str(answer))


def brief(completions, limit=60):
    """Of all completions of a prompt at once: minus the share of their characters beyond a limit."""
    return [-max(0, len(text) - limit) / max(1, len(text)) for text in completions]


def exact_words(completion, words):
    """1 for one sentence of that many words, up to half of it the nearer it is, 0 for anything else."""
    text = completion.strip()
    if not text.endswith((".", "!", "?")) or sum(map(text.count, ".!?\n")) > 1:
        return 0.0
    found = len(text.split())
    return 1.0 if found == words else 0.5 * min(found, words) / max(found, words)
