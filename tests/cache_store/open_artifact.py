#!/usr/bin/env python3
"""Opens an exported cache with the public safetensors package and checks it against cache_store/FORMAT.md.

    tests/cache_store/open_artifact.py FILE [--json]

Needs the packages safetensors and numpy. Prints what the artifact says; exits 1 with one line if anything is wrong.
"""

import argparse
import hashlib
import json
import sys

import numpy
from safetensors import safe_open

PREFIX = b'{"__metadata__":{"stillhouse.sha256":"'
DTYPES = {"F32": "float32", "F16": "float16", "I32": "int32"}


def crc_table() -> list:
    table = []
    for i in range(256):
        for _ in range(8):
            i = (i >> 1) ^ (0x82F63B78 if i & 1 else 0)
        table.append(i)
    return table


def crc32c(data: bytes, table: list) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def check(condition: bool, problem: str) -> None:
    if not condition:
        sys.exit(f"open_artifact: {problem}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()

    with open(arguments.file, "rb") as stream:
        content = stream.read()
    check(content[8 : 8 + len(PREFIX)] == PREFIX, "the header does not begin as an artifact's")
    at = 8 + len(PREFIX)
    digest = hashlib.sha256(content[:at] + b"0" * 64 + content[at + 64 :]).hexdigest()
    check(content[at : at + 64].decode() == digest, "the SHA-256 does not match")

    header_length = int.from_bytes(content[:8], "little")
    offsets = json.loads(content[8 : 8 + header_length])
    table = crc_table()
    with safe_open(arguments.file, framework="numpy") as artifact:
        metadata = artifact.metadata()
        check(set(metadata) == {"stillhouse.sha256", "stillhouse.artifact"}, "unexpected metadata keys")
        header = json.loads(metadata["stillhouse.artifact"])
        shape = (header["kv_heads"], header["slots"], header["head_dim"])
        expected = {}
        for layer in range(header["layers"]):
            dtype = header["fingerprints"]["dtype"]
            expected[f"layer.{layer}.k"] = expected[f"layer.{layer}.v"] = (dtype, shape)
            if header["has_beta"]:
                expected[f"layer.{layer}.beta"] = ("F32", shape[:2])
            if header["has_positions"]:
                expected[f"layer.{layer}.positions"] = ("I32", shape[:2])
        check(set(artifact.keys()) == set(expected), "the tensors are not those that the header promises")
        check(set(header["crc32c"]) == set(expected), "the checksums are not those of the tensors")
        for name, (dtype, want) in expected.items():
            begin, end = (8 + header_length + offset for offset in offsets[name]["data_offsets"])
            check(f"{crc32c(content[begin:end], table):08x}" == header["crc32c"][name], f"{name}: wrong CRC32C")
            check(tuple(offsets[name]["shape"]) == want, f"{name}: wrong shape")
            check(offsets[name]["dtype"] == dtype, f"{name}: wrong dtype")
            if dtype in DTYPES:  # numpy has no bfloat16
                tensor = artifact.get_tensor(name)
                check(tensor.shape == want and tensor.dtype == DTYPES[dtype], f"{name}: safetensors reads it otherwise")
                check(tensor.tobytes() == content[begin:end], f"{name}: safetensors reads other bytes")
                check(dtype == "I32" or bool(numpy.isfinite(tensor).all()), f"{name}: not finite")

    summary = {key: header[key] for key in ("method", "layers", "kv_heads", "slots", "head_dim", "logical_length", "quality")}
    summary["bytes"] = len(content)
    summary["tensors"] = len(expected)
    if arguments.json:
        print(json.dumps(summary))
    else:
        for key, value in summary.items():
            print(f"{key}: {value}")


main()
