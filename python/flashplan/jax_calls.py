# SPDX-License-Identifier: Apache-2.0
"""Calls of XLA whose heads may be divided among devices.

XLA would gather all arrays of a call that it does not know on every device. These calls tell it in
which dimension each array has its heads: so each device runs the call on its own heads, and a
program that divides anything else is refused before it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
from jax import Array
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec, auto_axes, get_abstract_mesh

from flashplan import _core


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array that a call takes. `heads`: the index of the dimension of heads, which may be
    divided among devices; None: the array has no such dimension."""

    name: str
    heads: int | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    shape: tuple[int, ...]
    dtype: str
    heads: int


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of XLA without its arrays. JAX needs it to be hashable.

    `devices`: the devices of programs that may make the call. Empty: any one device; None: any
    devices.
    """

    target: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    attributes: tuple[tuple[str, Any], ...]
    aliases: tuple[tuple[int, int], ...] = ()
    devices: frozenset[Any] | None = None


def is_local() -> bool:
    """Whether arrays have the shapes of one device, as they have inside shard_map."""
    return bool(get_abstract_mesh().manual_axes)


def check_mesh(devices: frozenset[Any] | None) -> None:
    """Inside shard_map, raises ValueError if its mesh does not fit `devices` of a `Call`.

    The mesh must have as many devices, and no axes that shard_map leaves to XLA.
    """
    if not is_local():
        return
    mesh = get_abstract_mesh()
    if set(mesh.manual_axes) != set(mesh.axis_names):
        raise ValueError(
            f"shard_map: expected all axes of the mesh, {mesh.axis_names}, got {mesh.manual_axes}"
        )
    _check_num_devices(devices, mesh.size)


def _check_num_devices(devices: frozenset[Any] | None, num_devices: int) -> None:
    if devices is None or num_devices == max(1, len(devices)):
        return
    if devices:
        raise ValueError(
            f"attn: expected a program on its {len(devices)} devices, got one on {num_devices}"
        )
    raise ValueError(
        "attn: expected an Attention for each device (flashplan.jax.on_devices) in a program on "
        f"{num_devices} devices, got one Attention"
    )


def _check_devices(expected: frozenset[Any] | None, devices: Sequence[Any]) -> None:
    _check_num_devices(expected, len(devices))
    if expected and expected != set(devices):
        raise ValueError(
            f"attn: expected a program on its devices {_text(expected)}, got {_text(devices)}"
        )


def _text(devices: Any) -> str:
    return ", ".join(sorted(map(str, devices)))


def _lower_check(context: Any, array: Any, *, devices: frozenset[Any] | None) -> Any:
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if isinstance(mesh, Mesh):
        _check_devices(devices, list(mesh.devices.flat))
    elif (assigned := getattr(axes, "device_assignment", None)) is not None:
        _check_devices(devices, assigned)
    return [array]


# An operation that returns its argument. Its lowering checks the devices of the program, which JAX
# does not know while it traces.
_checked_p: Any = Primitive("flashplan_check_devices")
_checked_p.def_impl(lambda array, **_: array)
_checked_p.def_abstract_eval(lambda array, **_: array)
mlir.register_lowering(_checked_p, _lower_check)


def _call_on_each_device(call: Call, *arrays: Array) -> tuple[Array, ...]:
    make: Any = jax.ShapeDtypeStruct
    function = jax.ffi.ffi_call(
        call.target,
        [make(result.shape, result.dtype) for result in call.results],
        input_output_aliases=dict(call.aliases),
    )
    checked = _checked_p.bind(arrays[0], devices=call.devices)
    results: Any = function(checked, *arrays[1:], **dict(call.attributes))
    return tuple(results)


# JAX declares no types for these names.
_array_mapping: Any = ArrayMapping
_group: Any = CompoundFactor
_partition_spec: Any = PartitionSpec
_vmap_by_a_loop: Any = sequential_vmap
_partitioned_by: Any = custom_partitioning


def _mapping(prefix: str, shape: Sequence[int], heads: int | None, num_kv_heads: int) -> Any:
    """Names each dimension. Heads have the same name in all arrays, so they are divided alike."""
    names: list[Any] = [f"{prefix}{i}" for i in range(len(shape))]
    if heads is not None:
        names[heads] = "heads" if shape[heads] == num_kv_heads else _group("heads", "group")
    return _array_mapping(*names)


def _sharding_rule(
    call: Call, mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]
) -> SdyShardingRule:
    """JAX calls this when it lowers a program for several devices: heads may be divided.

    The rule also lets other dimensions of arguments be divided. Otherwise XLA would gather such
    arrays on each device; with this rule _partition() sees that they are divided, and refuses them.
    """
    _check_devices(call.devices, list(mesh.devices.flat))
    sizes = [
        array.shape[argument.heads]
        for argument, array in zip(call.arguments, arguments)
        if argument.heads is not None
    ]
    num_kv_heads = min(sizes)
    group_size = max(sizes) // num_kv_heads
    operands = tuple(
        _mapping(f"argument{i}_", array.shape, argument.heads, num_kv_heads)
        for i, (argument, array) in enumerate(zip(call.arguments, arguments))
    )
    outputs = tuple(
        _mapping(f"result{i}_", array.shape, result.heads, num_kv_heads)
        for i, (result, array) in enumerate(zip(call.results, results))
    )
    whole = [name for names in outputs for name in names if str(name).startswith("result")]
    return SdyShardingRule(
        operands,
        outputs,
        need_replication_factors=tuple(whole),
        **({"group": group_size} if group_size > 1 else {}),
    )


def _heads_over(axes: Any, heads: int | None, num_dims: int) -> PartitionSpec:
    spec: PartitionSpec = _partition_spec(*(axes if i == heads else None for i in range(num_dims)))
    return spec


def _axes_of_heads(dimensions: Iterable[int | None], specs: Iterable[Any]) -> Any:
    """The axes of the mesh over which the first array with divided heads divides them; None if all
    arrays have whole heads."""
    for heads, spec in zip(dimensions, specs):
        if heads is not None and spec is not None and spec[heads] is not None:
            return spec[heads]
    return None


def _check_sharding(argument: Argument, spec: PartitionSpec, axes: Any) -> None:
    """Raises ValueError if another dimension than heads is divided, or heads not over `axes`."""
    for i, part in enumerate(spec):
        if part is not None and i != argument.heads:
            whole = "the whole array" if argument.heads is None else "no part but heads"
            raise ValueError(f"{argument.name}: expected {whole} on each device, got {spec}")
        if part not in (None, axes):
            raise ValueError(
                f"{argument.name}: expected heads divided as those of other arrays, by {axes!r}, "
                f"got {spec}"
            )


def _divided(call: Call, mesh: Any, axes: Any) -> tuple[NamedSharding, ...]:
    """The shardings of the results."""
    return tuple(
        NamedSharding(mesh, _heads_over(axes, result.heads, len(result.shape)))
        for result in call.results
    )


def _infer_sharding(
    call: Call, mesh: Mesh, arguments: Sequence[Any], _results: Sequence[Any]
) -> tuple[NamedSharding, ...]:
    """JAX calls this instead of _sharding_rule() if JAX uses GSPMD and not Shardy. This function
    must not raise, because XLA would then abort the process."""
    dimensions = [argument.heads for argument in call.arguments]
    specs = [getattr(array.sharding, "spec", None) for array in arguments]
    return _divided(call, mesh, _axes_of_heads(dimensions, specs))


def _partition(call: Call, mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
    """JAX calls this when it compiles a program for several devices. Returns the function that each
    device calls, and the shardings of its results and arguments."""
    dimensions = [argument.heads for argument in call.arguments]
    dimensions += [result.heads for result in call.results]
    specs = [array.sharding.spec for array in (*arguments, *results)]
    axes = _axes_of_heads(dimensions, specs)
    wanted = []
    for argument, array, spec in zip(call.arguments, arguments, specs):
        _check_sharding(argument, spec, axes)
        wanted.append(NamedSharding(mesh, _heads_over(axes, argument.heads, len(array.shape))))
    divided = _divided(call, mesh, axes)
    shape, heads = call.results[0].shape, call.results[0].heads
    if call.devices and divided[0].shard_shape(shape)[heads] * len(call.devices) != shape[heads]:
        raise ValueError(
            f"{call.arguments[0].name}: expected heads divided among {len(call.devices)} devices "
            f"(jax.sharding.NamedSharding), got {specs[0]}"
        )
    local = dataclasses.replace(
        call,
        results=tuple(
            dataclasses.replace(result, shape=sharding.shard_shape(result.shape))
            for result, sharding in zip(call.results, divided)
        ),
    )

    def call_locally(*arrays: Array) -> tuple[Array, ...]:
        return _call_on_each_device(local, *arrays)

    return mesh, call_locally, divided, tuple(wanted)


_partitioned: Any = _partitioned_by(_call_on_each_device, static_argnums=(0,))
_partitioned.def_partition(
    _partition, infer_sharding_from_operands=_infer_sharding, sharding_rule=_sharding_rule
)


def _call_xla(call: Call, *arrays: Array) -> tuple[Array, ...]:
    function: Any = _vmap_by_a_loop(lambda *arrays: _partitioned(call, *arrays))
    sharding: Any = jax.typeof(arrays[0]).sharding
    if explicit := sharding.mesh.explicit_axes:  # JAX then needs the results' shardings
        specs: Any = [jax.typeof(array).sharding.spec for array in arrays]
        axes = _axes_of_heads([argument.heads for argument in call.arguments], specs)
        for argument, spec in zip(call.arguments, specs):
            _check_sharding(argument, spec, axes)
        function = auto_axes(
            function, axes=explicit, out_sharding=_divided(call, sharding.mesh, axes)
        )
    # Inside shard_map JAX tracks which arrays may differ between devices. It would take the results
    # to be equal on all devices, so they are marked as varying.
    kinds: Any = [jax.typeof(array).manual_axis_type for array in arrays]
    varying = tuple(frozenset().union(*(kind.varying for kind in kinds)))
    return tuple(jax.lax.pcast(result, varying, to="varying") for result in function(*arrays))


def _refuse_gradient(call: Call, _primals: Any, _tangents: Any) -> NoReturn:
    name = call.target.replace("_", ".jax.", 1)
    raise _core.UnsupportedError(
        f"{name}: expected no gradient (there is no backward pass: jax.lax.stop_gradient), "
        "got a function that is differentiated"
    )


# The jit compiles a call that is made outside of compiled functions, too: its arrays may be divided
# among devices as well, and JAX partitions only compiled calls.
call_xla: Any = jax.custom_jvp(jax.jit(_call_xla, static_argnums=0), nondiff_argnums=(0,))
call_xla.defjvp(_refuse_gradient)
