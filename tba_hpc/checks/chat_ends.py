"""Checks that completions begin and end where the model's chat template begins and ends answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tba_hpc.config import Config
from tba_hpc.core.ports import ChatTokenizer, Message
from tba_hpc.learner.file_tokenizer import end_ids

ASKED: Message = {"role": "user", "content": "A question."}
ANSWER: Message = {"role": "assistant", "content": "An answer."}
NEXT: Message = {"role": "user", "content": "Another one."}
"""Messages with which a chat template is examined."""


def is_chat(config: Config) -> bool:
    """Return whether the task uses the model's chat template."""
    return bool(config.task.options.get("chat")) or config.task.has_conversations


def look_at_chat(config: Config, tokenizer: ChatTokenizer) -> Iterator[str]:
    """Yield a sentence about each problem with the chat template of the config's model.

    Raises ConfigError if the template rejects messages of a user and an assistant.
    """
    path, options = config.model.path, config.task.options.get("chat_template_kwargs") or {}
    ends = {tokenizer.eos_token_id, *end_ids(path)}
    for sentence in odd_ends(tokenizer, ends, config.generator.stop, options):
        yield f"the chat template of model.path={path} {sentence}"


def odd_ends(
    tokenizer: ChatTokenizer, ends: Collection[int], stop: Collection[str], options: Mapping[str, Any]
) -> Iterator[str]:
    """Yield each problem with a chat template, as a phrase that follows "the chat template".

    Two things are checked. Between an answer and the text of the next message, the template must put a token
    of ``ends`` or a text of ``stop``, or completions never end. The template must also obey
    add_generation_prompt. Templates that omit answers pass.

    ends: ids of the tokens at which the engine ends completions. stop: texts at which the engine ends
    completions. options: additional variables for the template.
    """

    def shown(*messages: Message, ask: bool = False) -> str:
        return tokenizer.render(messages, tools=(), ask=ask, **options)

    head, answer, closing = shown(ASKED, ANSWER).partition(ANSWER["content"])
    between = shown(ASKED, ANSWER, NEXT).partition(ANSWER["content"])[2].partition(NEXT["content"])[0]
    tokens = [token for text in (closing, between) for token in tokenizer.encode_rendered(text).tolist()]
    is_end = not answer or any(text in closing or text in between for text in stop)
    if not is_end and not set(ends).intersection(tokens):
        yield _endless(tokenizer, closing.strip() or between.strip(), ends)
    asked = shown(ASKED, ask=True)
    lead = head.removeprefix(asked).strip()
    if answer and lead and asked == shown(ASKED) and head.startswith(asked):
        yield (
            f"ignores add_generation_prompt, so that prompts end before the {lead!r} that begins an "
            f"answer: unless the model was trained to write {lead!r} itself, set a chat_template in its "
            "tokenizer_config.json that adds it"
        )


def _endless(tokenizer: ChatTokenizer, end: str, ends: Collection[int]) -> str:
    """Return a phrase, as ``odd_ends`` yields it, about completions that never end.

    end: the template's text after an answer, or "".
    """
    tokens, stop = tokenizer.encode_rendered(end).tolist(), f"set generator.stop={[end]}"
    known = f"add {tokens[0]} to eos_token_id in its generation_config.json, or " if len(tokens) == 1 else ""
    remedy = known + stop if end else "set a chat_template in its tokenizer_config.json that ends messages"
    return (
        f"has {repr(end) if end else 'nothing'} after an answer, and the engine ends no completion there, "
        f"only at the tokens {', '.join(map(str, sorted(ends)))}: unless the model was trained to end "
        f"completions otherwise, {remedy}"
    )
