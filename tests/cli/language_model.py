# SPDX-License-Identifier: MIT
"""This module makes a tiny random Llama with a tokenizer of bytes, saved as a folder that commands take as MODEL."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers


def save_llama(folder, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | heads | changes)).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters | {"<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder
