"""Text to token ids and back, for both kinds of checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import processors

from neojax.text import tokenizer_files
from neojax.text.eos import eos_token_ids
from neojax.text.token_bytes import TokenBytes


class Tokenizer:
    """A model's tokenizer with what the server asks of it: BOS once, end tokens, template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_ids: frozenset[int] = frozenset(),
        add_bos: bool = False,
        chat_template: str | None = None,
    ):
        """add_bos: put BOS before the text; for backends whose own post-processor does not."""
        # Both may be stored in tokenizer.json, and would cut or lengthen prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._add_bos = add_bos
        self.bos_token = bos_token or ""
        self.eos_token = eos_token or ""
        self.bos_id: int | None = backend.token_to_id(bos_token) if bos_token else None
        self.eos_ids = eos_ids
        self.chat_template = chat_template
        self._lengths: dict[tuple[int, bool], int] = {}

    @classmethod
    def from_checkpoint(cls, path: Path) -> Tokenizer:
        """The tokenizer of a directory (tokenizer.json, else tokenizer.model) or a GGUF file.

        Raises ValueError saying which file is missing or which kind is not supported.
        """
        path = Path(path)
        if path.suffix == ".gguf" and path.is_file():
            return cls._from_gguf(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            if (path / tokenizer_files.SENTENCEPIECE).is_file():
                return cls._from_sentencepiece(path)
            raise ValueError(f"{path} has neither tokenizer.json nor tokenizer.model")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} cannot be read: {error}") from error
        return cls(
            backend,
            bos_token=tokenizer_files.special_token(path, "bos_token"),
            eos_token=tokenizer_files.special_token(path, "eos_token"),
            eos_ids=eos_token_ids(path),
            chat_template=tokenizer_files.chat_template(path),
        )

    @classmethod
    def _from_sentencepiece(cls, path: Path) -> Tokenizer:
        from neojax.text.sentencepiece_model import read_sentencepiece

        model = read_sentencepiece(path / tokenizer_files.SENTENCEPIECE)
        backend = model.build()
        for index, token in sorted(tokenizer_files.added_tokens(path).items()):
            backend.add_tokens([token])
            if backend.token_to_id(token.content) != index:
                raise ValueError(
                    f"{path / 'tokenizer_config.json'} gives {token.content!r} the id {index}, but "
                    f"after the {len(model.pieces)} pieces of tokenizer.model it would get "
                    f"{backend.token_to_id(token.content)}"
                )
        bos, eos = (
            tokenizer_files.special_token(path, name)
            or (None if index is None else model.pieces[index])
            for name, index in (("bos_token", model.bos_id), ("eos_token", model.eos_id))
        )
        return cls(
            backend,
            bos_token=bos,
            eos_token=eos,
            eos_ids=eos_token_ids(path),
            add_bos=tokenizer_files.read_json(path / "tokenizer_config.json").get(
                "add_bos_token", True
            ),
            chat_template=tokenizer_files.chat_template(path),
        )

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        from neojax.models.gguf_file import open_gguf
        from neojax.text.gguf_tokenizer import adds_bos, build_tokenizer

        file = open_gguf(path)
        backend = build_tokenizer(file)
        bos, eos = (
            backend.id_to_token(file.metadata[key]) if key in file.metadata else None
            for key in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
        )
        return cls(
            backend,
            bos_token=bos,
            eos_token=eos,
            eos_ids=eos_token_ids(path),
            add_bos=adds_bos(file),
            chat_template=file.metadata.get("tokenizer.chat_template"),
        )

    def to_json(self) -> str:
        """The content of a tokenizer.json of the tokens, as other libraries read it."""
        return self._backend.to_str()

    def save(self, file: Path) -> None:
        """Write tokenizer.json. Where this class puts BOS, the file's post-processor will."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        if self._add_bos and self.bos_id is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{self.bos_token} $A", special_tokens=[(self.bos_token, self.bos_id)]
            )
        backend.save(str(file))

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """What single tokens stand for."""
        return TokenBytes(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. With special tokens, BOS stands first exactly once if the model
        has it there, also when the text (a rendered chat template, say) already begins with it.

        Raises ValueError for text that is not Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at character "
                f"{error.start}), which no encoding can represent"
            ) from error
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if not add_special_tokens or self.bos_id is None:
            return ids
        if self._add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        if ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        return ids

    def text_length(self, ids: Sequence[int], skip_special_tokens: bool = True) -> int:
        """Characters of the text of `ids`; quick for a single one, which streams ask for."""
        if len(ids) > 1:
            return len(self.decode(ids, skip_special_tokens))
        # At most two entries for each token of the vocabulary.
        key = (ids[0], skip_special_tokens)
        length = self._lengths.get(key)
        if length is None:
            length = self._lengths[key] = len(self.decode(ids, skip_special_tokens))
        return length

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not whole characters become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
