"""A byte-level tokenizer with a chat template, small and complete: it round-trips any text."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .words import WORDS

VOCAB_SIZE = 512
"""Rows of the embedding; equal to len(tokenizer), because engines mask other rows and trainers do not."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

BOXED = "\\boxed{"
"""One token, so that a boxed two-digit answer is five with the end of the turn."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_PIECES = r"\\boxed\{| ?[A-Za-z]{2,}|[\s\S]"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: special tokens, 256 bytes, known words, and spare tokens up to `VOCAB_SIZE`.

    Digits and signs are one token each. A known word is one token with the space before it and one without; any other
    text falls back to bytes.
    """
    specials = [PAD, START, END]
    pieces = [BOXED, *(prefix + word for word in WORDS for prefix in ("", " "))]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoded = ["".join(piece for piece, _ in to_bytes.pre_tokenize_str(text)) for text in pieces]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *encoded]
    spare = VOCAB_SIZE - len(tokens)
    if spare < 0:
        raise ValueError(f"the word list needs a vocabulary of {len(tokens)}, VOCAB_SIZE is {VOCAB_SIZE}")
    tokens += [f"<|spare_{index}|>" for index in range(spare)]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != VOCAB_SIZE:
        raise ValueError(
            f"a word is listed twice in tools/tiny_world/words.py: {VOCAB_SIZE - len(vocab)} tokens collide"
        )
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"), to_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def encode_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """Token ids of a one-turn chat up to where the assistant begins."""
    messages = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def encode_response(tokenizer: PreTrainedTokenizerFast, solution: str) -> list[int]:
    """Token ids of a solution and the end of the turn."""
    return [*tokenizer.encode(solution, add_special_tokens=False), tokenizer.eos_token_id]
