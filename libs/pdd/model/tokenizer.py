"""Text to token IDs: the model's own tokenizer, chat template and stop tokens, from a GGUF file or a directory.

Owns how text and chats become IDs. Never imports torch (the gateway has none), and never decodes a stream: that is
the gateway's `text` package, over `Tokenizer.backend`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import gguf
import tokenizers
import transformers
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pdd.errors import ModelError

_END_MARKS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
"""Control tokens that end a turn or a document in the chat formats in use; not every file lists its own as EOS."""


class ChatTemplateError(ModelError):
    """The chat cannot be rendered: the model has no template, or the template refuses these messages."""

    code = "chat_template"


class Tokenizer:
    """A model's tokenizer. Safe to share between threads: nothing in it changes after loading.

    `backend` is for decoding. `vocab_size` bounds the IDs the tokenizer knows (0 <= id < vocab_size),
    `context_length` is the model's longest prompt + output in tokens, `stop_token_ids` end an answer.
    """

    def __init__(self, chat: Any, *, context_length: int, eos_token_ids: Iterable[int] = ()) -> None:
        """`chat` is the fast Hugging Face tokenizer: its backend encodes, its chat template renders."""
        self._chat = chat
        self.backend: tokenizers.Tokenizer = chat.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self._literal = tokenizers.Tokenizer.from_str(self.backend.to_str())
        self._literal.encode_special_tokens = True
        added = self.backend.get_added_tokens_decoder()
        special = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        self.context_length = context_length
        bos = cast("int | None", chat.bos_token_id)
        self._added_bos = bos if bos in _encode(self.backend, "", add_special_tokens=True)[:1] else None
        ends = (self.backend.token_to_id(mark) for mark in _END_MARKS if mark in special)
        own = () if chat.eos_token_id is None else (cast("int", chat.eos_token_id),)
        self.stop_token_ids = frozenset(own) | frozenset(eos_token_ids) | {end for end in ends if end is not None}

    def encode(self, text: str) -> list[int]:
        """IDs of raw text, with the special tokens the model's tokenizer puts around it; never a second BOS."""
        ids = _encode(self.backend, text, add_special_tokens=True)
        doubled = self._added_bos is not None and ids[:2] == [self._added_bos] * 2
        return ids[1:] if doubled else ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """IDs of a chat (`role` and `content` each) up to where the assistant's answer begins.

        Control tokens come from the template alone: a message that spells one is encoded as the plain text it is.
        Raises `ChatTemplateError` if the template refuses the messages.
        """
        left, right = _unused_characters(messages)
        mark = rf"{left}\g<0>{right}"
        marked = [{key: self._special.sub(mark, value) for key, value in message.items()} for message in messages]
        try:
            text = cast("str", self._chat.apply_chat_template(marked, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError) as error:
            raise ChatTemplateError(str(error).splitlines()[0]) from error
        head, *rest = text.split(left)
        ids = _encode(self.backend, head, add_special_tokens=False)
        for piece in rest:
            literal, _, following = piece.partition(right)
            ids += _encode_inside(self._literal, literal)
            ids += _encode_inside(self.backend, following)
        return ids


def load_tokenizer(model: Path) -> Tokenizer:
    """Load from a GGUF file (byte-level BPE) or a Hugging Face directory (with `tokenizer.json`).

    Raises `ModelError` naming the part that is missing or not supported.
    """
    if model.is_dir():
        return _from_directory(model)
    if not model.is_file():
        raise ModelError(f"model {model.name!r}: no such file or directory")
    return _from_gguf(model)


def _encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encode without holding the interpreter lock, which `encode` (unlike the batch calls) does."""
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _encode_inside(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Encode a piece from inside a text: after a newline, as SentencePiece adds a space to what begins a text."""
    if not text:
        return []
    newline = _encode(backend, "\n", add_special_tokens=False)
    ids = _encode(backend, "\n" + text, add_special_tokens=False)
    return ids[len(newline) :] if ids[: len(newline)] == newline else _encode(backend, text, add_special_tokens=False)


def _unused_characters(messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Two private-use characters that no message holds."""
    used = {character for message in messages for value in message.values() for character in value}
    free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
    return next(free), next(free)


class _ByteLevel(NamedTuple):
    """How a byte-level vocabulary splits text before merging; what GGUF names by `tokenizer.ggml.pre`."""

    split: str | None = None
    """Pattern of one word; None: GPT-2's."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    """Whether the text starts with BOS if the file does not say."""


_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ByteLevel(split=_WORD % r"\p{N}{1,3}", ignore_merges=True, add_bos=True)
_BYTE_LEVELS = {
    "gpt-2": _ByteLevel(),
    "smollm": _ByteLevel(single_digits=True),
    "qwen2": _ByteLevel(split=_WORD % r"\p{N}", nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
}
"""As in llama.cpp's `llama_vocab` and the `tokenizer.json` of the models' own repositories."""


def _from_gguf(path: Path) -> Tokenizer:
    try:
        fields = gguf.GGUFReader(path).fields
    except (ValueError, OSError) as error:
        raise ModelError(f"model {path.name!r} is not a readable GGUF file: {error}") from error

    def value(key: str, default: object = None) -> Any:
        return cast("object", fields[key].contents()) if key in fields else default

    def required(key: str) -> Any:
        if key not in fields:
            raise ModelError(f"model {path.name!r} lacks {key}")
        return value(key)

    kind, pre = required("tokenizer.ggml.model"), value("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _BYTE_LEVELS:
        raise ModelError(
            f"model {path.name!r}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported from GGUF "
            f"(only gpt2 with {', '.join(_BYTE_LEVELS)}); use a Hugging Face directory"
        )
    recipe = _BYTE_LEVELS[pre]
    tokens = cast("list[str]", required("tokenizer.ggml.tokens"))
    backend = _byte_level_backend(
        recipe, tokens, required("tokenizer.ggml.merges"), value("tokenizer.ggml.token_type", [])
    )

    def named(key: str) -> str | None:
        token = cast("int | None", value(f"tokenizer.ggml.{key}_token_id"))
        return None if token is None else tokens[token]

    bos = named("bos")
    if bos is not None and value("tokenizer.ggml.add_bos_token", recipe.add_bos):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    chat: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=named("eos"), chat_template=value("tokenizer.chat_template")
    )
    return Tokenizer(chat, context_length=required(f"{required('general.architecture')}.context_length"))


def _byte_level_backend(
    recipe: _ByteLevel, tokens: list[str], merges: list[str], kinds: list[int]
) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [cast("tuple[str, str]", tuple(merge.split(" ", 1))) for merge in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=recipe.ignore_merges))
    if recipe.nfc:
        backend.normalizer = normalizers.NFC()
    splits: list[Any] = []
    if recipe.single_digits:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    if recipe.split is not None:
        splits.append(pre_tokenizers.Split(Regex(recipe.split), behavior="isolated"))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=recipe.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()

    def of_kind(kind: gguf.TokenType) -> list[str]:
        return [token for token, other in zip(tokens, kinds, strict=False) if other == kind]

    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in of_kind(gguf.TokenType.CONTROL)]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in of_kind(gguf.TokenType.USER_DEFINED)]
    )
    return backend


def _from_directory(path: Path) -> Tokenizer:
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"model directory {path.name!r} lacks tokenizer.json")
    try:
        config = cast("dict[str, Any]", json.loads((path / "config.json").read_text()))
        generation_path = path / "generation_config.json"
        generation = cast("dict[str, Any]", json.loads(generation_path.read_text()) if generation_path.exists() else {})
        chat = cast("Any", transformers.PreTrainedTokenizerFast).from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"model directory {path.name!r}: {str(error).splitlines()[0]}") from error
    context_length = config.get("max_position_embeddings")
    if not isinstance(context_length, int):
        raise ModelError(f"model directory {path.name!r}: config.json lacks max_position_embeddings")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = cast("list[int]", eos if isinstance(eos, list) else [] if eos is None else [eos])
    return Tokenizer(chat, context_length=context_length, eos_token_ids=eos_ids)
