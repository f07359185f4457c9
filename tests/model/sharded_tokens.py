"""Run by `torchrun` with two processes: FSDP2 shards a model, whose tokens are those of the whole one."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.fast.one_token import _WEIGHTS

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
config = HopeConfig(vocab_size=32, hidden_size=24, num_hidden_layers=2, head_dim=8, memory_chunk_size=4)
text = torch.randint(config.vocab_size, (2, 10))
whole = HopeForCausalLM(config).double().eval()
sharded = copy.deepcopy(whole)
for block in sharded.model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(sharded, mesh=mesh)
for block in whole.model.layers:
    # modules with hooks are called
    block.mixer.register_forward_hook(lambda *_: None)
    block.continuum.register_forward_hook(lambda *_: None)
cache, cache_of_whole = HopeCache(config), HopeCache(config)
with torch.no_grad():
    for piece in text.split([4, 1, 1, 1, 1, 1, 1], dim=1):
        found = sharded(piece, cache=cache).logits
        expected = whole(piece, cache=cache_of_whole).logits
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        # a change of the shards counts at the next token
        for part in sharded.modules():
            if hasattr(part, "reshard"):
                part.reshard()
        for shard, parameter in zip(sharded.parameters(), whole.parameters(), strict=True):
            shard.to_local().mul_(1.1)
            parameter.mul_(1.1)
assert all(_WEIGHTS[block].memory and _WEIGHTS[block].levels for block in sharded.model.layers)
dist.barrier()
dist.destroy_process_group()
