#!/usr/bin/env python3
"""Writes the seeds of tests/fuzz/corpus/artifact from FORMAT.md alone, without any code of the server.

    tests/cache_store/make_artifact_seeds.py FOLDER

sample.safetensors is also the artifact that artifact_test.cc opens as an independent witness of the format.
"""

import hashlib
import json
import pathlib
import struct
import sys


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def container(metadata: dict, tensors: list) -> bytes:
    header, data = {"__metadata__": metadata}, b""
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text + data


def artifact(layers=1, heads=2, slots=3, width=2, beta=True, positions=False, **changes) -> bytes:
    tensors = []
    for layer in range(layers):
        fill = lambda n, salt: bytes((salt + 13 * i) % 251 for i in range(n))
        tensors.append((f"layer.{layer}.k", "F32", [heads, slots, width], fill(4 * heads * slots * width, layer)))
        tensors.append((f"layer.{layer}.v", "F32", [heads, slots, width], fill(4 * heads * slots * width, layer + 50)))
        if beta:
            tensors.append((f"layer.{layer}.beta", "F32", [heads, slots], struct.pack(f"<{heads * slots}f", *range(heads * slots))))
        if positions:
            tensors.append((f"layer.{layer}.positions", "I32", [heads, slots], struct.pack(f"<{heads * slots}i", *range(heads * slots))))
    header = {
        "version": 1, "method": "CARTRIDGE",
        "fingerprints": {"model": "m", "tokenizer": "t", "chat_template": "c", "rope_layout": "half", "rope_scaling": "none", "dtype": "F32"},
        "layers": layers, "kv_heads": heads, "head_dim": width, "slots": slots, "logical_length": 40, "position_rule": "keep",
        "has_bos": True, "has_beta": beta, "has_positions": positions, "frozen_slots": 1, "training_horizon": 0,
        "corpus_sha256": hashlib.sha256(b"corpus").hexdigest(), "corpus_tokens": 40, "create_unix_micros": 1,
        "hyperparameters": {"lr": 0.02}, "versions": {}, "quality": {"recovered": 0.9, "questions": ["é", None, True]},
        "crc32c": {name: f"{crc32c(content):08x}" for name, _, _, content in tensors},
    }
    header.update(changes)
    file = container({"stillhouse.sha256": "0" * 64, "stillhouse.artifact": json.dumps(header)}, tensors)
    digest = hashlib.sha256(file).hexdigest().encode()
    at = file.index(b'"stillhouse.sha256":"') + len(b'"stillhouse.sha256":"')
    return file[:at] + digest + file[at + 64:]


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    sample = artifact()
    seeds = {
        "sample.safetensors": sample,
        "two_layers.safetensors": artifact(layers=2, positions=True),
        "newer.safetensors": artifact(version=2),
        "no_beta.safetensors": artifact(beta=False),
        "lying_slots.safetensors": artifact(slots=3, layers=1, frozen_slots=9),
        "truncated.safetensors": sample[:-5],
        "plain.safetensors": container({"format": "pt"}, [("w", "BF16", [2, 2], b"12345678"), ("e", "U8", [0], b"")]),
        "empty.safetensors": struct.pack("<Q", 2) + b"{}",
        "overflow.safetensors": struct.pack("<Q", 73) + b'{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}',
        "nested.json": b'{"a":[[[[{"b":[1,2.5,-3,1e300,"\\u00e9\\ud83d\\ude00",null,true]}]]]]}',
    }
    for name, content in seeds.items():
        (folder / name).write_bytes(content)
    print(f"{len(seeds)} seeds in {folder}")


main()
