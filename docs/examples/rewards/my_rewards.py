"""Rewards of one's own: the names of the arguments say what they get, see docs/own-task.md."""


def right(completion, answer):
    """1 where what follows #### is the row's answer."""
    return float(completion.partition("####")[2].strip() == answer)


def brief(completions, limit=60):
    """Of all completions of a prompt at once: minus the share of their characters beyond a limit."""
    return [-max(0, len(text) - limit) / max(1, len(text)) for text in completions]
