"""Compiles every Triton kernel for an H200, as a model of 8 billion parameters calls it."""

import os
import sys
from itertools import chain, product

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from specserve_kernels.cuda import (
    causal_conv,
    coded,
    experts,
    gated,
    move,
    norm,
    paged,
    recurrent,
    rope,
    sample,
    top_children,
)
from specserve_kernels.cuda.kv_codes import FP8, INT8, PLAIN

HOPPER = GPUTarget("cuda", 90, 32)


def source(kernel, constants, **types):
    """The kernel for arguments of these types; all others are constants."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    assert {n for n, t in signature.items() if t == "constexpr"} == set(constants), kernel
    return ASTSource(fn=kernel, signature=signature, constexprs=constants)


def with_ones(x):
    """As Triton compiles it where integers are 1: then they are constants, with other methods."""
    fixed = {p.name for p in x.fn.params if p.do_not_specialize}
    ones = {n for n, t in x.signature.items() if t == "i32" and n not in fixed}
    signature = {name: "constexpr" if name in ones else t for name, t in x.signature.items()}
    constants = {x.fn.arg_names[at[0]]: value for at, value in x.constants.items()}
    return ASTSource(fn=x.fn, signature=signature, constexprs=constants | dict.fromkeys(ones, 1))


DTYPES = ("*bf16", tl.bfloat16), ("*fp32", tl.float32)


def sources(*dtypes):
    for t, dot in dtypes or DTYPES:
        ints = dict.fromkeys(("block_size", "block_stride", "scale_stride"), "i32")
        yield source(
            norm._norm,
            {"IS_CENTERED": True, "HAS_BIAS": True, "ADDS": True, "BLOCK": 4096},
            **dict.fromkeys(("x", "out"), t),
            **dict.fromkeys(("weight", "bias"), "*fp32"),
            **dict.fromkeys(("K", "x_stride", "out_stride"), "i32"),
            eps="fp32",
        )
        for gate in ("gelu_tanh", "clamped"):
            fixed = {"GATE": gate, "BLOCK": gated.BLOCK}
            yield source(gated._gated, fixed, gate_up=t, out=t, F="i32", limit="fp32")
        yield source(
            gated._gate_columns,
            {"CURVE": "gelu_tanh", "BLOCK": gated.BLOCK},
            **dict.fromkeys(("x", "other"), t),
            **dict.fromkeys(("K", "W", "begin"), "i32"),
        )
        for curve in gated.CURVES:
            fixed = {"CURVE": curve, "BLOCK": gated.BLOCK}
            yield source(gated._activate, fixed, x=t, K="i32", positive="fp32", negative="fp32")
        for out in {t, "*fp32"}:
            sizes = {"TILE": experts.TILE, "OUTPUTS": experts.OUTPUTS, "COLUMNS": experts.COLUMNS}
            yield source(
                experts._multiply,
                {"EACH": 8, "DOT": dot, "HAS_BIAS": True} | sizes,
                **dict.fromkeys(("x", "weight", "bias"), t),
                **dict.fromkeys(("pairs", "expert", "first", "behind"), "*i64"),
                out=out,
                N="i32",
                K="i32",
            )
        stored = ((PLAIN.value, t), (INT8.value, "*i8"), (FP8.value, "*u8"))
        scales = dict.fromkeys(("k_scale", "v_scale"), "*fp32")
        for codes, kept in stored:
            fixed = {"HAS_NORM": True, "HALF": 64, "HALF_BLOCK": 64, "HEADS": rope.HEADS}
            is_plain = codes == PLAIN.value  # so that each form is compiled
            fixed |= {"IS_CENTERED": is_plain, "IS_LAST": is_plain, "HAS_SCALE": is_plain}
            fixed |= {"HAS_VALUES": True}
            yield source(
                rope._rope_write_kv,
                {**fixed, "CODES": codes},
                **dict.fromkeys(("qkv", "q_out"), t),
                **dict.fromkeys(("k_cache", "v_cache"), kept),
                **scales,
                **dict.fromkeys(("cos", "sin", "q_norm", "k_norm", "query_scale"), "*fp32"),
                **dict.fromkeys(("num_heads", "num_kv_heads", "norm_stride"), "i32"),
                **ints,
                positions="*i32",
                slots="*i64",
                eps="fp32",
            )
        yield source(
            move._move_kv,
            {"BLOCK": move.BLOCK},
            k=t,
            **dict.fromkeys(("source", "target"), "*i64"),
            **dict.fromkeys(("num_moves", "token", "layer_stride", "v_offset"), "i32"),
            **dict.fromkeys(("block_size", "block_stride", "slot_stride", "stride"), "i32"),
        )
        itemsize = 2 if t == "*bf16" else 4
        large, usual = ((stored[0], (4, 8, 512)),), product(stored, ((8, 4, 128),))
        for (codes, kept), (rows, group, D) in (*large, *usual):
            yield source(
                paged._attend,
                {
                    "HAS_CAP": True,
                    "HAS_SINKS": True,
                    "IS_WHOLE": False,
                    "GROUP": group,
                    "GROUP_BLOCK": group,
                    "ROWS": rows,
                    "D": D,
                    "D_BLOCK": max(16, 1 << (D - 1).bit_length()),
                    "SLOTS": paged.slots_per_iteration(D, itemsize),
                    "DOT": dot,
                    "CODES": codes,
                },
                q=t,
                **dict.fromkeys(("k", "v"), kept),
                **scales,
                **dict.fromkeys(("out", "lse"), "*fp32"),
                **dict.fromkeys(("pieces", "indptr", "indices"), "*i32"),
                **dict.fromkeys(("first", "prefix", "mask"), "*i64"),
                **dict.fromkeys(("num_heads", "num_kv_heads"), "i32"),
                **ints,
                **dict.fromkeys(("scale", "soft_cap"), "fp32"),
                sinks="*fp32",
            )
        yield source(
            paged._merge,
            {"HAS_SINKS": True, "D": 80, "D_BLOCK": 128},
            sinks="*fp32",
            parts="*fp32",
            lse="*fp32",
            merges="*i32",
            out=t,
            **dict.fromkeys(("num_heads", "ROWS"), "i32"),
        )

        yield from maps(t, dot)
        yield from recurrent_ops(t)
        yield from sampling(t)
        yield from said(t)


def maps(t, dot):
    """Of 4 bits with all that a map may have, and of 8 with as little as it may."""
    given = {"words": "*i32", "scale": "*fp32", "zero": "*i8", "offset": "*fp32", "out": t}
    given |= {"N": "i32", "K": "i32"}
    for bits, group, more in ((4, 128, True), (8, 32, False)):
        chunk = min(group, coded.CHUNKS[0])
        shape = {"BITS": bits, "GROUP": group, "CHUNK": chunk, "OUTPUTS": coded.OUTPUTS}
        shape |= {"HAS_ZERO": more, "HAS_OFFSET": more}
        yield source(coded._widen, shape, **given)
        flags = {"HAS_BIAS": more, "ADDS": more}
        constants = shape | flags | {"ROWS": coded.ROWS, "DOT": dot}
        more = {"x": t, "bias": t, "R": "i32", "tiles": "i32"}
        yield source(coded._multiply, constants, **given, **more)


def recurrent_ops(t):
    ints = ("x_stride", "block_size", "layer_stride", "C")
    tables = dict.fromkeys(("rows", "lanes", "order", "tables"), "*i32") | {"places": "*i64"}
    floats = dict.fromkeys(("inputs", "kept", "q", "q_out", "found", "rate"), "*fp32")
    floats |= dict.fromkeys(("dt_bias", "D", "norm", "weight", "bias"), "*fp32")
    sizes = ("H", "K", "Dk", "Dv", "width", "q_width", "sharing", "is_read", "begin", "inner")
    given = tables | floats | dict.fromkeys((*ints, *sizes, "groups", "size"), "i32")
    given |= dict.fromkeys(("eps", "beta_factor", "dt_factor", "z_factor"), "fp32")
    given |= dict.fromkeys(("x", "qkv", "xbc", "out", "gate"), t)
    rows = {"IS_GATED": t == "*bf16", "BLOCK": causal_conv.BLOCK}
    heads = {"K_BLOCK": 128, "V_BLOCK": 128}
    scan = {"K_BLOCK": 128, "COLUMNS": recurrent.COLUMNS}
    of_floats = {"memory": "*fp32", "out": "*fp32"}
    for kernel, constants, own in (
        (causal_conv._conv, rows | {"TAPS": 4, "HAS_BIAS": True}, {"memory": t, "kept": t}),
        (causal_conv._store_tails, rows | {"LENGTH": 3, "J": 4}, {"memory": t}),
        (recurrent._delta_inputs, heads, {}),
        (recurrent._mamba_inputs, heads, {}),
        (recurrent._scan, scan | {"IS_DELTA": t == "*bf16"}, of_floats),
        (recurrent._delta_outputs, {"V_BLOCK": 128}, {}),
        *(
            (recurrent._mamba_outputs, forms | {"HAS_NORM": True, "BLOCK": 4096}, {})
            for forms in ({"GATES_FIRST": True}, {"GATES_FIRST": False})
        ),
        (recurrent._gate, {"BLOCK": 1024}, {}),
    ):
        types = {name: x for name, x in (given | own).items() if name in kernel.arg_names}
        yield source(kernel, constants, **{n: x for n, x in types.items() if n not in constants})


def sampling(t, V=152064, K=4):
    """Kernels over a vocabulary; their constants are what the functions around them choose."""
    asked = {"temperature": "*fp32", "seeds": "*i64", "index": "*i64"}
    bounds = {"bounds": "*fp32", "lasts": "*i32"}
    sums = {"ranks": "*i64", "mosts": "*fp32", "totals": "*fp32"}
    filters = {"temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}
    splits, V32 = -(-V // sample._SPLIT), {"V": "i32"}
    rows = {"logits": t, "rows": "*i64"}
    whole = {"BLOCK": sample._BLOCK}
    edits = {"base": "*i32", "own": "*i32", "ids": "*i32"}
    edits |= dict.fromkeys(("bias", "factor", "penalty"), "*fp32")
    masks = {"number": "*i32", "words": "*i32"}
    for some, others in ((edits | masks, {}), (edits, masks), (masks, edits)):
        constants = whole | dict.fromkeys(others)
        yield source(sample._edit, constants, **rows, **some, out="*fp32", **V32)
    few, room = whole | {"GROUPS": sample._FEW.value}, {"scaled": "*fp32", "kept": "*fp32"}
    yield source(*(sample._bounds, few), **rows, **filters, **room, ids="*i32", **bounds, **V32)
    split = {"BLOCK": sample._SPLIT}
    yield source(sample._best_of_split, split, **rows, **asked, **bounds, best="*i64", **V32)
    merged = {"BLOCK": 1 << (splits - 1).bit_length()}
    yield source(sample._best_of_all, merged, best="*i64", out="*i64", splits="i32")
    split |= {"K": K}
    yield source(top_children._best_of_split, split, logits=t, **asked, **sums, **V32, tau="fp32")
    merged = {"K": K, "SPLITS": merged["BLOCK"], "BLOCK": 1 << (splits * K - 1).bit_length()}
    yield source(top_children._best_of_all, merged, **sums, out="*i32", splits="i32")


def said(t):
    given = {"tokens": "*i64", **dict.fromkeys(("likeliest", "out"), "*i32")}
    yield source(
        top_children._rank, {"BLOCK": top_children._BLOCK}, logits=t, **given, V="i32", width="i32"
    )


def variants(x):
    return (x, with_ones(x)) if "*bf16" in x.signature.values() else (x,)


def asked_for(which):
    """All that a model may call, or of each kernel the one for bfloat16, which models call most."""
    if which == "all":
        return chain.from_iterable(variants(plain) for plain in sources())
    return {x.fn: x for x in sources(("*bf16", tl.bfloat16))}.values()


def main(which="all"):
    for x in asked_for(which):
        kernel = compile(x, target=HOPPER)
        shared = kernel.metadata.shared
        print(f"{x.name:16} {len(kernel.asm['cubin']):6} bytes, {shared} bytes of shared memory")
        assert shared <= 227 << 10, "more shared memory than an SM has"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
