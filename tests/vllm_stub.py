# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts of vLLM that flashplan.vllm uses, by their documented signatures."""

import dataclasses
import enum
import sys
import types
from abc import ABC, abstractmethod


class MultipleOf:
    def __init__(self, base):
        self.base = base


class AttentionBackend(ABC):
    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    NEVER = 0


class AttentionMetadataBuilder(ABC):
    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


class AttentionImpl(ABC):
    @abstractmethod
    def __init__(self, num_heads, head_size, scale, num_kv_heads=None): ...

    @abstractmethod
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output): ...


@dataclasses.dataclass
class CommonAttentionMetadata:
    query_start_loc_cpu: object
    seq_lens: object
    block_table_tensor: object
    slot_mapping: object
    causal: object = True
    seq_lens_cpu_upper_bound: object = None
    seq_lens_cpu: object = None


class AttentionBackendEnum(enum.Enum):
    CUSTOM = "CUSTOM"


def modules(registered):
    """What to put into sys.modules; registered backends go into a dictionary."""
    backend = types.ModuleType("vllm.v1.attention.backend")
    for thing in (
        MultipleOf,
        AttentionBackend,
        AttentionCGSupport,
        AttentionMetadataBuilder,
        AttentionImpl,
        CommonAttentionMetadata,
    ):
        setattr(backend, thing.__name__, thing)
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = AttentionBackendEnum
    registry.register_backend = registered.__setitem__
    return {module.__name__: module for module in (backend, registry)}


def install(monkeypatch):
    """Stands for vLLM in a test, and returns what is registered."""
    registered = {}
    made = modules(registered)
    for name in list(made):
        while "." in name:  # the packages around them
            name = name.rpartition(".")[0]
            made.setdefault(name, types.ModuleType(name))
    for name, module in made.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flashplan.vllm_backend", raising=False)
    return registered
