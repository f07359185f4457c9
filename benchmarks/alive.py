"""Is the memory of a trained model still used late in a text?

What writing changed in the content memories' reads, |M_t(q_t) - M_0(q_t)|, at positions 7,168 to 8,191 over that at 64
to 127: mean over sequences, heads and layers with memories. Sequences are the beginnings of documents of the built-in
corpus; 0.5 or more counts as alive.

    python benchmarks/alive.py --model_name_or_path runs/demo
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hope_hf import HopeForCausalLM
from hope_hf.data.corpus import corpus_documents

LENGTH = 8192
EARLY, LATE = slice(64, 128), slice(7168, 8192)


@torch.no_grad()
def contributions(model: HopeForCausalLM, input_ids: torch.Tensor) -> torch.Tensor:
    """Mean over sequences and heads of |M_t(q_t) - M_0(q_t)|, per layer with memories and token [layers, T]."""
    shares, handles = [], []

    def record(module, arguments):
        shares.append(module.contribution(arguments[0]).mean((0, 2)))

    for block, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        if kind == "hope_memory":
            handles.append(block.mixer.register_forward_pre_hook(record))
    model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    return torch.stack(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--sequences", type=int, default=8)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    model = AutoModelForCausalLM.from_pretrained(options.model_name_or_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    ids = []
    for _, text in corpus_documents():
        tokens = tokenizer(text, return_attention_mask=False)["input_ids"]
        if len(tokens) >= LENGTH and len(ids) < options.sequences:
            ids.append(tokens[:LENGTH])
    input_ids = torch.tensor(ids)
    shares = contributions(model, input_ids)
    early, late = shares[:, EARLY].mean(1), shares[:, LATE].mean(1)
    layers = [layer for layer, kind in enumerate(model.config.layer_types) if kind == "hope_memory"]
    for layer, before, after in zip(layers, early.tolist(), late.tolist(), strict=True):
        print(f"layer {layer}: {before:.4f} at 64-127, {after:.4f} at 7,168-8,191, ratio {after / before:.2f}")
    print(
        f"{len(input_ids)} sequences of {LENGTH:,} tokens, all layers: ratio {(late.mean() / early.mean()).item():.2f}"
    )


if __name__ == "__main__":
    main()
