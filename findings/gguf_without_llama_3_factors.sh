#!/usr/bin/env bash
# transformers 5.23.0: a GGUF file of a Llama 3.1 is read without its rotary factors.
#
# Guess: `rope_freqs.weight`, in which llama.cpp's converter writes the frequencies' factors of Llama 3.1 to 3.3, is
# read, or the tensor is named as one that is not used.
# Seen: the model has plain positions, equal to 1e-4 to the same weights with rope_type "default"; logits of the model
# that was written are off by 0.1 and more. Neither the loading report nor a warning names the tensor.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
cat > program.py <<'PROGRAM'
import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64)
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
SMALL |= dict(max_position_embeddings=512, rms_norm_eps=1e-5)
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}

torch.manual_seed(0)
llama = LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3)).eval()
for parameter in llama.parameters():
    if parameter.ndim >= 2:
        torch.nn.init.normal_(parameter, std=0.3)
plain = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
plain.load_state_dict(llama.state_dict())
factors = plain.model.rotary_emb.inv_freq / llama.model.rotary_emb.inv_freq

file = gguf.GGUFWriter("llama.gguf", "llama")
file.add_context_length(512)
file.add_embedding_length(32)
file.add_block_count(1)
file.add_feed_forward_length(48)
file.add_head_count(2)
file.add_head_count_kv(2)
file.add_layer_norm_rms_eps(1e-5)
file.add_rope_dimension_count(16)
file.add_rope_freq_base(10000.0)
file.add_vocab_size(64)
for name, tensor in llama.state_dict().items():
    if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours, transformers halves
        tensor = tensor.view(2, 2, 8, 32).transpose(1, 2).reshape(32, 32)
    file.add_tensor(NAMES[name], np.ascontiguousarray(tensor.numpy()))
file.add_tensor("rope_freqs.weight", factors.numpy())
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()

read = AutoModelForCausalLM.from_pretrained(".", gguf_file="llama.gguf").eval()
text = torch.randint(64, (1, 200))
with torch.no_grad():
    of_plain, of_written = ((model(text).logits - read(text).logits).abs().max().item() for model in (plain, llama))
print("factors", [round(factor, 2) for factor in factors.tolist()], "read:", read.config.rope_parameters)
print(f"logits apart from plain positions {of_plain:.1e}, from the model that was written {of_written:.1e}")
assert of_plain < 1e-4 and of_written > 0.1, "the behaviour changed"
PROGRAM
"$folder/env/bin/python" program.py 2>&1 | tee said
if grep -q rope_freqs said; then exit 1; fi
