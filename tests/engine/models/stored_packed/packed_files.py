"""Model folders packed as GPTQ, AWQ and compressed-tensors write them, by the published descriptions of their files, and their
twins of plain numbers.

Each number is quantized and packed by itself with Python's whole numbers, so that nothing here can be wrong in the way in
which what reads it would be.
"""

from __future__ import annotations

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


FORMS = {
    "gptq": ("gptq", {}),
    "gptq-v2": ("gptq", {"form": "gptq_v2"}),
    "gptq-ordered": ("gptq", {"ordered": True}),
    "gptq-symmetric": ("gptq", {"symmetric": True, "group": -1}),
    "gptq-8": ("gptq", {"bits": 8}),
    "gptq-3": ("gptq", {"bits": 3}),
    "gptq-2": ("gptq", {"bits": 2, "symmetric": True}),
    "awq": ("awq", {}),
    "packed": ("packed", {}),
    "packed-channel-8": ("packed", {"bits": 8, "group": -1}),
    "packed-uneven": ("packed", {"symmetric": False}),
    "packed-ordered": ("packed", {"ordered": True}),
    "packed-3": ("packed", {"bits": 3, "symmetric": False}),
    "packed-3-whole": ("packed", {"bits": 3, "symmetric": False, "whole": True}),
    "packed-7-whole": ("packed", {"bits": 7, "group": -1, "whole": True}),
    "eights": ("eights", {}),
    "mxfp4": ("floats", {"group": 32}),
    "nvfp4": ("floats", {"group": 16}),
    "modelopt": ("modelopt", {}),
}
"""Of `packed_folders`: its kind and what else it is told, by a name."""


def signed(word):
    return word - (1 << 32) if word >= 1 << 31 else word


def words_of(codes, bits):
    """Codes one behind the other, from the lowest bits on, in words of 32 bits, as int32."""
    stream = 0
    for place, code in enumerate(codes):
        stream |= int(code) << (place * bits)
    count = -(-len(codes) * bits // 32)
    return [signed(stream >> (32 * word) & 0xFFFFFFFF) for word in range(count)]


def in_whole_words(codes, bits):
    """Codes [rows, n] as compressed-tensors wrote them for long: as many in each word as fit, none across its end."""
    each = 32 // bits
    return torch.tensor(
        [[words_of(row[at : at + each], bits)[0] for at in range(0, len(row), each)] for row in codes.tolist()],
        dtype=torch.int32,
    )


def in_words(codes, bits):
    """The same for each row [rows, n]."""
    return torch.tensor([words_of(row, bits) for row in codes.tolist()], dtype=torch.int32)


def quantized(weight, bits, of_column, *, symmetric=False, dtype=torch.float16):
    """Codes [rows, columns], scales and zero points [rows, groups], and what they stand for, of a weight whose columns are of
    these groups."""
    most = (1 << bits) - 1
    count = int(of_column.max()) + 1
    rows, columns = weight.shape
    codes, out = torch.empty(rows, columns, dtype=torch.int64), torch.empty(rows, columns)
    scales, zeros = torch.empty(rows, count, dtype=dtype), torch.empty(rows, count, dtype=torch.int64)
    for group in range(count):
        part = weight[:, of_column == group].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).clamp(min=1e-5).to(dtype)
        zero = torch.full_like(low, (most + 1) // 2) if symmetric else (-low / scale.float()).round().clamp(1, most)
        found = ((part / scale.float()[:, None]).round() + zero[:, None]).clamp(0, most).long()
        codes[:, of_column == group] = found
        scales[:, group], zeros[:, group] = scale, zero.long()
        out[:, of_column == group] = (found - zero.long()[:, None]) * scale.float()[:, None]
    return codes, scales, zeros, out


def side_by_side(columns, group):
    return torch.arange(columns) // (columns if group == -1 else group)


def gptq(weight, *, bits=4, group=32, symmetric=False, ordered=False, form="gptq"):
    """The tensors of a layer, and what they stand for."""
    of_column = side_by_side(weight.shape[1], group)
    if ordered:
        of_column = of_column[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(7))]
    codes, scales, zeros, out = quantized(weight, bits, of_column, symmetric=symmetric)
    stored = zeros if form == "gptq_v2" else zeros - 1
    return {
        "qweight": in_words(codes, bits).T.contiguous(),
        "qzeros": in_words(stored.T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": of_column.to(torch.int32),
    }, out


def awq(weight, *, group=32):
    codes, scales, zeros, out = quantized(weight, 4, side_by_side(weight.shape[1], group))

    def in_turn(each):
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return in_words(each.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    found = {"qweight": in_turn(codes.T), "qzeros": in_turn(zeros.T), "scales": scales.T.contiguous()}
    return found, out


def packed_integers(weight, *, bits=4, group=32, symmetric=True, ordered=False, whole=False):
    words = in_whole_words if whole else in_words
    of_column = side_by_side(weight.shape[1], group)
    if ordered:
        of_column = of_column[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(8))]
    codes, scales, zeros, out = quantized(weight, bits, of_column, symmetric=symmetric, dtype=torch.bfloat16)
    found = {
        "weight_packed": words(codes, bits), "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }  # fmt: skip
    if not symmetric:
        found["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    if ordered:
        found["weight_g_idx"] = of_column.to(torch.int32)
    return found, out


def eight_bit_integers(weight, bits=8):
    """Integers of a byte each; of fewer bits where so few are said."""
    most = (1 << (bits - 1)) - 1
    scale = (weight.abs().amax(1, keepdim=True) / most).bfloat16()
    numbers = (weight / scale.float()).round().clamp(-most - 1, most)
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale.float()


def four_bit_floats(weight, *, group):
    """NVFP4 with groups of 16 and MXFP4 with groups of 32."""
    parts = weight.unflatten(1, (-1, group)).float()
    largest = parts.abs().amax(-1)
    if group == 16:
        whole = 448 * 6 / largest.max()
        scales = (largest / 6 * whole).to(torch.float8_e4m3fn)
        step = scales.float() / whole
    else:
        exponents = (largest / 6).clamp(min=1e-30).log2().ceil().clamp(-127, 127)
        scales, step = (exponents + 127).to(torch.uint8), exponents.exp2()
    sizes = torch.tensor(E2M1)
    nearest = (parts.abs()[..., None] / step[..., None, None].clamp(min=1e-30) - sizes).abs().argmin(-1)
    out = (sizes[nearest] * parts.sign() * step[..., None]).flatten(1)
    codes = (nearest + 8 * (parts < 0)).flatten(1)
    found = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), "weight_scale": scales}
    return (found | {"weight_global_scale": whole.reshape(1)} if group == 16 else found), out


def of_model_optimizer(weight, *, group=16):
    """NVFP4 as NVIDIA's Model Optimizer writes it, whose scale of the whole is multiplied with."""
    found, out = four_bit_floats(weight, group=group)
    return {
        "weight": found["weight_packed"], "weight_scale": found["weight_scale"],
        "weight_scale_2": (1 / found["weight_global_scale"]).reshape(()), "input_scale": torch.tensor(0.25),
    }, out  # fmt: skip


def note_of(kind, **told):
    """What config.json says of it."""
    bits, group = told.get("bits", 4), told.get("group", 32)
    if kind == "gptq":
        return {
            "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": told.get("ordered", False),
            "sym": told.get("symmetric", False), "checkpoint_format": told.get("form", "gptq"),
        }  # fmt: skip
    if kind == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    if kind == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    weights = {
        "num_bits": bits, "type": "int", "symmetric": told.get("symmetric", True),
        "strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group,
    }  # fmt: skip
    form = "pack-quantized"
    if kind == "eights":
        weights |= {"num_bits": told.get("bits", 8), "strategy": "channel", "group_size": None}
        form = "int-quantized"
    if kind == "floats":
        weights |= {"type": "float", "strategy": "tensor_group" if group == 16 else "group", "group_size": group}
        form = "nvfp4-pack-quantized" if group == 16 else "mxfp4-pack-quantized"
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip


PACKERS = {
    "gptq": gptq, "awq": awq, "packed": packed_integers, "eights": eight_bit_integers, "floats": four_bit_floats,
    "modelopt": of_model_optimizer,
}  # fmt: skip


def packed_folders(plain, where, kind, *, left=(), **told):
    """The model of a folder packed so, and a twin of what the packed numbers stand for, in float32; `left` are ends of names of
    layers that stay plain."""
    for name in ("packed", "twin"):
        shutil.copytree(plain, where / name)
    packed = load_file(where / "packed" / "model.safetensors")
    twin = dict(packed)
    for key, weight in list(packed.items()):
        name = key.removesuffix(".weight")
        if "layers." not in key or weight.dim() != 2 or name.endswith((".gate", *left)):
            continue
        tensors, twin[key] = PACKERS[kind](weight.float(), **told)
        del packed[key]
        packed |= {f"{name}.{end}": value.contiguous() for end, value in tensors.items()}
    for name, tensors in (("packed", packed), ("twin", twin)):
        save_file(
            {key: value.contiguous() for key, value in tensors.items()},
            where / name / "model.safetensors",
            metadata={"format": "pt"},
        )
    config = json.loads((where / "packed" / "config.json").read_text())
    config["quantization_config"] = note_of(kind, **told)
    (where / "packed" / "config.json").write_text(json.dumps(config))
    return where / "packed", where / "twin"
