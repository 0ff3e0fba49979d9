"""Write conf/models/tiny: configuration and character tokenizer of a model for tests on one core.

    python data/make_tiny_tokenizer.py [DIRECTORY]

The vocabulary is four special tokens, the newline and the printable ASCII characters, one token
each; any other character becomes ``<unk>``. Nothing is added to a text that is encoded, and
decoding gives it back. The model is a Llama of two layers with random weights (it has no weight
file); its head size of 32 is the smallest that inference engines accept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = ("\n", *map(chr, range(0x20, 0x7F)))
MAX_TOKENS = 256


def make_tokenizer() -> Tokenizer:
    """One token per character."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    return tokenizer


def main(directory: Path) -> None:
    """Write the three files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_TOKENS,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": SPECIAL.index("<pad>"),
        "bos_token_id": SPECIAL.index("<bos>"),
        "eos_token_id": SPECIAL.index("<eos>"),
        "torch_dtype": "float32",
    }
    for name, content in (("tokenizer_config.json", tokenizer_config), ("config.json", config)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(
        Path(sys.argv[1])
        if len(sys.argv) > 1
        else Path(__file__).parents[1] / "conf" / "models" / "tiny"
    )
