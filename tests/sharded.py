# SPDX-License-Identifier: Apache-2.0
"""Runs a Case in a program of JAX on several devices, each of which has some of the heads."""

import dataclasses

import numpy as np

import flashplan as fp
from batches import BATCH
from case import Case
from frameworks import NumPy
from solve import assert_correct, problem, run_arguments

CASE = Case(**BATCH, num_qo_heads=8, num_kv_heads=4, q_dtype="float32", sinks=True)
AXIS = "heads"  # of the mesh
WHOLE = {"q": (), "k": (), "v": (), "sinks": ()}  # how arrays that are not divided are placed
# The plan of small(), and its page table.
INDPTR, LENS = np.array([0, 1, 3], np.int32), np.array([5, 7], np.int32)
TABLE = np.array([[4, 1], [2, 0]], np.int32)


class Sharded:
    """The problem of a case, an Attention on each device, and the plan.

    The heads of the case are those of all devices together.
    """

    def __init__(self, jax, case, devices, seed):
        import flashplan.jax

        self.jax, self.case, self.devices = jax, case, devices
        self.calls = flashplan.jax
        self.inputs, *self.expected = problem(case, seed)
        self.attn = self.calls.on_devices(fp.Attention(**self.options_of_one()), devices)
        self.attn.plan(*self.inputs.plan_args(), **self.inputs.plan_options())
        (q, k, v), others = run_arguments(case, self.inputs, NumPy())
        self.numbers = {name: x for name, x in others.items() if isinstance(x, float)}
        arrays = {"q": q, "k": k, "v": v} | others
        self.arrays = {name: x for name, x in arrays.items() if name not in self.numbers}

    def options_of_one(self):
        n = len(self.devices)
        case = self.case
        one = dataclasses.replace(
            case, num_qo_heads=case.num_qo_heads // n, num_kv_heads=case.num_kv_heads // n
        )
        return one.options() | {"device": self.devices[0]}

    def run(self, arrays):
        """(o, lse)"""
        return self.calls.run(self.attn, **self.numbers | arrays, return_lse=True)

    def mesh(self, explicit=False):
        kind = self.jax.sharding.AxisType.Explicit if explicit else None
        devices = np.array(self.devices)
        return self.jax.sharding.Mesh(devices, (AXIS,), axis_types=kind and (kind,))

    def specs(self, **others):
        """How each array is divided: by its heads; `others` says it of arrays that differ."""
        spec = self.jax.sharding.PartitionSpec
        cache = (None, AXIS) if self.case.kv_layout == "HND" or not self.case.page_size else None
        heads = {"q": (None, AXIS), "sinks": (AXIS,), "k_scale": (AXIS,), "v_scale": (AXIS,)}
        heads["k"] = heads["v"] = cache or (None, None, AXIS)
        return {
            name: spec(*heads.get(name, ())) if array.size > 1 else spec()
            for name, array in self.arrays.items()
        } | {name: spec(*dimensions) for name, dimensions in others.items()}

    def placed(self, mesh, **others):
        """The arrays on the devices of a mesh."""
        return {
            name: self.jax.device_put(
                self.arrays[name], self.jax.sharding.NamedSharding(mesh, spec)
            )
            for name, spec in self.specs(**others).items()
        }

    def under_shard_map(self, function, mesh, out_specs=None):
        if out_specs is None:
            out_specs = self.jax.sharding.PartitionSpec(None, AXIS)
        mapped = self.jax.shard_map(
            function, mesh=mesh, in_specs=(self.specs(),), out_specs=out_specs
        )
        return self.jax.jit(mapped)

    def planned_rows(self, results):
        """As NumPy arrays: those that were not planned are arbitrary."""
        return [np.asarray(x)[: self.inputs.qo_indptr[-1]] for x in results]

    def assert_right(self, o, lse):
        assert_correct(self.case, self.inputs, *self.expected, *self.planned_rows((o, lse)))


def placed(jax, devices, array, *spec):
    """The array on the devices, divided as `spec` says of its dimensions."""
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.P(*spec)))


def small(calls, devices, **options):
    """An Attention on each device for three tokens of two requests over five pages, planned."""
    one = fp.Attention(4, 2, 8, page_size=4, q_dtype="float32", device="cpu", **options)
    attn = calls.on_devices(one, devices)
    attn.plan(INDPTR, LENS)
    return attn


def small_arrays(rng):
    """(q, new (k, v), caches) of all heads. A page has four tokens and four heads."""
    shapes = ((3, 8, 8), (2, 3, 4, 8), (2, 5, 4, 4, 8))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]
