"""The start and the end of a sequence: begun as the model's tokenizer does by itself, never ended."""

import json
from pathlib import Path

import pytest
from tiny_models import make_random_model, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tba_hpc.config import ConfigError
from tba_hpc.learner.file_tokenizer import FileTokenizer
from tba_hpc.learner.hf_model import load_policy, load_tokenizer, require_one_vocabulary


@pytest.mark.parametrize(
    ("template", "first"), [("$A", []), ("<eos> $A", [0]), ("<pad> $A", [1]), ("<pad> $A <eos>", [1])]
)
def test_a_prompt_begins_as_taught_and_does_not_end(template: str, first: list[int], tmp_path: Path) -> None:
    tokenizer = make_tokenizer(128)
    plain = tokenizer.encode("12+3", add_special_tokens=False)
    names = {tokenizer.convert_ids_to_tokens(0): 0, tokenizer.convert_ids_to_tokens(1): 1}
    eos, pad = names
    template = template.replace("<eos>", eos).replace("<pad>", pad)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=list(names.items())
    )
    tokenizer.save_pretrained(tmp_path)
    made = load_tokenizer(str(tmp_path))
    assert made.encode("12+3").tolist() == [*first, *plain]
    if not template.endswith(
        eos
    ):  # an end that the text itself has, as the last message of a chat, is the user's
        assert made.encode(f"12+3{eos}").tolist() == [*first, *plain, 0]


@pytest.mark.parametrize(
    ("kind", "model", "misread"),
    [
        ("PreTrainedTokenizerFast", "llama", False),
        ("GPT2Tokenizer", "llama", True),
        ("LlamaTokenizer", "llama", True),
        ("PreTrainedTokenizerFast", "qwen2", False),
    ],
)
def test_the_file_is_followed_where_transformers_misreads_it(
    kind: str, model: str, misread: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pieces of bytes, one token a digit: GPT2Tokenizer joins digits, LlamaTokenizer loses spaces."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"])
    pieces.train_from_iterator(["In 2023 and 2023"] * 50, trainer)
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces.pre_tokenizer])
    pieces.decoder = decoders.ByteLevel()
    written = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<eos>")
    written.chat_template = "{{ messages[0]['content'] }}<eos>"
    written.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": kind}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    text = "In 2023, f(10) \u00b2"
    for folder in (tmp_path, tmp_path / "export"):
        tokenizer = load_tokenizer(str(folder))
        assert tokenizer.encode(text).tolist() == pieces.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_chat(text).tolist() == [*pieces.encode(text).ids, tokenizer.eos_token_id]
        tokenizer.save(tmp_path / "export")
    assert ["makes other tokens than its tokenizer.json" in said for said in caplog.messages] == [
        True
    ] * misread


def test_a_tokenizer_of_a_few_words_is_loaded(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "up": 1, "down": 2}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(str(tmp_path)).encode("up down up").tolist() == [1, 2, 1]


def test_a_token_for_unknown_words_is_no_sign_of_a_misread_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "In": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(str(tmp_path)).encode("In time").tolist() == [2, 1]
    assert not caplog.messages


def test_a_chat_template_ends_where_the_answer_begins(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(128)
    tokenizer.chat_template = "{% for m in messages %}U:{{ m.content }}\n{% endfor %}A:"
    tokenizer.save_pretrained(tmp_path)
    chat = load_tokenizer(str(tmp_path))
    assert chat.decode(chat.encode_chat("12+3")) == "U:12+3\nA:"


def test_a_tokenizer_without_chat_template_says_what_to_change(tmp_path: Path) -> None:
    make_tokenizer(128).save_pretrained(tmp_path)
    for tokenizer in (load_tokenizer(str(tmp_path)), FileTokenizer.find(str(tmp_path))):
        assert tokenizer is not None
        with pytest.raises(ConfigError, match=r"has no chat template: .* with task\.options\.chat=false"):
            tokenizer.encode_chat("12+3")
        with pytest.raises(ConfigError, match="has no chat template"):
            tokenizer.render([{"role": "user", "content": "12+3"}], tools=(), ask=True)


@pytest.mark.parametrize("tokens", [127, 128, 129])
def test_a_model_must_know_all_tokens_of_its_tokenizer(tokens: int, tmp_path: Path) -> None:
    model = load_policy(str(make_random_model(tmp_path / "model", tied=True, vocab=128)), "float32")
    make_tokenizer(tokens).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    if tokens <= 128:
        require_one_vocabulary(tokenizer, model, "m")
    else:
        with pytest.raises(ConfigError, match=r"model\.path=m has 129 tokens, the model 128"):
            require_one_vocabulary(tokenizer, model, "m")
