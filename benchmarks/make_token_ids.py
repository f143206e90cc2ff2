"""Make `tests/model/data/smollm2_token_ids.json`: what llama.cpp says of a corpus.

llama.cpp (through llama-cpp-python) is the authority on GGUF tokenizers. The vocabulary of a real
model is asked under every pre-tokenizer that aengine knows, and a small SentencePiece vocabulary,
made here, stands for the "llama" kind.

    python benchmarks/make_token_ids.py MODEL.gguf OUT.json

needs llama-cpp-python beside aengine's own dependencies.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from aengine.model.gguf import read_gguf
from aengine.model.tokenizer_gguf import PRE_TOKENIZERS

CORPUS = [
    "Hello world",
    " leading and trailing ",
    "The quick brown fox doesn't jump; it'll've flown, I'd say WE'RE done.",
    "1 12 123 1234 12345 3.14159 1,000,000 007 2024-02-29T23:59:59Z x86_64 v2.0.1",
    "٠١٢٣ ۴۵۶ १२३ ๓๔๕ ²³ Ⅻ ½ １２３ 〇一二三 𝟘𝟙𝟚",
    "你好，世界。今天天气怎么样？我們來試試繁體字。",
    "こんにちは、世界！カタカナとひらがな。",
    "안녕하세요 세계! 한국어 문장입니다.",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 e\u0301 é ﬁ",
    "a  b   c    d\te\t\tf\n\ng\n \n h\r\n\r\ni   \n   j",
    "   ",
    "\n\n\n",
    "\t\n \t\n",
    "trailing spaces   ",
    "    indented = {'key': [1, 2, 3]}\n\treturn x**2  # comment\n",
    "def f(x: int) -> str:\n    return f\"{x!r:>10}\" if x != 0 else '...'\n\n\nclass A(B): pass",
    "https://example.org/path?query=1&b=%20#frag user@example.org C:\\dir\\file.txt",
    "Straße Æther œuvre naïve Ελληνικά Кириллица עברית العربية हिन्दी ไทย Tiếng Việt",
    "\u00a0non-breaking\u00a0space\u2003em\u3000ideographic\u200bzero\u200dwidth\ufeff",
    "\u0000\u0001\u007f\u0080\u00ad\u2028\u2029 control",
    "CamelCaseWord snake_case_word kebab-case-word SCREAMING_CASE iPhone15ProMax",
    "!!!??? ... --- *** ### $$$ %%% ^^^ &&& ((())) [[[]]] {{{}}} <<<>>> ~~~ ``` \"\"\" '''",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <|im_end|> spaced <file_sep><repo_name>x",
    "almost special <|im_start <|im_start| >",
    "'S 'T 'RE 'Ve it's IT'S can't CAN'T 'tis o'clock ’s",
    "a" * 300,
    "ab " * 50 + "。" * 20,
    "word\n/path and/or //comment\n/* block */",
    "x" + " " * 40 + "y" + "\n" * 17 + "z",
    "∑∫√∞≈≠ ±×÷ €£¥ ©®™ ←→↑↓ ░▒▓ ♠♥♦♣ ①②③",
    "\U0001f9d1\U0001f3fb\u200d\U0001f91d \U00020000\U0002a6d6 \u0e33\u0e34 \u093f\u0902",
]


def ids(model: llama_cpp.Llama, text: str, *, add: bool, parse: bool) -> list[int]:
    return list(model.tokenize(text.encode(), add_bos=add, special=parse))


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(str(path), metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary of the "llama" kind with 700 pieces, scored as a unigram model scores them."""
    library = Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=[], show_progress=False)
    library.train_from_iterator([text for text in CORPUS if "<" not in text] * 3, trainer)
    pieces = json.loads(library.to_str())["model"]["vocab"]
    control = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
    tokens = [token for token, _ in control] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [kind for _, kind in control] + [6] * 256
    scores = [0.0] * len(tokens)
    for token, score in sorted(pieces, key=lambda pair: -pair[1]):
        if token not in tokens:
            tokens.append(token)
            types.append(1)
            scores.append(score)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def main(model_path: str, out_path: str) -> None:
    base = dict(read_gguf(Path(model_path)).metadata)
    result: dict[str, Any] = {
        "made_by": f"benchmarks/make_token_ids.py, llama-cpp-python {llama_cpp.__version__}",
        "corpus": CORPUS,
        "pre": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for pre in sorted(PRE_TOKENIZERS):
            write_vocabulary(path, {**base, "tokenizer.ggml.pre": pre})
            try:
                model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            except ValueError:
                print(f"llama.cpp does not know {pre}", file=sys.stderr)
                continue
            result["pre"][pre] = [ids(model, text, add=False, parse=True) for text in CORPUS]
            if pre == base["tokenizer.ggml.pre"]:
                result["plain"] = [ids(model, text, add=False, parse=False) for text in CORPUS]
        metadata = sentencepiece_metadata()
        write_vocabulary(path, metadata)
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        result["sentencepiece"] = {
            "metadata": metadata,
            "ids": [ids(model, text, add=False, parse=True) for text in CORPUS],
            "plain": [ids(model, text, add=False, parse=False) for text in CORPUS],
            "with_bos": [ids(model, text, add=True, parse=True) for text in CORPUS],
        }
    Path(out_path).write_text(json.dumps(result, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
