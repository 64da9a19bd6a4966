#!/usr/bin/env python3
"""Prints quickstart.sh's comparison from the JSON that the command line wrote into a folder."""
import json
import os
import sys
import textwrap

ROWS = [
    ("none", "no document"),
    ("prompt", "document in the prompt"),
    ("full", "full cache"),
    ("cartridge", "cartridge"),
]


def read(folder, name):
    path = os.path.join(folder, name + ".jsonl")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def size(n):
    n = float(n)
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.1f} {unit}" if unit != "B" else f"{n:.0f} B"
        n /= 1024
    return f"{n:.1f} GiB"


def seconds(s):
    return f"{s:.2f} s" if s >= 1 else f"{s * 1000:.0f} ms"


def main():
    folder = sys.argv[1]
    answers = {name: read(folder, name) for name, _ in ROWS}
    with open(os.path.join(folder, "cartridge.json"), encoding="utf-8") as file:
        cache = json.load(file)
    quality = cache.get("quality", {})
    recovered = {row["memory"]: row.get("recovered") for row in quality.get("rows", [])}
    recovered["cartridge"] = quality.get("recovered", recovered.get("cache"))
    recovered["prompt"] = recovered.get("full")

    for i, asked in enumerate(answers["cartridge"]):
        print("\n" + asked["question"])
        for name, title in ROWS:
            if not answers[name]:
                continue
            text = " ".join(answers[name][i]["answer"].split()) or "(nothing)"
            lines = textwrap.wrap(text, 88)
            print(f"  {title:<24}{lines[0]}")
            for line in lines[1:]:
                print(" " * 26 + line)

    print(f"\n{'MEMORY':<24}{'FIRST TOKEN':>13}{'KV MEMORY':>13}{'RECOVERED':>11}")
    for name, title in ROWS:
        rows = answers[name]
        if not rows:
            print(f"{title:<24}{'-':>13}{'-':>13}{'-':>11}  (does not fit the model's context)")
            continue
        first = sorted(row["first_token_seconds"] for row in rows)[len(rows) // 2]
        kv = max(int(row["finish"]["usage"]["kv_bytes"]) for row in rows)
        share = recovered.get(name)
        print(f"{title:<24}{seconds(first):>13}{size(kv):>13}{'-' if share is None else f'{share:.2f}':>11}")
    if recovered.get("truncated") is not None:
        print(f"{'first tokens, same size':<24}{'':>13}{size(cache['canonical_bytes']):>13}{recovered['truncated']:>11.2f}")
    print("\nFirst token: median over the questions. KV memory: what an answer attends to, its own tokens included.")
    source = "the document's questions" if quality.get("question_source") == "uploaded" else "held-out questions"
    print(f"Recovered: 0 without the document, 1 with all of it, on {quality.get('questions', 0)} of {source}.")


if __name__ == "__main__":
    main()
