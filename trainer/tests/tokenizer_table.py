"""Small tokenizers of the kinds that models have, trained on a few sentences."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

CORPUS = [
    "Question: 2+3=5\nAnswer: yes, it is 1234.\n\nhello  world, hello\n\n\nsee café ab ba aab",
    "call(2+3) = 5 5 55  555   user: a\nassistant: b\n 日本 ﬁne e\u0301 A B. .. ...",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
ENDS = {"none": (), "bos": ("<s>",), "eos": ("</s>",), "both": ("<s>", "</s>")}
LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Case(NamedTuple):
    """A tokenizer, and whether it keeps each text as it is."""

    tokenizer: PreTrainedTokenizerBase
    lossless: bool


def _trained(model: Any, trainer: type[Any], parts: dict[str, Any], **settings: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        if name != "post_processor":
            setattr(tokenizer, name, part)
    settings = {"vocab_size": 420, "special_tokens": SPECIAL, "show_progress": False} | settings
    tokenizer.train_from_iterator(CORPUS, trainer(**settings))
    if "post_processor" in parts:
        tokenizer.post_processor = parts["post_processor"]
    return tokenizer


def _byte_level(
    *, prefix: bool = False, trim: bool = False, pattern: str = "", normalizer: Any = None
) -> Tokenizer:
    split: Any = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not pattern)
    if pattern:
        split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), split])
    parts = {
        "pre_tokenizer": split,
        "decoder": decoders.ByteLevel(),
        "post_processor": processors.ByteLevel(trim_offsets=trim),
    } | ({"normalizer": normalizer} if normalizer else {})
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(models.BPE(), trainers.BpeTrainer, parts, initial_alphabet=alphabet)


def _pieces(scheme: str, *, unigram: bool = False, split: bool = True, normalizer: Any = None) -> Tokenizer:
    """As SentencePiece: ``scheme`` says where a blank is added; legacy adds it by a normalizer."""
    tail = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    parts: dict[str, Any] = {"decoder": decoders.Sequence(tail)}
    if scheme != "never":
        parts["decoder"] = decoders.Sequence([*tail, decoders.Strip(" ", 1, 0)])
    if scheme == "legacy":
        parts["normalizer"] = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
        words = [pre_tokenizers.WhitespaceSplit()] if normalizer else []
        parts["pre_tokenizer"] = pre_tokenizers.Sequence([*words, metaspace])
    if normalizer:
        parts["normalizer"] = normalizer
    if unigram:
        return _trained(models.Unigram(), trainers.UnigramTrainer, parts, unk_token="<unk>")
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return _trained(model, trainers.BpeTrainer, parts, special_tokens=tokens, vocab_size=600)


def _words(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    return _trained(model, trainer, parts)


def _tokenizers() -> Iterator[tuple[str, Tokenizer, bool]]:
    yield "gpt2", _byte_level(), True
    yield "roberta", _byte_level(prefix=True, trim=True), False
    yield "prefix-space", _byte_level(prefix=True), False
    yield "llama3", _byte_level(pattern=LLAMA3, trim=True), True
    yield "qwen", _byte_level(pattern=LLAMA3.replace("{1,3}", ""), normalizer=normalizers.NFC()), False
    yield "whole-bytes", _byte_level(pattern=r"[\s\S]+"), True
    yield "nfkc-bytes", _byte_level(normalizer=normalizers.NFKC()), False
    yield "lower-bytes", _byte_level(normalizer=normalizers.Lowercase()), False
    yield "stripped-bytes", _byte_level(normalizer=normalizers.Strip()), False
    yield "one-blank", _byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")), False
    for scheme in ("legacy", "first", "always", "never"):
        yield f"bpe-{scheme}", _pieces(scheme), True
        yield f"unigram-{scheme}", _pieces(scheme, unigram=True), False
    for scheme in ("first", "always", "never"):
        yield f"bpe-{scheme}-unsplit", _pieces(scheme, split=False), True
    squeezed = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    yield "t5", _pieces("always", unigram=True, normalizer=squeezed), False
    yield "camembert", _pieces("first", unigram=True, normalizer=normalizers.NFKC()), False
    bert = {
        "normalizer": normalizers.BertNormalizer(),
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "decoder": decoders.WordPiece(),
    }
    yield "bert", _words(models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer, **bert), False
    cased = {"pre_tokenizer": pre_tokenizers.WhitespaceSplit(), "decoder": decoders.WordPiece(cleanup=False)}
    yield "bert-cased", _words(models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer, **cased), False
    words = pre_tokenizers.Whitespace()
    yield (
        "words",
        _words(models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer, pre_tokenizer=words),
        False,
    )
    spaced = {"pre_tokenizer": pre_tokenizers.Split("", "isolated"), "decoder": decoders.Fuse()}
    yield (
        "characters",
        _words(models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer, **spaced),
        False,
    )
    accents = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    yield "no-accents", _byte_level(normalizer=accents), False
    fused = models.BPE(unk_token="<unk>", fuse_unk=True)
    yield "fused-unknown", _words(fused, trainers.BpeTrainer, decoder=decoders.Fuse()), False


def _with_ends(tokenizer: Tokenizer, name: str, tokens: tuple[str, ...]) -> PreTrainedTokenizerFast:
    text = " ".join(["<s>"] * ("<s>" in tokens) + ["$A"] + ["</s>"] * ("</s>" in tokens))
    if tokens:
        template = processors.TemplateProcessing(
            single=text, special_tokens=[(token, tokenizer.token_to_id(token)) for token in tokens]
        )
        parts = [tokenizer.post_processor, template] if tokenizer.post_processor else [template]
        tokenizer.post_processor = processors.Sequence(parts)
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL[:4]]
    tokenizer.add_special_tokens([*special, AddedToken("<|end|>", special=True, rstrip=True, lstrip=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.name_or_path = name
    return fast


def _cases() -> Iterator[tuple[str, Case]]:
    for (name, tokenizer, lossless), (ends, tokens) in zip(_tokenizers(), cycle(ENDS.items())):
        yield f"{name}-{ends}", Case(_with_ends(tokenizer, name, tokens), lossless)
    yield "byt5", Case(ByT5Tokenizer(), False)  # its special tokens drop blanks around


TOKENIZERS = dict(_cases())
"""By name, with the special tokens that are written around a text."""
