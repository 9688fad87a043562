"""Trains the small tokenizers of tests/fixtures/tokenizers and records what the reference libraries make of some texts.

    pip install tokenizers==0.23.3 sentencepiece==0.2.3
    python tests/make_tokenizers.py
"""

import io
import json
import pathlib
import random

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from sentencepiece import sentencepiece_model_pb2 as spm

HERE = pathlib.Path(__file__).parent / "fixtures" / "tokenizers"

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
LINES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST]
QWEN2 = [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST]
QWEN35 = [
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
TEKKEN = [CASED % ("", "") + r"\p{N}|" + LINES]
GPT4O = [CASED % (CONTRACTIONS + "?", CONTRACTIONS + "?") + r"\p{N}{1,3}|" + LINES]
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]

TEXTS = [
    "",
    " ",
    "Hello world",
    " Hello  world ",
    "  two leading, three trailing   ",
    "tabs\tand\t\ttabs",
    "line\nbreak\r\nwindows\n\n\nmany\n",
    "I'm sure they'll say it's 'fine', won't THEY'RE?",
    "1234567890 3.14159 1,000,000 ²³¼ ٣٤٥",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # done\n",
    "if (a && b || !c) { return x->y[0]; }",
    "naïve café — Zoë's “quote” … €5",
    "cafe\u0301 n\u0303 a\u030a\u0323 \u1e9b\u0323",
    "日本語のテキストと中文混合。한국어도",
    "Привет, мир! Γειά σου Κόσμε",
    "مرحبا بالعالم שלום עולם",
    "हिन्दी में पाठ ก็ภาษาไทย",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪 e\u0301\u200d",
    "\u00a0nbsp\u2003em\u3000wide\u200bzero\ufeffbom",
    "\u0000\u0001\u001b[0m\u007f\u0085",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﬁ ﬂ Ⅷ ½ ①",
    "\ufffd\U0010ffff\ue000",
    "<s>not a start</s> <|im_start|>user<|im_end|> <tool_call>x</tool_call> [CLS][SEP] <unk><pad>",
    "<|im_end|>",
    "a<|im_end|>b <|im_end|> c",
    "▁already▁marked <0x41> <0x0A>",
    "UPPER lower MiXeD camelCaseWord snake_case_word HTTPServer2Go",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbb",
    "http://example.com/path?query=1&other=%20#frag",
    "the the the there then they them",
    "...---===>>>///***",
    "x" * 120,
]


def corpus():
    """Sentences with the letters, spacing and repetition a tokenizer needs to learn something."""
    rng = random.Random(20)
    words = (
        "the of and there then they them model layer token text world hello return range print café naïve straße "
        "Привет мир 日本 日本語 テキスト 中文 한국어 हिन्दी שלום مرحبا 123 2024 3.14 don't it's they're we'll I'm "
        "HTTPServer camelCase snake_case user assistant system if else for while def fn let mut self 😀 … — “quote”"
    ).split()
    for _ in range(3000):
        yield " ".join(rng.choice(words) for _ in range(rng.randint(2, 12))) + rng.choice([".", "!", "?", "\n", "  ", ""])
    for _ in range(300):
        yield "def " + rng.choice(words) + "(x):\n    return [x for x in range(10)]\n\n"


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(name, pre, splits, *, normalizer=None, ignore_merges=False, bos=False, digits=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        tokenizer.normalizer = normalizer
    if splits is None:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=520,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    described = json.loads(tokenizer.to_str())
    tokens = in_order(tokenizer)
    vocabulary = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_types": [3 if token in SPECIAL else 4 if token == "<tool_call>" else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in described["model"]["merges"]],
        "bos": 0,
        "eos": 2,
        "add_bos": bos,
    }
    save(name, tokenizer, vocabulary, hub_cases(tokenizer))


def in_order(tokenizer):
    table = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=True).items()}
    return [table[id] for id in range(len(table))]


def hub_cases(tokenizer, extra=()):
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = []
    described["post_processor"] = None
    without_added = Tokenizer.from_str(json.dumps(described))
    cases = []
    for text in [*TEXTS, *extra]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        cases.append(
            {
                "text": text,
                "ids": ids,
                "framed": tokenizer.encode(text, add_special_tokens=True).ids,
                "literal": without_added.encode(text, add_special_tokens=False).ids,
                "decoded": tokenizer.decode(ids, skip_special_tokens=True),
            }
        )
    return cases


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokens = in_order(tokenizer)
    vocabulary = {
        "model": "bert",
        "tokens": [t if t in special else t[2:] if t.startswith("##") else "▁" + t for t in tokens],
        "token_types": [3 if token in special else 1 for token in tokens],
        "pad": 0,
        "unk": 1,
        "bos": 2,
        "cls": 2,
        "sep": 3,
    }
    save("wordpiece", tokenizer, vocabulary, hub_cases(tokenizer))


def train_sentencepiece(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus(), model_writer=model, minloglevel=2, num_threads=1, **options
    )
    proto = spm.ModelProto()
    proto.ParseFromString(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), proto


def sentencepiece_vocabulary(kind, proto):
    spec = proto.normalizer_spec
    vocabulary = {
        "model": kind,
        "tokens": [
            # Converters write the spaces of user-defined pieces as spaces.
            piece.piece.replace("▁", " ") if piece.type == piece.USER_DEFINED else piece.piece
            for piece in proto.pieces
        ],
        "scores": [piece.score for piece in proto.pieces],
        "token_types": [piece.type for piece in proto.pieces],
        "unk": 0,
        "bos": 1,
        "eos": 2,
        "add_bos": True,
        "add_eos": kind == "t5",
        "add_space_prefix": spec.add_dummy_prefix,
        "remove_extra_whitespaces": spec.remove_extra_whitespaces,
    }
    if spec.precompiled_charsmap:
        vocabulary["precompiled_charsmap"] = list(spec.precompiled_charsmap)
    return vocabulary


def sentencepiece_cases(processor, user_defined=(), skip=lambda text: False):
    """SentencePiece finds user-defined symbols in plain text, and control symbols never."""
    cases = []
    for text in TEXTS:
        if skip(text):
            continue
        ids = processor.encode(text)
        case = {"text": text, "ids": ids, "literal": ids}
        if processor.unk_id() not in ids:
            case["decoded"] = processor.decode(ids)
        if any(control in text for control in ["<s>", "</s>", "<unk>"]):
            del case["ids"]
        if any(symbol.replace("▁", " ") in text for symbol in user_defined):
            del case["literal"]
        if "ids" in case or "literal" in case:
            cases.append(case)
    return cases


def merges_of(proto):
    """What converters make of scores: every way to put a piece together, best piece first."""
    table = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    merges = []
    for id, piece in enumerate(proto.pieces):
        if piece.type == piece.NORMAL:
            ways = [(piece.piece[:at], piece.piece[at:]) for at in range(1, len(piece.piece))]
            ways = [way for way in ways if way[0] in table and way[1] in table]
            merges += [(-piece.score, id, table[left], table[right], left, right) for left, right in ways]
    return [(left, right) for *_, left, right in sorted(merges)]


def sentencepiece_bpe(name, *, prefix, user_defined=()):
    processor, proto = train_sentencepiece(
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=list(user_defined),
        split_digits=True,
    )
    # As a tokenizer.json, the way Llama 2 has it.
    tokenizer = Tokenizer(
        models.BPE(
            {piece.piece: id for id, piece in enumerate(proto.pieces)},
            merges_of(proto),
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    marks = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ["<unk>", "<s>", "</s>"]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if not user_defined:
        save(name + "-hub", tokenizer, None, hub_cases(tokenizer))
    cases = sentencepiece_cases(processor, user_defined)
    save(name, None, sentencepiece_vocabulary("llama", proto), cases)


def unigram(name, *, byte_fallback):
    rules = HERE / "rules.tsv"
    # A few rules instead of all of NFKC, whose table is larger than all other fixtures together.
    pairs = {"ﬁ": "fi", "½": "1/2", "\u00a0": " ", "\t": " ", "\n": " ", "\r": " ", "…": "...", "①": "1", "e\u0301": "é"}
    lines = [" ".join(f"{ord(c):X}" for c in a) + "\t" + " ".join(f"{ord(c):X}" for c in b) for a, b in pairs.items()]
    rules.write_text("\n".join(lines) + "\n")
    processor, proto = train_sentencepiece(
        model_type="unigram",
        vocab_size=500,
        byte_fallback=byte_fallback,
        character_coverage=0.999,
        normalization_rule_tsv=str(rules),
        remove_extra_whitespaces=True,
        add_dummy_prefix=True,
        hard_vocab_limit=False,
    )
    rules.unlink()
    # The model of `tokenizers` does not tell byte tokens and control tokens from text that spells them.
    # `tokenizers`, and so `transformers`, looks up whole grapheme clusters and misses parts of long ones.
    cases = sentencepiece_cases(processor, skip=lambda text: "<" in text or "e\u0301\u200d" in text)
    save(name, None, sentencepiece_vocabulary("t5", proto), cases)


def save(name, tokenizer, vocabulary, cases):
    fixture = {
        "tokenizer": json.loads(tokenizer.to_str()) if tokenizer else None,
        "vocabulary": vocabulary,
        "cases": cases,
    }
    (HERE / f"{name}.json").write_text(json.dumps(fixture, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(name, (HERE / f"{name}.json").stat().st_size)


if __name__ == "__main__":
    HERE.mkdir(parents=True, exist_ok=True)
    byte_level("gpt2", "gpt-2", None)
    byte_level("smollm", "smollm", None, digits=True)
    byte_level("llama3", "llama-bpe", LLAMA3, ignore_merges=True, bos=True)
    byte_level("qwen2", "qwen2", QWEN2, normalizer=normalizers.NFC())
    byte_level("qwen35", "qwen35", QWEN35, normalizer=normalizers.NFC())
    byte_level("tekken", "tekken", TEKKEN, ignore_merges=True, bos=True)
    byte_level("gpt-4o", "gpt-4o", GPT4O)
    byte_level("deepseek-v3", "deepseek-v3", DEEPSEEK3)
    sentencepiece_bpe("spm-bpe", prefix=True)
    sentencepiece_bpe("spm-bpe-no-prefix", prefix=False, user_defined=["<tool_call>", "▁▁▁"])
    unigram("unigram", byte_fallback=False)
    unigram("unigram-bytes", byte_fallback=True)
    word_piece()
