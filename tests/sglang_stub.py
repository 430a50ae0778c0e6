# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts of SGLang that flashplan.sglang uses, by their documented signatures."""

import dataclasses
import enum
import sys
import types


class AttentionBackend:
    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        decodes = forward_batch.forward_mode.is_decode()
        forward = self.forward_decode if decodes else self.forward_extend
        return forward(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class ForwardMode(enum.Enum):
    EXTEND, DECODE, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2 = range(5)

    def is_decode(self):
        return self is ForwardMode.DECODE

    def is_idle(self):
        return self is ForwardMode.IDLE

    def is_target_verify(self):
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self):
        return self is ForwardMode.DRAFT_EXTEND_V2


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclasses.dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    req_pool_indices: object = None
    seq_lens: object = None
    seq_lens_cpu: object = None
    extend_seq_lens_cpu: object = None
    out_cache_loc: object = None


@dataclasses.dataclass
class KVWriteLoc:
    loc: object

    @classmethod
    def for_layer(cls, forward_batch, layer):
        return cls(forward_batch.out_cache_loc)


@dataclasses.dataclass
class RadixAttention:
    tp_q_head_num: int
    tp_k_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    layer_id: int = 0
    logit_cap: float = 0.0
    sliding_window_size: int = -1
    is_cross_attention: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    k_scale_float: float | None = None
    v_scale_float: float | None = None


class KVPool:
    """MHATokenToKVPool: a tensor of slots for the keys and one for the values of each layer."""

    def __init__(self, torch, num_layers, num_slots, heads, dim, dtype):
        self.dtype = dtype
        self.buffers = [
            torch.zeros(2, num_slots, heads, dim, dtype=dtype) for _ in range(num_layers)
        ]

    def get_kv_buffer(self, layer_id):
        return tuple(self.buffers[layer_id])

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        for buffer, x, scale in zip(
            self.buffers[layer.layer_id], (cache_k, cache_v), (k_scale, v_scale)
        ):
            buffer[loc_info.loc] = (x if scale is None else x / scale).to(self.dtype)


def install(monkeypatch):
    """Stands for SGLang in a test. Returns its registry and its list of names of backends."""
    names = ["triton"]
    made = {
        "sglang.srt.layers.attention.attention_registry": {"ATTENTION_BACKENDS": {}},
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "sglang.srt.server_args": {"add_attention_backend_choices": names.extend},
    }
    backends = made["sglang.srt.layers.attention.attention_registry"]["ATTENTION_BACKENDS"]

    def register_attention_backend(name):
        return lambda function: backends.setdefault(name, function)

    made["sglang.srt.layers.attention.attention_registry"]["register_attention_backend"] = (
        register_attention_backend
    )
    for name in list(made):
        while "." in name:  # the packages around them
            name = name.rpartition(".")[0]
            made.setdefault(name, {})
    for name, contents in made.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flashplan.sglang_backend", raising=False)
    return backends, names
