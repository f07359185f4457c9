"""Run by `torchrun` with two processes: load a model, shard it with FSDP2, save it whole.

fsdp_save.py SOURCE TARGET
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import hope_hf  # noqa: F401  registers the model

source, target = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
model = AutoModelForCausalLM.from_pretrained(source)
for block in model.model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
# a step of nothing: parameters are gathered and freed again as in training
model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    model.save_pretrained(target, state_dict=weights)
dist.barrier()
dist.destroy_process_group()
