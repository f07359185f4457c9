"""Run by `torchrun` with two processes: load a model cut by tensor parallelism, and write what it computes.

tensor_parallel.py SOURCE TARGET
"""

import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from hope_hf import HopeForCausalLM
from hope_hf.model.cache_file import fingerprint

source, target = sys.argv[1:]
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(tp_size=2))
# a memory may be handed from the whole model to the cut one
assert fingerprint(model) == fingerprint(HopeForCausalLM.from_pretrained(source))
ids = torch.arange(38).view(2, 19)
out = model(ids, labels=ids)
out.loss.backward()
cut = {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
gradients = {
    f"grad.{name}": parameter.grad.full_tensor() if name in cut else parameter.grad
    for name, parameter in model.named_parameters()
}
tokens = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=63)
if dist.get_rank() == 0:
    held = {f"cut.{name}": torch.tensor(dict(model.named_parameters())[name].to_local().numel()) for name in cut}
    whole = {name: tensor.contiguous() for name, tensor in gradients.items()}
    save_file({"logits": out.logits.detach(), "tokens": tokens, **whole, **held}, target)
dist.barrier()
dist.destroy_process_group()
