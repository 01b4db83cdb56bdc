"""A safety model that answers in words, such as Llama Guard: the log-probability of "unsafe" for an answer.

What counts as unsafe stands in the model's chat template.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BatchEncoding, PretrainedConfig

from tba_hpc.config import ConfigError
from tba_hpc.tasks.text_models import TextModel

VERDICTS = ("unsafe", "safe")
"""What the first line of its answer says (model card of Llama Guard 3)."""

LEAD = "\n\n"
"""What some versions write before the verdict, others have at the end of their chat template."""

PROBE = ("a question", "an answer")


class Guard(TextModel):
    """A causal language model whose chat template asks whether a conversation's last message is safe.

    The verdict is read off its first token, as the model card says, at once or after LEAD: log p("unsafe")
    where "unsafe" and "safe" are all that it may say.
    """

    LOADER = AutoModelForCausalLM
    NOUN = "safety model"
    WANTED = "a causal language model such as meta-llama/Llama-Guard-3-8B"
    SPECIAL_TOKENS = False

    def __init__(self, path: str, *, batch: int, key: str) -> None:
        super().__init__(path, batch=batch, key=key)
        self._tokenizer.padding_side = "left"  # so that all texts end at the last position
        self._in_parts = not self._shows_both(in_parts=False)
        if self._in_parts and not self._shows_both(in_parts=True):
            raise ConfigError(
                f"{self.name} has no chat template that shows a question and its answer: give a safety model "
                "such as meta-llama/Llama-Guard-3-8B"
            )
        self._lead = self._tokens(LEAD)
        self._verdicts = [self._tokens(verdict)[0] for verdict in VERDICTS]
        if len({*self._verdicts, self._lead[0]}) < 3:
            raise ConfigError(
                f"{self.name} begins 'safe' and 'unsafe' with the same token, so that its first token says "
                "nothing: give a safety model such as meta-llama/Llama-Guard-3-8B"
            )

    def __call__(self, questions: Sequence[str], answers: Sequence[str]) -> np.ndarray:
        """float32 [N], at most 0: log p("unsafe") of each answer to its question."""
        turns = zip(questions, answers, strict=True)
        return self.read([self._template(*turn, in_parts=self._in_parts) for turn in turns]).numpy()

    def _check(self, config: PretrainedConfig) -> None:
        if config.is_encoder_decoder:
            raise ConfigError(
                f"{self.name} is no causal language model (it is of type {config.model_type}): give a safety "
                "model such as meta-llama/Llama-Guard-3-8B"
            )

    def _shows_both(self, *, in_parts: bool) -> bool:
        """Whether the template takes messages in this form; one that does not may leave them out silently."""
        if self._tokenizer.chat_template is None:
            return False
        text = self._template(*PROBE, in_parts=in_parts)
        return all(words in text for words in PROBE)

    def _template(self, question: str, answer: str, *, in_parts: bool) -> str:
        """The whole text that the model continues with its verdict."""
        roles = {"user": question, "assistant": answer}
        chat = [
            {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}
            for role, text in roles.items()
        ]
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _read(self, inputs: BatchEncoding) -> Tensor:
        lead = torch.tensor(self._lead, device=inputs["input_ids"].device)
        leads = lead.expand(len(inputs["input_ids"]), -1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(leads)], 1)
        logits = self._model(
            input_ids=torch.cat([inputs["input_ids"], leads], 1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            logits_to_keep=len(lead) + 1,
        ).logits
        logprob_NLV = logits.float().log_softmax(2)
        at_once = logprob_NLV[:, 0, self._verdicts]
        led_by = logprob_NLV[:, :-1].gather(2, leads[:, :, None]).sum(1)  # log p(LEAD), [N, 1]
        verdict = torch.logaddexp(at_once, led_by + logprob_NLV[:, -1, self._verdicts])
        return verdict.log_softmax(1)[:, 0]
